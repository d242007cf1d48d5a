"""What an engine or backend may do beside its contract: publish, measure, sample while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Publishing(Protocol):
    """An engine with its own copy of the policy, which must be updated to each new version."""

    def publish(self) -> None:
        """Make `sample` use `policy.version` from now on; BackendError when the copy cannot be verified to be it.

        Called after each change of the policy and before the next `sample`, with no `sample` under way.
        """


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
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining` and of its attribute; still supported."""

    samples_ahead: bool


def overlaps_training(backend: object) -> bool:
    """Whether a backend samples while it trains, in this run."""
    if isinstance(backend, OverlapsTraining):
        return backend.overlaps_training
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


@runtime_checkable
class Measuring(Protocol):
    """A backend or engine with fields of its own for the step's line in `metrics.jsonl`."""

    def metrics(self) -> Mapping[str, float]:
        """Finite numbers about the work since the previous call; called once per step."""
