"""Backend `local` in one process: it owns the policy, samples, trains and saves. A rank is one of these."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from retrain.api import (
    ActionRow,
    BackendError,
    Capabilities,
    Config,
    Deliver,
    Determinism,
    Engine,
    EngineTraits,
    Feed,
    Floats,
    Found,
    Measuring,
    PluginContext,
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
from retrain_local.attention.select_kernels import kernels_for
from retrain_local.checks import ENGINE
from retrain_local.devices.group import ALONE, Group
from retrain_local.devices.torch_devices import Devices, steps_ahead, threads_for, training_threads, working_on
from retrain_local.memory.limits import MemoryLimits, trim_heap
from retrain_local.memory.sizes import ONE_THREAD_BELOW
from retrain_local.model import checkpoint
from retrain_local.model.checkpoint import PublishedHistory, load_start
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source, save_tensors
from retrain_local.model.pair import LocalPolicy, Pair
from retrain_local.options import LocalOptions, ModelKeys
from retrain_local.plugin import CAPABILITIES
from retrain_local.sampling.split import create_engine, find_engine, sample_with
from retrain_local.training.budget import is_short
from retrain_local.training.step_loss import PolicyLoss
from retrain_local.training.trainer import Trainer

log = logging.getLogger("retrain")
OTHER_RANKS = (
    "This checkpoint is of %d ranks, and the run continues on %d: the same samples and gradients but for rounding, so "
    "not the same bits."
)
LIMITS_FILE = "sampler_limits.json"
# Traits of an engine that declares none.
FULL_TRAITS = EngineTraits(determinism=CAPABILITIES.determinism, provides_entropy=True)
SAMPLER_DTYPES = {"bf16": torch.bfloat16}  # auto: as the trainer


class LocalBackend:
    """The model, its sampler and its trainer in one process; a `retrain.api.KeepsVersions` on split devices."""

    delivers_early = True  # if its engine does

    def __init__(
        self,
        *,
        pair: Pair,
        policies: Sequence[LocalPolicy],
        engine: Engine,
        trainer: Trainer,
        threads: int,
        training_threads: int,
        capabilities: Capabilities,
        ahead: int,
        group: Group,
    ) -> None:
        self.capabilities = capabilities
        self.overlaps_training = ahead > 0
        self._ahead = ahead  # [training] max_staleness
        self._pair: Pair | None = pair
        self._trainer: Trainer | None = trainer
        self._policies = tuple(policies)
        self._engine, self._group = engine, group
        self._device = pair.trained.device
        self._threads, self._training_threads = threads, training_threads
        self._version = 0
        self._in_use: int | None = None  # version that `sample` uses
        self._is_served = isinstance(engine, ServedElsewhere)
        self._history = PublishedHistory(pair, ahead) if ahead and not self._is_served else None
        self._beginning: Mapping[str, torch.Tensor] | None = None
        self._shown = 0  # version of the last weights of `sample_from`

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        with self._sampling():
            return sample_with(self._engine, requests, params, deliver)

    def stream(self, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed) -> None:
        with self._sampling():
            stream_from(self._engine, requests, params, feed)

    def addresses(self) -> Sequence[tuple[str, str]]:
        return self._engine.addresses() if isinstance(self._engine, ServedElsewhere) else ()

    def train(self, batch: TrainBatch) -> TrainReport:
        """Take one optimizer step; BackendError, with weights and optimizer unchanged, on a non-finite number."""
        pair, _ = self._open()
        # 0.15 s for 2 GiB: too long for a small model's steps
        is_trimmed = self._device.type == "cpu" and pair.total >= ONE_THREAD_BELOW
        if is_trimmed:
            trim_heap()
        with self._training() as trainer:
            report = trainer.step(batch)
        if is_trimmed:
            trim_heap()
        self._version += 1
        return report

    def gradient(
        self, config: Config, plugins: Plugins, batch: TrainBatch, rows: Sequence[int]
    ) -> tuple[NDArray[np.float32], float, int]:
        """Return `Trainer.gradient` under the loss that `config` names; `retrain replay` compares such gradients."""
        with self._training() as trainer:
            return trainer.gradient(batch, rows, PolicyLoss.of(config, plugins))

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        with self._training() as trainer:
            return trainer.logprobs(rows, temperature)

    def top_logprobs(self, rows: Sequence[ActionRow], temperature: float, top: int) -> list[TopLogprobs]:
        with self._training() as trainer:
            return trainer.top_logprobs(rows, temperature, top)

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        with self._training() as trainer:
            return trainer.reference_logprobs(rows, temperature)

    def squared_probs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        with self._training() as trainer:
            return trainer.squared_probs(rows, temperature)

    def teacher_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        with self._training() as trainer:
            assert trainer.teacher is not None, "[distil] is off"
            with trainer.teacher.weights():
                return trainer.logprobs(rows, temperature)

    @property
    def is_broken(self) -> bool:
        return self._group.is_broken

    def settle_sizes(self) -> None:
        """Let all ranks work with the sizes of the rank with the least memory."""
        if choose_pool := getattr(self._engine, "choose_pool", None):
            choose_pool()
        limits = self._policies[0].limits
        limits.tighten(self._group.gathered(lambda: limits))

    def publish(self) -> int:
        """Let `sample` use the trained adapter, or keep it for `use_version`; return its number of optimizer steps."""
        # servers get it at once: they finish earlier requests with the version of their start
        pair, _ = self._open()
        if self._history:
            self._history.record(pair, self._version)
        if self._ahead <= 1 or self._is_served:
            self._hand_over(None, self._version)
        return self._version

    def use_version(self, version: int) -> None:
        # servers keep no history: they sample with the newest version
        if self._history and version != self._in_use:
            self._hand_over(self._history.find(version), version)

    def metrics(self) -> Mapping[str, float]:
        own = {} if self._trainer is None else self._trainer.metrics()
        return {**own, **(self._engine.metrics() if isinstance(self._engine, Measuring) else {})}

    def save_adapter(self, folder: Path) -> None:
        pair, _ = self._open()
        checkpoint.save_adapter(pair, folder, writes=not self._group.rank)

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments, step count and limits; with overlap also earlier adapters."""
        pair, trainer = self._open()
        kept = self._history.kept if self._history else {}
        before = {version: adapter for version, adapter in kept.items() if version != self._version}
        first, *others = (policy.limits for policy in self._policies)
        checkpoint.save_state(pair, trainer.optimizer.state, self._version, folder, first, before, group=self._group)
        if trainer.teacher is not None and trainer.teacher.average and not self._group.rank:
            save_tensors(trainer.teacher.average, folder / checkpoint.AVERAGE_FILE)
        if others:
            text = json.dumps([asdict(limits) for limits in others]) + "\n"
            (folder / LIMITS_FILE).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from the files of `save`, and publish the adapter, or with overlap the one before it."""
        pair, trainer = self._open()
        moments, limits = trainer.optimizer.state, self._policies[0].limits
        self._version, published, ranks = checkpoint.load_state(pair, moments, folder, limits)
        if trainer.teacher is not None and trainer.teacher.average:
            checkpoint.load_average(trainer.teacher.average, folder)
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
        """Sample from the weights in `folder`, None = the beginning; BackendError, unchanged, if unfit."""
        # the optimizer is unchanged
        pair, _ = self._open()
        if self._beginning is None:
            self._beginning = checkpoint.beginning_of(pair)
        checkpoint.load_weights(pair, folder, self._beginning)
        self._version = 0 if folder is None else self._shown + 1
        self._shown = max(self._shown, self._version)
        self._hand_over(None, self._version)

    def close(self) -> None:
        if self._pair is None:
            return
        self._engine.close()
        self._pair = self._trainer = self._history = self._beginning = None
        for policy in self._policies:
            policy.sampler = None
            del policy.save_adapter, policy.logprobs  # they hold the model
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _hand_over(self, adapter: Mapping[str, torch.Tensor] | None, version: int) -> None:
        pair, _ = self._open()
        with working_on(self._device, self._threads):
            pair.publish(adapter)
        self._in_use = version
        for policy in self._policies:
            policy.version = version
        if isinstance(self._engine, Publishing):
            with self._sampling():
                self._engine.publish()

    @contextmanager
    def _training(self) -> Iterator[Trainer]:
        pair, trainer = self._open()
        # It costs nothing later: the next `sample` allocates a cache of the same size.
        free_cache = getattr(self._engine, "free_cache", None)
        sizes, limits = (pair.trained.shape, pair.trained.dtype), self._policies[0].limits
        if free_cache is not None and not self.overlaps_training and is_short(*sizes, self._device, limits):
            free_cache()
        with working_on(self._device, self._training_threads):
            yield trainer

    def _sampling(self) -> AbstractContextManager[None]:
        self._open()
        return working_on(self._policies[0].device, self._threads)

    def _open(self) -> tuple[Pair, Trainer]:
        if self._pair is None or self._trainer is None:
            raise closed()
        return self._pair, self._trainer


def closed() -> BackendError:
    what, fix = "the local backend is closed", "create another one"
    return BackendError(Problem(code="backend.closed", what=what, fix=fix))


def create_local(context: PluginContext, devices: Devices, group: Group = ALONE) -> LocalBackend:
    config = context.config
    found = find_engine(context, devices)
    loss = PolicyLoss.of(config, context.plugins)
    source = find_source(config.model.model, config.place(KEY), context.plugins)
    pair = create_pair(
        config,
        source,
        trainer_device=devices.trainer,
        sampler_devices=devices.samplers,
        sampler_dtype=SAMPLER_DTYPES.get(config.inference.dtype),
        seed=context.seeds.derive("lora init"),
        mesh=group.mesh,
        progress=context.training_progress,
    )
    if config.table("model", ModelKeys).adapter:
        load_start(pair, config)
    trained = sum(p.numel() for p in pair.parameters.values())
    share = 100 * trained / pair.total
    log.info("trainable params: %s || all params: %s || trainable%%: %.4f", f"{trained:,d}", f"{pair.total:,d}", share)
    replay = config.table("model", ModelKeys).replay_experts
    limits = [MemoryLimits() for _ in devices.samplers]
    trainer = create_trainer(
        pair,
        devices,
        config,
        loss=loss,
        seeds=context.seeds,
        replays_experts=replay == "on" or (replay == "auto" and found.name != ENGINE),
        options=context.params if isinstance(context.params, LocalOptions) else None,
        check_stop=context.check_stop,
        progress=context.training_progress,
        limits=limits[0],
        group=group,
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
        training_threads=training_threads(threads, pair.total, devices.trainer),
        capabilities=_capabilities(found, devices, is_full=pair.files is not None),
        ahead=steps_ahead(config, devices),
        group=group,
    )
    log.info("LocalTrainHelper ready (engine=%s, split_mode=%s).", found.name, devices.is_split)
    return backend


def create_trainer(pair: Pair, devices: Devices, config: Config, **given: Any) -> Trainer:
    """Create the trainer with its attention, bitwise reproducible unless another thread samples at the same time."""
    trained, exact = pair.trained, not devices.is_split
    kernels = kernels_for(config, devices.trainer, trained.dtype, trained.shape, exact=exact)
    # in split mode another thread samples, so PyTorch's process-wide deterministic mode stays off
    is_ordered = devices.is_split or (kernels.is_ordered and trained.is_ordered)
    attend = trained.packed(kernels.packed)
    return Trainer(trained, pair.parameters, config, attend=attend, is_ordered=is_ordered, **given)


def _capabilities(found: Found, devices: Devices, *, is_full: bool) -> Capabilities:
    traits = found.traits if isinstance(found.traits, EngineTraits) else FULL_TRAITS
    limited = traits.limit(CAPABILITIES)
    if is_full:  # the reference would be a second whole model
        limited = replace(limited, regularisers=limited.regularisers - {"kl_log"})
    if devices.is_split and devices.trainer.type == "cuda":  # the mode is process-wide
        return replace(limited, determinism=Determinism.NONE)
    return limited
