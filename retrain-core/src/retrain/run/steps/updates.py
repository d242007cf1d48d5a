"""Several optimizer steps per batch of samples, all at the learning rate of their step."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.errors import BackendError, NonFiniteError, OutOfMemoryError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import TrainBatch, TrainReport, TrainRow
from retrain.run.interrupts import Interrupts
from retrain.text.amounts import counted

LOG = logging.getLogger("retrain")


class Updates:
    """Trains a step: `[training] epochs` passes over its groups, in `minibatches` optimizer steps each.

    A group stays in one minibatch; which groups share one is random, and another for every step and epoch, and within a
    minibatch rows keep the order of the step. With one update nothing is drawn, and the backend gets the step
    unchanged.
    """

    def __init__(self, config: Config, backend: Backend, seeds: Seeds, stops: Interrupts) -> None:
        self._config, self._backend, self._seeds, self._stops = config, backend, seeds, stops
        self._course, self._is_told = Course.of(config), False
        self._wanted, self._epochs = config.training.minibatches, config.training.epochs
        if self._course.warning:
            LOG.warning("%s", self._course.warning)

    def train(self, batch: TrainBatch) -> TrainReport:
        """Make all updates of the step. An error of the first one is raised: it has changed nothing.

        A later update that is not finite ends the step there. From the second one on no stop interrupts the step.
        """
        first, *others = self._minibatches(batch)
        done, rejected = [self._backend.train(first)], ""
        self._refuse_other_rate(first, done[0])
        with self._stops.held():
            for minibatch in others:
                try:
                    done.append(self._backend.train(minibatch))
                except NonFiniteError as error:
                    rejected = f"update {minibatch.update + 1} of {minibatch.updates}: {error.problems[0].what}"
                    break
                except OutOfMemoryError as error:
                    # As an OutOfMemoryError the step would be tried again, with updates made twice.
                    raise BackendError(*error.problems) from error
        minibatches = first.updates // self._epochs
        return combined(done, minibatches, rejected=rejected) if others else done[0]

    def _minibatches(self, batch: TrainBatch) -> list[TrainBatch]:
        batch = replace(batch, lr=None if self._course.is_constant else self._course.rate(batch.step))
        groups = sorted({row.group for row in batch.rows if row.action_T.any()})
        parts = max(1, min(self._wanted, len(groups)))
        if parts < self._wanted and not self._is_told:
            self._is_told = True
            told = "minibatches = %d, but step %d trains only %s: such a step takes one minibatch per group"
            LOG.warning(told, self._wanted, batch.step, counted(parts, "group"))
        updates = parts * self._epochs
        if updates == 1:
            return [batch]
        batch = replace(batch, rows=self._with_trainer_logprobs(batch), updates=updates)
        found: list[TrainBatch] = []
        # Masked sequences of groups without a row count in the denominator of the loss too; they are spread evenly.
        elsewhere = batch.num_masked - sum(group in groups for group in batch.masked_groups)
        for epoch in range(self._epochs):
            order = self._seeds.stream("minibatches", batch.step, epoch).permutation(groups)
            for part, chosen in enumerate(np.array_split(order, parts)):
                rows = tuple(row for row in batch.rows if row.group in chosen)
                masked = tuple(group for group in batch.masked_groups if group in chosen)
                num_masked = len(masked) + elsewhere // parts + (part < elsewhere % parts)
                given = replace(batch, rows=rows, num_masked=num_masked, masked_groups=masked)
                found.append(replace(given, update=len(found)))
        return found

    def _with_trainer_logprobs(self, batch: TrainBatch) -> tuple[TrainRow, ...]:
        """Return the rows, for an importance weight with the trainer's log-probabilities before the first update.

        The loss's ratio is relative to those, and the weight compares them with the sampler's.
        """
        if not self._config.algorithm.tis_cap and not self._config.algorithm.is_bounds:
            return batch.rows
        measure = getattr(self._backend, "logprobs", None)
        found = measure(batch.rows, batch.temperature) if measure else None
        if found is None:
            name = self._config.backend.backend
            what = f"backend {name!r} reports no log-probabilities: tis_cap needs them with several updates per step"
            fix = "set tis_cap = 0, or minibatches = 1 and epochs = 1"
            where = self._config.place("algorithm.tis_cap")
            raise BackendError(Problem(code="backend.no-logprobs", where=where, what=what, fix=fix))
        return tuple(
            replace(
                row,
                logprobs_T=logprobs_T,
                engine_logprobs_T=row.logprobs_T if row.engine_logprobs_T is None else row.engine_logprobs_T,
            )
            for row, logprobs_T in zip(batch.rows, found, strict=True)
        )

    def _refuse_other_rate(self, batch: TrainBatch, report: TrainReport) -> None:
        # A backend that ignores the rate of the batch would train at a constant one without a sign of it.
        if batch.lr in (None, report.lr):
            return
        what = f"backend {self._config.backend.backend!r} does not train at the learning rate of [optimizer] schedule"
        fix = 'remove schedule and warmup_steps, or use backend = "local"'
        where = self._config.place("optimizer.schedule")
        raise BackendError(Problem(code="backend.no-schedule", where=where, what=what, fix=fix))


def combined(reports: Sequence[TrainReport], minibatches: int, *, rejected: str = "") -> TrainReport:
    """Combine the reports of a step's updates, `minibatches` of which see each token once.

    Loss and clip fraction are means over the action tokens of all updates, the gradient norm over the updates.
    """
    tokens = [report.num_tokens for report in reports]
    clips = tuple(each.clip_fraction for each in reports if each.clip_fraction is not None)
    norms = [each.grad_norm for each in reports if each.grad_norm is not None]
    is_clipped = len(clips) == len(reports)
    return replace(
        reports[0],
        loss=float(np.average([each.loss for each in reports], weights=tokens)),
        grad_norm=float(np.mean(norms)) if norms else None,
        # The tokens of one epoch: further epochs see the same ones again.
        num_tokens=sum(tokens[:minibatches]),
        clip_fraction=float(np.average(clips, weights=tokens)) if is_clipped else None,
        updates=len(reports),
        clip_fractions=clips if is_clipped else (),
        rejected=rejected,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """`[optimizer] schedule`, `warmup_steps` and `min_lr_ratio`, with the `lr` and `max_steps` of `[training]`."""

    lr: float
    max_steps: int
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    @classmethod
    def of(cls, config: Config) -> Course:
        return cls(
            lr=config.training.lr,
            max_steps=config.training.max_steps,
            schedule=config.optimizer.schedule,
            warmup_steps=config.optimizer.warmup_steps,
            min_lr_ratio=config.optimizer.min_lr_ratio,
        )

    @property
    def falls(self) -> bool:
        return self.schedule != "constant"

    @property
    def is_constant(self) -> bool:
        return not self.falls and not self.warmup_steps

    @property
    def warning(self) -> str:
        if self.warmup_steps <= self.max_steps:
            return ""
        return f"warmup_steps = {self.warmup_steps}, max_steps = {self.max_steps}: the learning rate never reaches lr"

    def rate(self, step: int) -> float:
        """The rate of a step, lr (f (1 - min_lr_ratio) + min_lr_ratio).

        With N = `max_steps` and W = `warmup_steps`, f = (step + 1) / W in the first W steps. Then constant: 1; linear:
        (N - step) / (N - W); cosine: (1 + cos(pi (step - W) / (N - W))) / 2.
        """
        warmup = self.warmup_steps
        done = (step - warmup) / max(self.max_steps - warmup, 1)
        after = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}
        factor = (step + 1) / warmup if step < warmup else after[self.schedule]
        return self.lr * (factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio)

    def __str__(self) -> str:
        """`cosine, from 0.003 down to 0.0003 within 70 steps, after 10 steps of warm-up`; `constant`."""
        parts = [self.schedule]
        if self.falls:
            parts.append(f"from {self.lr:g} down to {self.lr * self.min_lr_ratio:g} within {self.max_steps} steps")
        return ", ".join([*parts, f"after {self.warmup_steps} steps of warm-up"] if self.warmup_steps else parts)
