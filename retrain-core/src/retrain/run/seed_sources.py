"""The sources of randomness that `[training] seeds` sets apart, and the streams of a run that belong to each.

Every stream has a purpose (`retrain.kernel.seeding`). A purpose that is listed here follows its source's seed where
`[training] seeds` names one; without, and every purpose that is not listed, such as a plugin's own, follows `seed`, and
an evaluation's `[eval] seed`. No stream changes unless its own source is named.
"""

from __future__ import annotations

from collections.abc import Mapping

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import SeedSource
from retrain.kernel.seeding import Seeds

PURPOSES: Mapping[SeedSource, tuple[str, ...]] = {
    # which prompts, in which order they are learnt from
    "data": ("shuffle", "sampler", "max_examples", "minibatches", "sft"),
    "initialisation": ("lora init",),
    # completions, their worlds and scores, and draws from them
    "sampling": ("sample", "clip_cov", "environment", "judge markers", "random_reward"),
    # Completions of held-out examples only: their choice stays with [eval] seed, so that runs can be compared.
    "evaluation": ("eval",),
}


def set_apart(config: Config) -> dict[str, int]:
    return {purpose: seed for source, seed in config.training.seeds.items() for purpose in PURPOSES[source]}


def run_seeds(config: Config, root: int | None = None) -> Seeds:
    """Return the seeds of a run with this `root`; without one, from `[training] seed`, drawn where it is -1."""
    return Seeds(Seeds.from_config(config.training.seed).root if root is None else root, set_apart(config))


def sample_seed(seed: int, prompt: int, index: int) -> int:
    """Seed of completion `index` of prompt number `prompt`, outside of runs."""
    return Seeds(seed).derive("sample", prompt, index)
