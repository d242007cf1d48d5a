"""Loads the examples of a set and what judges them, without those that the run trains on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Prompt, Verifier
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import SamplingParams
from retrain.run.seed_sources import set_apart
from retrain.tasks.prompts import build_pool
from retrain.tasks.scoring.build import build_service, comparing_rewards, load_data, uses_own_verifier
from retrain.tasks.scoring.trial import refuse_broken_rewards
from retrain.tasks.tasks import RewardVerifier, Tasks, closed_on_error
from retrain.text.chat import prompt_text
from retrain.text.context import context_length
from retrain.text.terminal_text import printable
from retrain.use.evaluate.sets import HELD_OUT, EvalSet

LOG = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedSet:
    """The prompts of a set, in the order in which they are sampled, and what judges the completions.

    `is_shared`: the verifier is the run's, which closes it. `context_length` limits an episode.
    """

    name: str
    prompts: Sequence[Prompt]
    samples: int
    seeds: Seeds
    params: SamplingParams
    cluster: str
    context: PluginContext
    verifier: Verifier
    is_shared: bool
    context_length: int | None

    @property
    def prefix(self) -> str:
        """What the fields of this set begin with."""
        return "eval_" if self.name == HELD_OUT else f"eval_{self.name}_"


def held_out_set(context: PluginContext, tasks: Tasks) -> LoadedSet:
    """The held-out examples of a run, judged as in training."""
    config = context.config
    training, cluster = config.training, str(config.table("eval", SetsKeys).cluster)
    prompts = tasks.pool.held_out
    _check_cluster(cluster, prompts, config.place("eval.cluster"))
    return LoadedSet(
        name=HELD_OUT,
        prompts=prompts,
        samples=config.eval.samples,
        seeds=Seeds(config.eval.seed, set_apart(config)),
        params=SamplingParams(max_tokens=training.max_tokens, temperature=training.temperature),
        cluster=cluster,
        context=context,
        verifier=tasks.verifier,
        is_shared=True,
        context_length=tasks.context_length,
    )


def load_set(each: EvalSet, context: PluginContext, tasks: Tasks | None = None) -> LoadedSet:
    """A set with its verifier, in the processes of the run's where it is the same; ConfigError when it is empty.

    Examples that `tasks` trains on, by id or by prompt, are left out.
    """
    LOG.info("Loading evaluation set %s...", each.name)
    context.config.refuse_lost(f"eval.sets.{each.name}")
    reading = replace(context, config=each.config)
    data = load_data(each.config, reading)
    if data.reward is not None and not each.names_reward and each.config.data.source != context.config.data.source:
        # the source's own verifier is the better one: as if no reward had been named
        tables = {name: type(table)() if name == "reward" else table for name, table in each.config.tables.items()}
        origins = {path: origin for path, origin in each.config.origins.items() if not path.startswith("reward.")}
        reading = replace(reading, config=replace(each.config, tables=tables, origins=origins))
    shared = _shared_verifier(tasks, data, reading.config, context.config)
    verifier = shared or RewardVerifier(build_service(reading.config, reading, data.reward))
    with closed_on_error(verifier):
        length = tasks.context_length if tasks else context_length(context.config, context.plugins)
        pool, notes = build_pool(
            data,
            reading.config,
            context.tokenizer,
            context.seeds,
            context_length=length,
            comparing=comparing_rewards(verifier.service.rewards),
        )
        for note in (*data.notes, *notes):
            LOG.info("[eval.sets.%s] %s", each.name, printable(note))
        prompts = _chosen(each, pool.train, tasks)
        _check_cluster(each.cluster, prompts, f"{each.place} cluster")
        if not shared:
            refuse_broken_rewards(verifier, prompts, reading.config)
    return LoadedSet(
        name=each.name,
        prompts=prompts,
        samples=each.samples,
        seeds=Seeds(each.seed, set_apart(context.config) if each.seed == context.config.eval.seed else {}),
        params=each.params,
        cluster=each.cluster,
        context=reading,
        verifier=verifier,
        is_shared=shared is not None,
        context_length=length,
    )


def _shared_verifier(tasks: Tasks | None, data: LoadedData, config: Config, of_run: Config) -> RewardVerifier | None:
    """The run's verifier if the set would build the same: equal rewards, and none that the data brings."""
    if tasks is None or not isinstance(tasks.verifier, RewardVerifier) or uses_own_verifier(data, config):
        return None
    names = tuple(config.reward.weights) or (config.reward.type,)
    is_same = config.tables.get("reward") == of_run.tables.get("reward") and tasks.verifier.names == names
    return tasks.verifier if is_same else None


def _chosen(each: EvalSet, prompts: Sequence[Prompt], tasks: Tasks | None) -> list[Prompt]:
    """As many prompts as the set asks for, of those that training does not see; ConfigError when there are too few.

    They are those with the smallest keyed hash of their id, as held-out ones are chosen.
    """
    examples = [prompt.example for prompt in tasks.pool.train] if tasks else []
    trained = {key for example in examples for key in (example.id, prompt_text(example))}
    left = [prompt for prompt in prompts if trained.isdisjoint((prompt.example.id, prompt_text(prompt.example)))]
    if count := len(prompts) - len(left):
        if not left:
            what = f"all {count} examples are trained on, and a rate on those is meaningless"
            raise ConfigError(Problem(where=each.place, what=what, fix="name other data, or use [eval] examples"))
        LOG.warning("[eval.sets.%s] %d of %d examples left out: they are trained on", each.name, count, len(prompts))
    if each.examples > len(left):
        what, fix = f"{each.examples} examples wanted, but the set has {len(left)}", "lower it, or leave it out"
        raise ConfigError(Problem(where=f"{each.place} examples", what=what, fix=fix))
    seeds = Seeds(each.seed)
    ranked = sorted(left, key=lambda prompt: seeds.derive("held-out", prompt.example.id)) if each.examples else left
    return ranked[: each.examples or None]


def _check_cluster(column: str, prompts: Sequence[Prompt], where: str) -> None:
    if not column or any(column in prompt.example.info for prompt in prompts):
        return
    columns = sorted({name for prompt in prompts for name in prompt.example.info})
    near = get_close_matches(column, columns, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"columns: {printable(', '.join(columns)) or 'none'}"
    raise ConfigError(Problem(where=where, what=f"no example has {column!r}", fix=fix))
