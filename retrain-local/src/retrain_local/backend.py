"""Backend `local`: one process owns the policy, samples from it, trains it and saves it."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from retrain.api import (
    ActionRow,
    BackendError,
    Capabilities,
    Deliver,
    Determinism,
    Engine,
    EngineTraits,
    Floats,
    Found,
    Measuring,
    PluginContext,
    Problem,
    Publishing,
    Sample,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    TrainReport,
)
from retrain_local.attention.choose import Kernels, kernels_for
from retrain_local.capabilities import CAPABILITIES
from retrain_local.devices import Devices, choose_devices, working_on
from retrain_local.locate import find_model
from retrain_local.memory import MemoryLimits
from retrain_local.model import checkpoint
from retrain_local.model.checkpoint import Published
from retrain_local.model.pair import Pair, create_pair
from retrain_local.options import LocalOptions
from retrain_local.policy import LocalPolicy
from retrain_local.split.dealer import sample_with
from retrain_local.split.engines import create_engine, find_engine
from retrain_local.split.published import Hindsight
from retrain_local.threads import threads_for
from retrain_local.training.budget import is_short
from retrain_local.training.trainer import Trainer

log = logging.getLogger("retrain")
FULL_TRAITS = EngineTraits(determinism=CAPABILITIES.determinism, provides_entropy=True)  # an engine that says nothing
SAMPLER_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}  # auto: as the trainer
LIMITS_FILE = "sampler_limits.json"


def create_backend(context: PluginContext) -> LocalBackend:
    """Load the model of the config once for each device, attach the adapter, and build the configured engine on it."""
    config = context.config
    devices = choose_devices(config)
    found = find_engine(context, devices)
    source = find_model(config, context.plugins)
    pair = create_pair(
        config,
        source,
        trainer_device=devices.trainer,
        sampler_devices=devices.samplers,
        sampler_dtype=SAMPLER_DTYPES.get(config.value("inference.dtype", "auto")),
        seed=context.seeds.derive("lora init"),
    )
    trained = sum(p.numel() for p in pair.parameters.values())
    share = 100 * trained / pair.total
    log.info("trainable params: %s || all params: %s || trainable%%: %.4f", f"{trained:,d}", f"{pair.total:,d}", share)
    limits = [MemoryLimits() for _ in devices.samplers]
    trainer = Trainer(
        pair.trained,
        pair.parameters,
        config,
        options=context.params if isinstance(context.params, LocalOptions) else None,
        check_stop=context.check_stop,
        limits=limits[0],
        attend=_kernels(context, pair, devices).packed,
    )
    policies = [
        LocalPolicy(
            sampler=sampler,
            device=device,
            model_path=source.path,
            stop_ids=pair.stop_ids(context.tokenizer),
            context_limit=pair.trained.shape.context,
            save_adapter=partial(checkpoint.save_adapter, pair),
            logprobs=trainer.logprobs,
            limits=own_limits,
        )
        for sampler, device, own_limits in zip(pair.samplers, devices.samplers, limits, strict=True)
    ]
    threads = threads_for(pair.total, devices.trainer)
    backend = LocalBackend(
        pair=pair,
        policies=policies,
        engine=create_engine(context, found, policies, threads),
        trainer=trainer,
        threads=threads,
        capabilities=_capabilities(found, devices),
        samples_ahead=devices.is_split,
    )
    log.info("LocalTrainHelper ready (engine=%s, split_mode=%s).", found.name, devices.is_split)
    return backend


def _kernels(context: PluginContext, pair: Pair, devices: Devices) -> Kernels:
    """Attention of the trainer; bit for bit repeatable where no other thread uses PyTorch meanwhile."""
    shape, dtype = pair.trained.shape, pair.trained.dtype
    return kernels_for(context.config, devices.trainer, dtype, shape, exact=not devices.is_split)


def _capabilities(found: Found, devices: Devices) -> Capabilities:
    """What is promised with this engine on these devices."""
    traits = found.traits if isinstance(found.traits, EngineTraits) else FULL_TRAITS
    limited = traits.limit(CAPABILITIES)
    if devices.is_split and devices.trainer.type == "cuda":  # its deterministic mode is the whole process's
        return replace(limited, determinism=Determinism.NONE)
    return limited


@runtime_checkable
class MakesRoom(Protocol):
    """An engine that can give its memory back between two calls of `sample`."""

    def make_room(self) -> None:
        """Do so; the next `sample` takes as much again, so that nothing else changes."""


class LocalBackend:
    """The model once, its sampler, its trainer; a `retrain.api.SamplesAhead` on split devices.

    Same machine and same seed: bit-identical tokens and adapters, if the engine can keep that; `capabilities` say so.
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
        capabilities: Capabilities = CAPABILITIES,
        samples_ahead: bool = False,
    ) -> None:
        self.capabilities = capabilities
        self.samples_ahead = samples_ahead
        self._pair: Pair | None = pair
        self._trainer: Trainer | None = trainer
        self._policies = tuple(policies)
        self._engine = engine
        self._device = pair.trained.device
        self._threads = threads
        self._version = 0
        self._hindsight = Hindsight(pair) if samples_ahead else None

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Draw from the policy last published; `deliver` gets each completion early if the engine can do that."""
        self._open()
        with self._sampling():
            return sample_with(self._engine, requests, params, deliver)

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step; BackendError, and nothing changed, on a non-finite number."""
        pair, trainer = self._open()
        if isinstance(self._engine, MakesRoom) and self._is_short(pair):
            self._engine.make_room()
        with self._training():
            report = trainer.step(batch)
        self._version += 1
        return report

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """What the trained policy says of each row; see `Trainer.logprobs`."""
        _, trainer = self._open()
        with self._training():
            return trainer.logprobs(rows, temperature)

    def publish(self) -> int:
        """Let `sample` use what was trained; returns the number of optimizer steps in it."""
        pair, _ = self._open()
        if self._hindsight:
            self._hindsight.published(pair, self._version)
        self._hand_over(None, self._version)
        return self._version

    def metrics(self) -> Mapping[str, float]:
        """What the engine measured since it was last asked."""
        return self._engine.metrics() if isinstance(self._engine, Measuring) else {}

    def save_adapter(self, folder: Path) -> None:
        """Write the trained adapter as plain PEFT files."""
        pair, _ = self._open()
        checkpoint.save_adapter(pair, folder)

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments, step count and limits; of split devices also the adapter drawn with."""
        pair, trainer = self._open()
        before = self._hindsight.before if self._hindsight else None
        if before is not None and before.version == self._version:
            before = None
        first, *others = (policy.limits for policy in self._policies)
        checkpoint.save_state(pair, trainer.optimizer, self._version, folder, first, before)
        if others:
            text = json.dumps([asdict(limits) for limits in others]) + "\n"
            (folder / LIMITS_FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, and publish it; split devices draw from the adapter before, until told."""
        pair, trainer = self._open()
        loaded = checkpoint.load_state(pair, trainer.optimizer, folder, self._policies[0].limits)
        self._version = loaded.version
        if self._hindsight is None:
            self.publish()
            return
        if (folder / LIMITS_FILE).is_file():
            others = json.loads((folder / LIMITS_FILE).read_text(encoding="utf-8"))
            for policy, limits in zip(self._policies[1:], others, strict=False):
                policy.limits.restore(limits)
        self._hindsight.published(pair, self._version)
        before = loaded.published or self._hindsight.last
        self._hindsight.restored(before)
        self._hand_over(before, before.version)

    def close(self) -> None:
        """Let go of the model and its device memory."""
        if self._pair is None:
            return
        self._engine.close()
        self._pair = self._trainer = self._hindsight = None
        for policy in self._policies:
            policy.sampler = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _is_short(self, pair: Pair) -> bool:
        """Whether training has too little memory beside what sampling holds."""
        return not self.samples_ahead and is_short(pair.trained.shape, pair.trained.dtype, self._device)

    def _hand_over(self, published: Published | None, version: int) -> None:
        """Bring the samplers to the trained adapter, or to another one."""
        pair, _ = self._open()
        with self._training():
            pair.publish(published.adapter if published else None)
        for policy in self._policies:
            policy.version = version
        if isinstance(self._engine, Publishing):
            with self._sampling():
                self._engine.publish()

    def _training(self) -> AbstractContextManager[None]:
        return working_on(self._device, self._threads)

    def _sampling(self) -> AbstractContextManager[None]:
        return working_on(self._policies[0].device, self._threads)

    def _open(self) -> tuple[Pair, Trainer]:
        if self._pair is None or self._trainer is None:
            raise BackendError(Problem(what="the local backend is closed", fix="create another one"))
        return self._pair, self._trainer
