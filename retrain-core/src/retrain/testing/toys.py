"""Toys for the suites: a credit flow, tasks, hostile texts, groups of completions, metrics, an adapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.credit.pipeline import CreditGroup
from retrain.credit.specs import TransformSpec, UncertaintyContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Completion, Example, Floats, Group, Kind, Score, StopReason
from retrain.testing.bench import Bench

# A minimal credit flow around the part under test.


def centred(rewards_G: Floats) -> Floats:
    """Reward minus the mean of its group, `[G]`."""
    return rewards_G - np.mean(rewards_G)


def surprisal(ctx: UncertaintyContext) -> Floats:
    """-log p of the sampled token, nats >= 0, `[T]`."""
    return np.maximum(-ctx.logprobs_T, 0.0)


FLAT = TransformSpec(name="flat")

# Tasks and hostile texts for rewards, data sources and environments.

MAX_EXAMPLES = 4
# Long enough for a quadratic regular expression to exceed the time limit of a score.
HUGE_CHARS = 200_000
TOYS = (
    Example(id="toy-sum", prompt="What is 12 + 30?", reference="42"),
    Example(id="toy-fraction", prompt="Half of one third?", reference=r"\frac{1}{6}", info={"level": 2}),
    Example(id="toy-word", prompt=({"role": "user", "content": "Capital of France?"},), reference="Paris"),
)
HOSTILE = {
    "nothing": "",
    "white space": " \n\t\u00a0\u2003",
    "a null character": "\x00 42 \x00",
    "terminal control": "\x1b[31mred\x1b[0m \x07\x08",
    "half a surrogate pair": "\ud800 42",
    "right-to-left marks and emoji": "\u202e24\u202c \U0001f9d1\u200d\U0001f680 e\u0301",
    "an open box": r"\boxed{" * 50,
    "a box that holds nothing": r"\boxed{}",
    "unbalanced braces": "}{" * 500 + r"\boxed{{{}",
    "not a number": r"\boxed{nan} \boxed{inf} \boxed{1e999}",
    "a huge power": r"\boxed{9^{9^{9^{9}}}}",
    "a division by zero": r"\boxed{\frac{1}{0}}",
    "markup and code": "<script>alert(1)</script> __import__('os').system('false') {{7*7}} %s %n ${HOME}",
    "one long word": "a" * HUGE_CHARS,
    "many lines": "4 2\n" * (HUGE_CHARS // 4),
}


def examples_for(bench: Bench) -> tuple[Example, ...]:
    """Return the first examples of the configured data source, or toy examples without one."""
    if "source" not in bench.given.get("data", {}):
        return TOYS
    config, context = bench.config, bench.context()
    source = build_part(
        Kind.DATA_SOURCE, config.data.source, "data.source", context, config.data.options, "data.options"
    )
    found: tuple[Example, ...] = source.load().examples[:MAX_EXAMPLES]
    if not found:
        what = f"data source {config.data.source!r} gave no examples to try the reward on"
        fix = "give a `config` whose [data] source has examples"
        raise ConfigError(Problem(code="conformance.no-examples", what=what, fix=fix))
    return found


def as_text(examples: Sequence[Example]) -> str:
    return json.dumps(
        [[e.id, e.prompt, e.reference, e.task, dict(e.info)] for e in examples], default=repr, sort_keys=True
    )


# Groups of completions for the credit suites: ordinary ones and edge cases.

LAMBDAS = (0.0, 0.5, 1.0)
PROMPT_TOKENS = 2
# Nats: exp of it is 0 in double precision.
NEARLY_IMPOSSIBLE = -750.0

REWARDS: dict[str, Floats] = {
    "some right, some wrong": np.array([1.0, 0.0, 0.0, 1.0]),
    "one right": np.array([0.0, 1.0, 0.0, 0.0]),
    "all right": np.ones(4),
    "all wrong": np.zeros(4),
    # The mean of three times 0.1 is not 0.1 in binary: a test for zero spread by == fails here.
    "equal and no round number": np.full(3, 0.1),
    "a group of one": np.array([1.0]),
    "graded": np.array([0.0, 0.25, 0.5, 1.0]),
    "negative and positive": np.array([-1.0, 1.0, -1.0, 0.5]),
    "mean zero": np.array([-1.0, 1.0]),
    "large": np.array([1e6, 0.0, -1e6]),
    # Divided by a standard deviation without a floor, this tiny spread becomes large advantages.
    "nearly equal": np.array([0.5, 0.5 + 1e-12, 0.5]),
    "128 completions": np.array([float(number % 3 == 0) for number in range(128)]),
}
# One token may hold part of a character, so its text may be empty.
TEXTS = ("Wait", ",", " 2", "+", "", "3", " é", "\n", "<|end|>")
LENGTHS: dict[str, tuple[int, ...]] = {
    "usual lengths": (6, 9, 4, 12),
    "an empty and a single-token completion": (0, 1, 5, 2),
    "nothing but empty completions": (0, 0, 0, 0),
    "a long completion": (4096, 3, 7, 1),
}


def groups(*, entropies: bool = True) -> list[CreditGroup]:
    """Return fresh, seeded groups: all patterns of rewards and lengths, extreme log-probabilities and marks."""
    shaped = [(name, REWARDS["some right, some wrong"], lengths) for name, lengths in LENGTHS.items()]
    usual = LENGTHS["usual lengths"]
    rewarded = [(f"rewards: {name}", r, (usual * len(r))[: len(r)]) for name, r in REWARDS.items() if len(r) <= 4]
    made = [_group(name, rewards_G, lengths, entropies) for name, rewards_G, lengths in (*shaped, *rewarded)]
    return [*made, *_extremes(entropies)]


def rewarded_steps(*, whole: bool) -> list[list[CreditGroup]]:
    """Return fresh steps: every reward pattern as a step of one group.

    With `whole`, also a step of all of them and a step without groups.
    """
    lengths = LENGTHS["usual lengths"]
    single, together = (
        [_group(name, r, tuple(np.resize(lengths, len(r))), False) for name, r in REWARDS.items()] for _ in range(2)
    )
    return [[group] for group in single] + ([together, []] if whole else [])


def reordered(group: CreditGroup, order: NDArray[np.int64]) -> CreditGroup:
    lists = ("tokens_G", "texts_G", "token_rewards_G", "squared_probs_G", "logprobs_G", "planning_G")
    moved: dict[str, Any] = {name: [getattr(group, name)[number] for number in order] for name in lists}
    # The rewards of single verifiers move along, or a weighted sum would mix completions.
    named_rewards = {name: rewards_G[order] for name, rewards_G in group.named_rewards.items()}
    return replace(group, **moved, rewards_G=group.rewards_G[order], named_rewards=named_rewards)


def scored_groups(credit_groups: Sequence[CreditGroup]) -> list[Group]:
    """Return the same groups in the form of a step: prompts of two tokens, completions, scores."""
    return [
        Group(
            example=Example(id=group.name, prompt="a prompt", reference="an answer"),
            completions=tuple(
                _completion(logprobs_A, group.entropies_G[number] if group.entropies_G else None)
                for number, logprobs_A in enumerate(group.logprobs_G)
            ),
            scores=tuple(Score.of(value) for value in group.rewards_G),
        )
        for group in credit_groups
    ]


def _completion(logprobs_A: Floats, entropies_A: Floats | None) -> Completion:
    prompt_T = np.zeros(PROMPT_TOKENS)
    length = PROMPT_TOKENS + len(logprobs_A)
    return Completion(
        tokens_T=np.arange(length),
        action_T=np.arange(length) >= PROMPT_TOKENS,
        logprobs_T=np.concatenate([prompt_T, logprobs_A]),
        entropies_T=None if entropies_A is None else np.concatenate([prompt_T, entropies_A]),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
    )


def _group(name: str, rewards_G: Floats, lengths: tuple[int, ...], entropies: bool) -> CreditGroup:
    stream = Seeds(0).stream("conformance", name)
    return CreditGroup(
        rewards_G=rewards_G.copy(),
        logprobs_G=[-stream.exponential(0.6, size=length) for length in lengths],
        planning_G=[stream.random(length) < 0.25 for length in lengths],
        entropies_G=[stream.exponential(0.8, size=length) for length in lengths] if entropies else None,
        named_rewards={"a": rewards_G.copy(), "b": -0.5 * rewards_G},
        **_optional_fields(lengths),
        name=name,
    )


def _optional_fields(lengths: Sequence[int]) -> dict[str, Any]:
    """Ids, texts, rewards and squared probabilities of tokens, and a greedy reward, for a part that needs them."""
    return {
        "tokens_G": [np.arange(length) for length in lengths],
        "texts_G": [list(islice(cycle(TEXTS), length)) for length in lengths],
        "token_rewards_G": [np.linspace(-0.1, 0.1, length) for length in lengths],
        "squared_probs_G": [np.linspace(0.2, 0.9, length) for length in lengths],
        "greedy": 0.5,
    }


def _extremes(entropies: bool) -> list[CreditGroup]:
    """Certain and nearly impossible tokens; all tokens planning, and none."""
    rewards_G = np.array([1.0, 0.0, 1.0])
    certain_T, impossible_T = np.zeros(5), np.full(5, NEARLY_IMPOSSIBLE)
    mixed_T = np.array([0.0, -1e-12, -20.0, NEARLY_IMPOSSIBLE, -0.7])
    return [
        CreditGroup(
            rewards_G=rewards_G.copy(),
            logprobs_G=[certain_T.copy(), impossible_T.copy(), mixed_T.copy()],
            planning_G=[np.full(5, is_planning) for _ in range(3)],
            entropies_G=[np.zeros(5), np.full(5, 12.0), np.array([0.0, 1e-12, 12.0, 0.0, 1.0])] if entropies else None,
            **_optional_fields((5, 5, 5)),
            name=f"extreme log-probabilities, {'every' if is_planning else 'no'} token planning",
        )
        for is_planning in (True, False)
    ]


# Lines of `metrics.jsonl` and an adapter as a run writes them, for recorders and health monitors.

STEPS = 30


def lines() -> list[dict[str, Any]]:
    """Return a run that learns, with an initial evaluation, steps that train nothing, and fields that come and go."""
    stream = Seeds(0).stream("conformance metrics")
    made: list[dict[str, Any]] = [{"step": -1, "condition": "toy", "eval_correct_rate": 0.25}]
    for step in range(STEPS):
        line = {
            "step": step,
            "condition": "toy",
            "loss": float(stream.normal()),
            "mean_reward": step / STEPS,
            "correct_rate": step / STEPS,
            "truncation_rate": 0.1,
            "mean_tokens": 40.0 + float(stream.normal()),
            "exec_entropy_mean": 1.0 - step / 100,
            "ratio_max": 1.0,
            "step_time_s": 0.5,
            "skipped": False,
            "all_wrong_groups": 1,
            "useful_groups": 3,
        }
        # A step with nothing to train on, as when every group is all right or all wrong.
        if step % 10 == 7:
            line |= {"loss": None, "ratio_max": None, "skipped": True}
        if step % 6 == 5:
            del line["exec_entropy_mean"]
        made.append(line)
    return made


def collapsing() -> list[dict[str, Any]]:
    """Return a run in which every metric goes wrong halfway and stays wrong."""
    broken = {
        "truncation_rate": 1.0,
        "correct_rate": 0.0,
        "mean_reward": 0.0,
        "mean_tokens": 4000.0,
        "exec_entropy_mean": 1e-6,
        "ratio_max": 1e6,
        "all_wrong_groups": 4,
        "useful_groups": 0,
    }
    return [line | broken if line["step"] >= STEPS // 2 else line for line in lines()]


def write_toy_adapter(folder: Path) -> None:
    """Write a PEFT adapter of rank 2 on one layer; its weights change nothing."""
    from safetensors.numpy import save_file

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    # B is zero, so the product B A adds nothing to the layer.
    tensors = {f"{layer}.lora_A.weight": np.ones((2, 8), "f4"), f"{layer}.lora_B.weight": np.zeros((8, 2), "f4")}
    save_file(tensors, folder / "adapter_model.safetensors")
