"""Backend `local`: one process owns the policy, samples from it, trains it and saves it."""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from retrain.api import (
    ActionRow,
    BackendError,
    Deliver,
    Engine,
    EngineTraits,
    Floats,
    Kind,
    Measuring,
    PluginContext,
    Problem,
    Publishing,
    Sample,
    SampleRequest,
    SamplingParams,
    TrainBatch,
    TrainReport,
    resolve,
)
from retrain_local import checkpoint
from retrain_local.devices import choose_device
from retrain_local.loading import context_limit, load_base, stop_ids
from retrain_local.locate import find_model
from retrain_local.lora import Twins, attach_lora
from retrain_local.memory import MemoryLimits
from retrain_local.options import LocalOptions
from retrain_local.plugin import CAPABILITIES
from retrain_local.policy import LocalPolicy
from retrain_local.threads import limited_threads, threads_for
from retrain_local.trainer import Trainer

log = logging.getLogger("retrain")
FULL_TRAITS = EngineTraits(determinism=CAPABILITIES.determinism, provides_entropy=True)  # an engine that says nothing


def create_backend(context: PluginContext) -> LocalBackend:
    """Load the model of the config once, attach the adapter, and build the configured engine on top of it."""
    config = context.config
    device = choose_device(config)
    source = find_model(config, context.plugins)
    base = load_base(config, source, device)
    twins = attach_lora(
        base,
        rank=config.model.lora_rank,
        alpha=config.lora.alpha,
        seed=context.seeds.derive("lora init"),
        name=source.path,
    )
    twins.publish()
    trained, total = twins.peft.get_nb_trainable_parameters()
    share = 100 * trained / total
    log.info("trainable params: %s || all params: %s || trainable%%: %.4f", f"{trained:,d}", f"{total:,d}", share)
    limits = MemoryLimits()
    trainer = Trainer(
        twins.peft,
        config,
        device,
        recompute=device.type == "cuda",
        check_stop=context.check_stop,
        micro_batch_tokens=context.params.micro_batch_tokens if isinstance(context.params, LocalOptions) else 0,
        limits=limits,
    )
    policy = LocalPolicy(
        sampler=twins.sampler,
        device=device,
        model_path=source.path,
        stop_ids=stop_ids(base, context.tokenizer),
        context_limit=context_limit(base),
        save_adapter=partial(checkpoint.save_adapter, twins.peft),
        logprobs=trainer.logprobs,
        limits=limits,
    )
    name = config.value("inference.engine", "pytorch")
    search_paths = config.plugins.search_paths
    where = config.place("inference.engine")
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, name, where=where, search_paths=search_paths)
    backend = LocalBackend(
        twins=twins,
        policy=policy,
        engine=found.target(context, policy),
        trainer=trainer,
        threads=threads_for(total, device),
        traits=found.traits if isinstance(found.traits, EngineTraits) else FULL_TRAITS,
    )
    log.info("LocalTrainHelper ready (engine=%s, split_mode=False).", name)
    return backend


class LocalBackend:
    """The model once, its sampler, its trainer.

    Same machine and same seed: bit-identical tokens and adapters, if the engine can keep that; `capabilities` say so.
    """

    def __init__(
        self,
        *,
        twins: Twins,
        policy: LocalPolicy,
        engine: Engine,
        trainer: Trainer,
        threads: int,
        traits: EngineTraits = FULL_TRAITS,
    ) -> None:
        self.capabilities = traits.limit(CAPABILITIES)
        self._twins: Twins | None = twins
        self._policy = policy
        self._engine = engine
        self._can_deliver = "deliver" in inspect.signature(engine.sample).parameters
        self._trainer: Trainer | None = trainer
        self._threads = threads
        self._version = 0

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Draw from the policy last published; `deliver` gets each completion early if the engine can do that."""
        self._open()
        with limited_threads(self._threads):
            if deliver is not None and self._can_deliver:
                return self._engine.sample(requests, params, deliver)  # type: ignore[call-arg]
            return self._engine.sample(requests, params)

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step; BackendError, and nothing changed, on a non-finite number."""
        _, trainer = self._open()
        with limited_threads(self._threads):
            report = trainer.step(batch)
        self._version += 1
        return report

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """What the trained policy says of each row; see `Trainer.logprobs`."""
        _, trainer = self._open()
        with limited_threads(self._threads):
            return trainer.logprobs(rows, temperature)

    def publish(self) -> int:
        """Let `sample` use what was trained; returns the number of optimizer steps in it."""
        twins, _ = self._open()
        with limited_threads(self._threads):
            twins.publish()
            self._policy.version = self._version
            if isinstance(self._engine, Publishing):
                self._engine.publish()
        return self._version

    def metrics(self) -> Mapping[str, float]:
        """What the engine measured since it was last asked."""
        return self._engine.metrics() if isinstance(self._engine, Measuring) else {}

    def save_adapter(self, folder: Path) -> None:
        """Write the trained adapter as plain PEFT files."""
        twins, _ = self._open()
        checkpoint.save_adapter(twins.peft, folder)

    def save(self, folder: Path) -> None:
        """Write adapter, optimizer moments and step count."""
        twins, trainer = self._open()
        state = trainer.parameters, trainer.optimizer, self._version
        checkpoint.save_state(twins.peft, *state, folder, self._policy.limits)

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote, and publish it."""
        twins, trainer = self._open()
        state = trainer.parameters, trainer.optimizer
        self._version = checkpoint.load_state(twins.peft, *state, folder, self._policy.limits)
        self.publish()

    def close(self) -> None:
        """Let go of the model and its device memory."""
        if self._twins is None:
            return
        self._engine.close()
        self._twins = self._trainer = None
        on_gpu = self._policy.device.type == "cuda"
        self._policy.sampler = None
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    def _open(self) -> tuple[Twins, Trainer]:
        if self._twins is None or self._trainer is None:
            raise BackendError(Problem(what="the local backend is closed", fix="create another one"))
        return self._twins, self._trainer
