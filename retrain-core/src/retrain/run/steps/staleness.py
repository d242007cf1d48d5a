"""The lead of sampling over training, `[training] max_staleness`: its support and its correction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities
from retrain.kernel.errors import Problem

KEY = "training.max_staleness"
# One step ahead where the backend can sample while it trains, because that is free there; otherwise 0.
AUTO = -1


@runtime_checkable
class OverlapsTraining(Protocol):
    """A backend that can sample while it trains, because it samples from a separate copy of the policy.

    If `overlaps_training` is True, `train` runs in a separate thread. Meanwhile the run's thread calls `sample` for the
    next step, from the last published policy, the one before that update; and `metrics`, if it exists, for that step's
    line. Nothing else is called until both have ended. So that a resumed run can resample those completions, `save`
    also writes the policy before the last `publish`, with its version; after `load`, `sample` uses that one until
    `publish`.
    """

    overlaps_training: bool


@runtime_checkable
class KeepsVersions(Protocol):
    """A backend that samples while it trains, from any of the policies that it published last.

    It does so if `[training] max_staleness` = n is above 1. `sample` and `use_version` are then called in a separate
    thread, everything else in the run's. `publish` keeps a copy of the trained policy, next to the n before it, and
    does not change `sample`; `use_version` chooses the one that `sample` uses, by the number that `publish` returned.
    Neither is called during `sample`. `save` writes the copies too, and `load` brings them back.
    """

    def use_version(self, version: int) -> None:
        """Sample from this version from now on; BackendError when it is not among those kept."""


@runtime_checkable
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining` and of its attribute; still supported."""

    samples_ahead: bool


def overlaps_training(backend: object) -> bool:
    if isinstance(backend, OverlapsTraining):
        return backend.overlaps_training
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


def steps_ahead(config: Config, backend: object) -> int:
    """Number of steps that prompts are drawn ahead: step s is drawn when step s - 1 - this is over."""
    most = config.training.max_staleness
    return int(overlaps_training(backend)) if most == AUTO else most


def staleness_problems(config: Config, capabilities: Capabilities | None) -> Iterator[Problem]:
    """More steps than the backend declares, or back pressure with several."""
    most = config.training.max_staleness
    if capabilities is not None and most > capabilities.max_staleness:
        yield too_many(config, capabilities.max_staleness)
    if most > 1 and config.backpressure.enabled:
        what = f"max_staleness = {most} does not go with back pressure"
        why = "back pressure sizes a batch by the time of the previous step, and that step is still training"
        fix = "set max_staleness = 1, or [backpressure] enabled = false"
        yield Problem(code="config.staleness-and-pacing", where=config.place(KEY), what=what, why=why, fix=fix)


def too_many(config: Config, largest: int) -> Problem:
    most, backend = config.training.max_staleness, config.backend.backend
    what = f"max_staleness = {most}: backend {backend!r} can do at most {largest}"
    why, fix = "" if largest else "it samples and trains in turn", f"set max_staleness = {largest}"
    return Problem(code="backend.staleness-too-high", where=config.place(KEY), what=what, why=why, fix=fix)
