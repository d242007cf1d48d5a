"""How far sampling may be ahead of training, `[training] max_staleness`: who can do it, and what corrects for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities
from retrain.kernel.errors import Problem

KEY = "training.max_staleness"
AUTO = -1  # one step where the backend samples and trains at once, else none


@runtime_checkable
class OverlapsTraining(Protocol):
    """A backend that can sample while it trains, because it samples from a separate copy of the policy.

    If `overlaps_training` is True, `train` runs in a thread of its own. Meanwhile the run's thread calls `sample` for
    the next step, which uses the last published policy, the one before that update; and `metrics`, if it exists, for
    that step's line. Nothing else is called until both have ended. So that a resumed run can resample those
    completions, `save` also writes the policy before the last `publish`, with its version; after `load`, `sample` uses
    that one until `publish`.
    """

    overlaps_training: bool


@runtime_checkable
class KeepsVersions(Protocol):
    """A backend that samples while it trains, from any of the policies that it published last.

    It does so where `[training] max_staleness` = n is above 1. `sample` and `use_version` are then called in a thread
    of their own, everything else in the run's. `publish` keeps a copy of the trained policy, beside the n before it,
    and leaves `sample` as it is; `use_version` chooses the one that `sample` uses, by the number that `publish`
    returned. Neither is called during `sample`. `save` writes the copies too, and `load` brings them back.
    """

    def use_version(self, version: int) -> None:
        """Sample from this version from now on; BackendError when it is not among those kept."""


@runtime_checkable
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining` and of its attribute; still supported."""

    samples_ahead: bool


def overlaps_training(backend: object) -> bool:
    """Whether a backend samples while it trains, in this run."""
    if isinstance(backend, OverlapsTraining):
        return backend.overlaps_training
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


def steps_ahead(config: Config, backend: object) -> int:
    """How many steps the prompts of a step are drawn ahead: step s is drawn when step s - 1 - this is over."""
    most = config.training.max_staleness
    return int(overlaps_training(backend)) if most == AUTO else most


def staleness_problems(config: Config, capabilities: Capabilities | None) -> Iterator[Problem]:
    """More steps than the backend declares, and what chooses by the step before where there are several."""
    most = config.training.max_staleness
    if capabilities is not None and most > capabilities.max_staleness:
        yield too_many(config, capabilities.max_staleness)
    if most > 1 and config.backpressure.enabled:
        what = f"max_staleness = {most} does not go with back pressure"
        why = "it chooses the prompts of a step by the time of the one before, which is not over when they are sampled"
        fix = "set max_staleness = 1, or [backpressure] enabled = false"
        yield Problem(where=config.place(KEY), what=what, why=why, fix=fix)


def meaning(config: Config) -> str:
    """What the key makes of this run, for `retrain explain`; empty where it has its default."""
    most = config.training.max_staleness
    if most == AUTO:
        return ""
    if most == 0:
        return "none: sampling and training take turns"
    steps = f"{most} step{'s' if most > 1 else ''}"
    return f"step s is sampled with the policy after step s - {most + 1}, {steps} behind; {correction(config)}"


def correction(config: Config) -> str:
    """What corrects for completions of an older policy, and what bounds that."""
    ratio = "each token is weighted by p now / p when sampled, which does not correct for how likely its prefix is now"
    bounds: list[float] = config.algorithm.is_bounds
    if bounds:
        mode = config.algorithm.is_mode
        return f"the importance weight within is_bounds = {bounds} (is_mode = {mode}) corrects for it"
    if config.algorithm.tis_cap > 0.0:
        return f"the importance weight, at most tis_cap = {config.algorithm.tis_cap:g}, corrects for it"
    if config.algorithm.loss == "importance_sampling":
        return f"{ratio}; nothing bounds it: set [algorithm] is_bounds = [0.0, 2.0], or a loss that clips"
    return f"{ratio}; only the loss {config.algorithm.loss!r} bounds it, and [algorithm] is_bounds is not set"


def too_many(config: Config, largest: int) -> Problem:
    """The problem with more steps than a backend can do."""
    most, backend = config.training.max_staleness, config.backend.backend
    what = f"max_staleness = {most}: backend {backend!r} can do at most {largest}"
    why = "" if largest else "it samples and trains in turn"
    return Problem(where=config.place(KEY), what=what, why=why, fix=f"set max_staleness = {largest}")
