"""Backend `local` in one process, which owns the policy, samples from it, trains it and saves it."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from retrain.api import (
    ActionRow,
    BackendError,
    Capabilities,
    Config,
    Deliver,
    Engine,
    Feed,
    Floats,
    Measuring,
    Plugins,
    Problem,
    Publishing,
    Sample,
    SampleRequest,
    SamplingParams,
    ServedElsewhere,
    TopLogprobs,
    TrainBatch,
    TrainReport,
    stream_from,
)
from retrain_local.devices.choose import working_on
from retrain_local.devices.group import ALONE, Group
from retrain_local.model import checkpoint
from retrain_local.model.checkpoint import PublishedHistory
from retrain_local.model.pair import LocalPolicy, Pair
from retrain_local.plugin import CAPABILITIES
from retrain_local.sampling.split import sample_with
from retrain_local.training.budget import is_short
from retrain_local.training.step_loss import PolicyLoss
from retrain_local.training.trainer import Trainer

log = logging.getLogger("retrain")
OTHER_RANKS = (
    "This checkpoint is of %d ranks, and the run continues on %d: the same samples and gradients but for rounding, so "
    "not the same bits."
)
LIMITS_FILE = "sampler_limits.json"


class LocalBackend:
    """The model, its sampler and its trainer in one process; a `retrain.api.KeepsVersions` on split devices.

    The same seed on the same machine gives bit-identical tokens and adapters if the engine can guarantee that, which
    `capabilities` declare.
    """

    delivers_early = True  # as far as its engine does

    def __init__(
        self,
        *,
        pair: Pair,
        policies: Sequence[LocalPolicy],
        engine: Engine,
        trainer: Trainer,
        threads: int,
        training_threads: int | None = None,
        capabilities: Capabilities = CAPABILITIES,
        ahead: int = 0,
        group: Group = ALONE,
    ) -> None:
        self.capabilities = capabilities
        self.overlaps_training = ahead > 0
        self._ahead = ahead  # [training] max_staleness
        self._pair: Pair | None = pair
        self._trainer: Trainer | None = trainer
        self._policies = tuple(policies)
        self._engine, self._group = engine, group
        self._device = pair.trained.device
        self._threads, self._training_threads = threads, training_threads or threads
        self._version = 0
        self._in_use: int | None = None  # version that `sample` uses
        self._is_served = isinstance(engine, ServedElsewhere)
        self._history = PublishedHistory(pair, ahead) if ahead and not self._is_served else None
        self._beginning: Mapping[str, torch.Tensor] | None = None
        self._shown = 0  # version of the last weights from elsewhere

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Sample from the policy last published; `deliver` gets each completion early if the engine delivers early."""
        self._open()
        with self._sampling():
            return sample_with(self._engine, requests, params, deliver)

    def stream(self, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed) -> None:
        """See `retrain.api.StreamsTokens`; tokens come as they are sampled if the engine streams."""
        self._open()
        with self._sampling():
            stream_from(self._engine, requests, params, feed)

    def addresses(self) -> Sequence[tuple[str, str]]:
        return self._engine.addresses() if isinstance(self._engine, ServedElsewhere) else ()

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step; BackendError, with weights and optimizer unchanged, on a non-finite number."""
        pair, trainer = self._open()
        free_cache = getattr(self._engine, "free_cache", None)  # the next `sample` allocates one of the same size
        if free_cache is not None and self._is_short(pair):
            free_cache()
        with self._training():
            report = trainer.step(batch)
        self._version += 1
        return report

    def gradient(
        self, config: Config, plugins: Plugins, batch: TrainBatch, rows: Sequence[int]
    ) -> tuple[NDArray[np.float32], float, int]:
        """Under the loss that `config` names; see `Trainer.gradient`. `retrain replay` compares such gradients."""
        _, trainer = self._open()
        with self._training():
            return trainer.gradient(batch, rows, PolicyLoss.of(config, plugins))

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Log-probabilities of the trained policy; see `Trainer.logprobs`."""
        _, trainer = self._open()
        with self._training():
            return trainer.logprobs(rows, temperature)

    def top_logprobs(self, rows: Sequence[ActionRow], temperature: float, top: int) -> list[TopLogprobs]:
        _, trainer = self._open()
        with self._training():
            return trainer.top_logprobs(rows, temperature, top)

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Log-probabilities of the model that training began with, exactly; see `Trainer.logprobs`."""
        _, trainer = self._open()
        with self._training():
            return trainer.reference_logprobs(rows, temperature)

    @property
    def is_broken(self) -> bool:
        return self._group.is_broken

    def settle_sizes(self) -> None:
        """Let all ranks work with the smallest sizes that one of them has found memory for."""
        limits = self._policies[0].limits
        limits.tighten(self._group.gathered(lambda: limits))

    def publish(self) -> int:
        """Make the trained adapter the one that `sample` uses; returns the number of optimizer steps in it.

        Where sampling is more than one step ahead, only keep a copy of it for `use_version`. Servers get it at once:
        they end what they were asked before with the version that it was asked of.
        """
        pair, _ = self._open()
        if self._history:
            self._history.record(pair, self._version)
        if self._ahead <= 1 or self._is_served:
            self._hand_over(None, self._version)
        return self._version

    def use_version(self, version: int) -> None:
        """See `retrain.api.KeepsVersions`; servers sample a batch with the newest version that they have."""
        if self._history and version != self._in_use:
            self._hand_over(self._history.find(version), version)

    def metrics(self) -> Mapping[str, float]:
        """The engine's measurements since the last call."""
        return self._engine.metrics() if isinstance(self._engine, Measuring) else {}

    def save_adapter(self, folder: Path) -> None:
        """Write the trained adapter as plain PEFT files."""
        pair, _ = self._open()
        checkpoint.save_adapter(pair, folder, writes=not self._group.rank)

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments, step count and limits; with overlap also the adapters sampled from."""
        pair, trainer = self._open()
        kept = self._history.kept if self._history else {}
        before = {version: adapter for version, adapter in kept.items() if version != self._version}
        first, *others = (policy.limits for policy in self._policies)
        checkpoint.save_state(pair, trainer.optimizer.state, self._version, folder, first, before, group=self._group)
        if others:
            text = json.dumps([asdict(limits) for limits in others]) + "\n"
            (folder / LIMITS_FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, and publish it.

        With overlap it samples from the adapter before it until the next `publish` or `use_version`.
        """
        pair, trainer = self._open()
        moments, limits = trainer.optimizer.state, self._policies[0].limits
        self._version, published, ranks = checkpoint.load_state(pair, moments, folder, limits)
        if ranks != self._group.size and not self._group.rank:
            log.warning(OTHER_RANKS, ranks, self._group.size)
        if self._history is None:
            self.publish()
            return
        if (folder / LIMITS_FILE).is_file():
            others = json.loads((folder / LIMITS_FILE).read_text(encoding="utf-8"))
            for policy, other in zip(self._policies[1:], others, strict=False):
                policy.limits.restore(other)
        self._history.record(pair, self._version)
        self._history.reset(published or dict([*self._history.kept.items()][-1:]))
        version, adapter = [*self._history.kept.items()][-1]
        self._hand_over(adapter, version)

    def sample_from(self, folder: Path | None) -> None:
        """Sample from the adapter, or whole model, in `folder`; None = what training began with.

        What was trained is replaced; the optimizer is not. BackendError, and nothing changed, when it does not fit.
        """
        pair, _ = self._open()
        if self._beginning is None:
            self._beginning = checkpoint.beginning_of(pair)
        checkpoint.load_weights(pair, folder, self._beginning)
        self._version = 0 if folder is None else self._shown + 1
        self._shown = max(self._shown, self._version)
        self._hand_over(None, self._version)

    def close(self) -> None:
        """Release the model and its device memory."""
        if self._pair is None:
            return
        self._engine.close()
        self._pair = self._trainer = self._history = None
        for policy in self._policies:
            policy.sampler = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_short(self, pair: Pair) -> bool:
        """Whether the memory that sampling holds leaves too little for training."""
        trained, limits = pair.trained, self._policies[0].limits
        return not self.overlaps_training and is_short(trained.shape, trained.dtype, self._device, limits)

    def _hand_over(self, adapter: Mapping[str, torch.Tensor] | None, version: int) -> None:
        """Give the samplers the trained adapter, or the one passed in."""
        pair, _ = self._open()
        with working_on(self._device, self._threads):
            pair.publish(adapter)
        self._in_use = version
        for policy in self._policies:
            policy.version = version
        if isinstance(self._engine, Publishing):
            with self._sampling():
                self._engine.publish()

    def _training(self) -> AbstractContextManager[None]:
        return working_on(self._device, self._training_threads)

    def _sampling(self) -> AbstractContextManager[None]:
        return working_on(self._policies[0].device, self._threads)

    def _open(self) -> tuple[Pair, Trainer]:
        if self._pair is None or self._trainer is None:
            raise BackendError(Problem(what="the local backend is closed", fix="create another one"))
        return self._pair, self._trainer
