"""Fits the sizes of a first run to a machine whose speed was measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrain.run.configure import evaluations

# Targets for the user are 3 and 30 minutes; the rest is for longer answers, checkpoints and a busier machine.
FIRST_STEP_S, RUN_S = 150.0, 1500.0
STEP_S = 50.0  # so that a run has some 20 steps
EVALUATION_S = 60.0
# Cut in this order, each to its floor: short answers teach more than small groups, and one prompt a step is the last.
STEP_CUTS = (
    *(("max_tokens", 512), ("group_size", 8), ("max_tokens", 256), ("batch_size", 4), ("max_tokens", 128)),
    *(("group_size", 4), ("batch_size", 2), ("max_tokens", 32), ("batch_size", 1)),
)
EVALUATION_CUTS = (("eval_samples", 2), ("eval_examples", 16), ("eval_samples", 1), ("eval_examples", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds for a prompt's token, a decoding step, each token in it, a trained token, and to load the model.

    Prompts have about `prompt_tokens`; completions end after `mean_tokens`, the last of them after `longest_tokens`.
    """

    prefill_s: float
    decode_s: float
    sample_s: float
    train_s: float
    start_s: float
    prompt_tokens: float
    mean_tokens: float = math.inf
    longest_tokens: float = math.inf

    def sampling_s(self, prompts: int, completions: int, max_tokens: int) -> float:
        """Seconds to sample so many completions together; the prompt of a group counts once."""
        each, longest = min(self.mean_tokens, max_tokens), min(self.longest_tokens, max_tokens)
        decoding_s = longest * self.decode_s + completions * each * self.sample_s
        return prompts * self.prompt_tokens * self.prefill_s + decoding_s if completions else 0.0

    def training_s(self, prompts: int, completions: int, max_tokens: int) -> float:
        """Seconds to train on so many completions."""
        return (prompts * self.prompt_tokens + completions * min(self.mean_tokens, max_tokens)) * self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The keys on which the time of a run depends; `eval_every` = 0 evaluates only before and after training."""

    batch_size: int
    group_size: int
    max_tokens: int
    max_steps: int
    eval_examples: int
    eval_samples: int
    eval_every: int

    def step_s(self, speed: Speed) -> float:
        """Seconds of a step."""
        completions = self.batch_size * self.group_size
        trained_s = speed.training_s(self.batch_size, completions, self.max_tokens)
        return speed.sampling_s(self.batch_size, completions, self.max_tokens) + trained_s

    def evaluation_s(self, speed: Speed) -> float:
        """Seconds of one evaluation."""
        return speed.sampling_s(self.eval_examples, self.eval_examples * self.eval_samples, self.max_tokens)

    def training_s(self, speed: Speed) -> float:
        """Seconds of all steps."""
        return self.max_steps * self.step_s(speed)

    def evaluations_s(self, speed: Speed) -> float:
        """Seconds of all evaluations."""
        return evaluations(self.max_steps, self.eval_every) * self.evaluation_s(speed)

    def first_step_s(self, speed: Speed) -> float:
        """Seconds from the command to the end of the first step."""
        return speed.start_s + self.evaluation_s(speed) + self.step_s(speed)

    def run_s(self, speed: Speed) -> float:
        """Seconds of the whole run."""
        return speed.start_s + self.training_s(speed) + self.evaluations_s(speed)


def fit(wanted: Sizes, speed: Speed, *, keep_steps: bool = False) -> Sizes:
    """The largest sizes, none above those `wanted`, with which the first step and the run end in time.

    With `keep_steps` their number is the user's. On a machine too slow for the smallest sizes those are returned.
    """
    step_s = min(STEP_S, RUN_S / 2 / wanted.max_steps) if keep_steps else STEP_S
    sizes = wanted
    for name, floor in STEP_CUTS:
        while getattr(sizes, name) > floor and sizes.step_s(speed) > step_s:
            smaller = _halved(sizes, name, floor)
            if smaller.step_s(speed) == sizes.step_s(speed):  # completions end long before `max_tokens`
                break
            sizes = smaller
    evaluation_s = min(EVALUATION_S, FIRST_STEP_S - speed.start_s - sizes.step_s(speed), RUN_S / 4)
    for name, floor in EVALUATION_CUTS:
        while getattr(sizes, name) > floor and sizes.evaluation_s(speed) > evaluation_s:
            sizes = _halved(sizes, name, floor)
    candidates = _schedules(sizes, keep_steps=keep_steps)
    return next((each for each in candidates if _ends_in_time(each, speed)), replace(sizes, eval_every=0))


def _schedules(sizes: Sizes, *, keep_steps: bool) -> Iterator[Sizes]:
    """Most steps first, and for each number of them most evaluations first; the last is the least."""
    for steps in [sizes.max_steps] if keep_steps else range(sizes.max_steps, 0, -1):
        for every in dict.fromkeys((sizes.eval_every, steps // 2, 0)):
            if every < steps:
                yield replace(sizes, max_steps=steps, eval_every=every)


def _ends_in_time(sizes: Sizes, speed: Speed) -> bool:
    is_balanced = sizes.evaluations_s(speed) <= sizes.training_s(speed) / 2
    return sizes.run_s(speed) <= RUN_S and (is_balanced or not sizes.eval_every)


def _halved(sizes: Sizes, name: str, floor: int) -> Sizes:
    changes: dict[str, int] = {name: max(getattr(sizes, name) // 2, floor)}
    return replace(sizes, **changes)
