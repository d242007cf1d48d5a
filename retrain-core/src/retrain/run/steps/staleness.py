"""How far sampling may be ahead of training, `[training] max_staleness`: who can do it, and what corrects for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.overlap import Sample, Serial
from retrain.kernel.parts import Run
from retrain.run.steps.buffered import Buffered
from retrain.run.steps.overlapped import KeepsVersions, Overlapped, overlaps_training

KEY = "training.max_staleness"
AUTO = -1  # one step where the backend samples and trains at once, else none
LOG = logging.getLogger("retrain")


def arrangement(config: Config, backend: object) -> Callable[[Run, Sample], Serial]:
    """How sampling and training follow each other in a run with this backend; ConfigError for more than it can do."""
    most, is_able = config.value(KEY, AUTO), overlaps_training(backend)
    if most == 0 or (most == AUTO and not is_able):
        return lambda run, sample: Serial(run.parts.backend, run.parts.train, sample)
    if not is_able:
        raise ConfigError(_too_many(config, 0))
    if most in (AUTO, 1):
        return Overlapped
    if not isinstance(backend, KeepsVersions):
        raise ConfigError(_too_many(config, 1))
    LOG.info("Sampling runs up to %d steps ahead: %s.", most, correction(config))
    return partial(Buffered, backend=backend, most=most)


def steps_ahead(config: Config, backend: object) -> int:
    """How many steps the prompts of a step are drawn ahead: step s is drawn when step s - 1 - this is over."""
    most = config.value(KEY, AUTO)
    return int(overlaps_training(backend)) if most == AUTO else most


def staleness_problems(config: Config, capabilities: Capabilities | None) -> Iterator[Problem]:
    """More steps than the backend declares, and what chooses by the step before where there are several."""
    most = config.value(KEY, AUTO)
    if capabilities is not None and most > capabilities.max_staleness:
        yield _too_many(config, capabilities.max_staleness)
    if most > 1 and config.backpressure.enabled:
        what = f"max_staleness = {most} does not go with back pressure"
        why = "it chooses the prompts of a step by the time of the one before, which is not over when they are sampled"
        fix = "set max_staleness = 1, or [backpressure] enabled = false"
        yield Problem(where=config.place(KEY), what=what, why=why, fix=fix)


def meaning(config: Config) -> str:
    """What the key makes of this run, for `retrain explain`; empty where it has its default."""
    most = config.value(KEY, AUTO)
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


def _too_many(config: Config, largest: int) -> Problem:
    most, backend = config.value(KEY, AUTO), config.backend.backend
    what = f"max_staleness = {most}: backend {backend!r} can do at most {largest}"
    why = "" if largest else "it samples and trains in turn"
    return Problem(where=config.place(KEY), what=what, why=why, fix=f"set max_staleness = {largest}")
