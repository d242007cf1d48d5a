"""`[resume]`, and keys of other tables that select what a step samples and trains."""

from __future__ import annotations

from typing import Any, Literal

from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind


class ResumeTable(Table):
    """Continue an earlier run."""

    from_: str = key("", "Run folder to continue (`--resume DIR`).", alias="from", free_on_resume=True, is_path=True)
    anyway: bool = key(
        False,
        "Continue although configuration, code or data make it a different run.",
        free_on_resume=True,
        needs="resume.from_",
    )


class SelectionKeys(Table):
    """Keys of `[training]`: which completions of a step count, and how many groups it looks for."""

    overlong: Literal["keep", "mask", "drop"] = key(
        "keep", "Truncated completions: keep, mask (out of the loss) or drop (out of the baseline, too)."
    )
    soft_overlong: int = key(
        0, "Length of the zone below max_tokens in which the reward falls by up to 1; 0 = off.", ge=0
    )
    refill: int = key(0, "Further rounds of prompts, at most, until batch_size groups can teach; 0 = off.", ge=0)


class SamplerKeys(Table):
    """Keys of `[data]`: what chooses the prompts of a step."""

    sampler: str = key("uniform", "What chooses the prompts of each step: {names} or a plugin.", names=Kind.SAMPLER)
    sampler_params: dict[str, Any] = key({}, "Parameters of the sampler.")


class UpdateKeys(Table):
    """How often a step's groups are trained on."""

    minibatches: int = key(1, "Optimizer steps that share out the step's groups.", ge=1)
    epochs: int = key(1, "Passes over the step's groups, each of `minibatches` optimizer steps.", ge=1)


class StalenessKeys(Table):
    """How far sampling runs ahead of training."""

    max_staleness: int = key(
        -1, "Steps that sampling is ahead of training; 0 = in turn; -1 = 1 on split devices, else 0.", ge=-1, le=64
    )


class ScheduleKeys(Table):
    """The course of the learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = key("constant", "How lr falls until [training] max_steps.")
    warmup_steps: int = key(0, "Steps in which the learning rate rises to [training] lr.", ge=0)
    min_lr_ratio: float = key(0.0, "The rate never falls below this share of [training] lr.", ge=0.0, le=1.0)


class ControlKeys(Table):
    """What makes a run a control of another."""

    control: Literal["", "random_reward", "format_only", "no_update"] = key(
        "", "Make the run a control: training is rewarded by coin flips, or by form alone, or nothing is updated."
    )
