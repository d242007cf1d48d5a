"""A `[teacher]` in this process: a second model that is never trained and never samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from retrain.api import ActionRow, Config, ConfigError, Floats, PluginContext, locate_adapter
from retrain_local.backend import create_trainer
from retrain_local.checks import start_problems
from retrain_local.devices.torch_devices import choose_devices, threads_for, training_threads, working_on
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model.checkpoint import load_start
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.options import ModelKeys
from retrain_local.training.step_loss import NAMED
from retrain_local.training.trainer import Trainer

ADAPTER, MODEL = "teacher.adapter", "teacher.model"


def open_teacher(context: PluginContext) -> LocalTeacher:
    config = teacher_config(context.config)
    if problems := start_problems(config):
        raise ConfigError(*(replace(each, where=each.where.replace("[model]", "[teacher]")) for each in problems))
    devices = choose_devices(config)
    pair = create_pair(
        config,
        find_source(config.model.model, config.place(KEY), context.plugins),
        trainer_device=devices.trainer,
        samples=False,
        seed=0,
        role="teacher",
    )
    if config.table("model", ModelKeys).adapter:
        load_start(pair, config, line="The teacher has the adapter in")
    limits = MemoryLimits()
    trainer = create_trainer(pair, devices, config, loss=NAMED["likelihood"], limits=limits)
    threads = training_threads(threads_for(pair.total, devices.trainer), pair.total, devices.trainer)
    return LocalTeacher(trainer, limits, devices.trainer, threads)


class LocalTeacher:
    """A `retrain.api.Teacher`: log-probabilities as the trainer computes them, of weights that never change."""

    def __init__(self, trainer: Trainer, limits: MemoryLimits, device: Any, threads: int) -> None:
        self._trainer: Trainer | None = trainer
        self._limits, self._device, self._threads = limits, device, threads

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        assert self._trainer is not None, "the teacher is closed"
        with working_on(self._device, self._threads):
            return self._trainer.reference_logprobs(rows, temperature)

    def state(self) -> Mapping[str, Any]:
        return asdict(self._limits)

    def restore(self, state: Mapping[str, Any]) -> None:
        self._limits.restore(state)

    def close(self) -> None:
        self._trainer = None


def teacher_config(config: Config) -> Config:
    """Return the configuration of the teacher: its model and adapter in place of the run's."""
    adapter, name = config.value(ADAPTER, ""), config.value(MODEL, "") or config.model.model
    document: Any = {}
    with suppress(ConfigError, OSError, ValueError, RecursionError):  # `open_teacher` reports these
        document = json.loads((locate_adapter(adapter) / "adapter_config.json").read_text("utf-8")) if adapter else {}
    document = document if isinstance(document, dict) else {}
    own: dict[str, Any] = {"model": name, "adapter": adapter, "lora_rank": document.get("r", 1)}
    lora: dict[str, Any] = {"alpha": document.get("lora_alpha", 0), "dora": False}
    lora["rslora"] = bool(document.get("use_rslora", False))
    tables = {"model": config.model.model_copy(update=own), "lora": config.lora.model_copy(update=lora)}
    moved = {
        path.replace("teacher.", "model."): config.origin(path) for path in (ADAPTER, MODEL) if config.value(path, "")
    }
    return replace(config, tables={**config.tables, **tables}, origins={**config.origins, **moved})
