"""A `[teacher]` in this process: a second model that is never trained and never samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from retrain.api import ActionRow, Config, ConfigError, Floats, PluginContext, Problem, locate_adapter
from retrain_local.attention.select_kernels import kernels_for
from retrain_local.checks import start_problems
from retrain_local.devices.choose import choose_devices, working_on
from retrain_local.devices.torch_modes import threads_for, training_threads
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model.checkpoint import load_start
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import find_model
from retrain_local.options import ModelKeys
from retrain_local.training.step_loss import NAMED
from retrain_local.training.trainer import Trainer

ADAPTER, MODEL = "teacher.adapter", "teacher.model"


def open_teacher(context: PluginContext) -> LocalTeacher:
    """Load the teacher beside the trained model; ConfigError when it cannot be loaded."""
    config = teacher_config(context.config)
    if problems := adapter_problems(config):
        raise ConfigError(*problems)
    devices = choose_devices(config)
    pair = create_pair(
        config,
        find_model(config, context.plugins),
        trainer_device=devices.trainer,
        samples=False,
        seed=0,
        role="teacher",
    )
    is_adapted = bool(config.table("model", ModelKeys).adapter)
    if is_adapted:
        load_start(pair, config, told="The teacher has the adapter in")
    exact = not devices.is_split
    kernels = kernels_for(config, devices.trainer, pair.trained.dtype, pair.trained.shape, exact=exact)
    limits = MemoryLimits()
    trainer = Trainer(
        pair.trained,
        pair.parameters,
        config,
        loss=NAMED["likelihood"],
        limits=limits,
        attend=kernels.packed,
        is_ordered=devices.is_split or (kernels.is_ordered and pair.trained.is_ordered),
    )
    threads = training_threads(threads_for(pair.total, devices.trainer), pair.total, devices.trainer)
    return LocalTeacher(trainer, limits, devices.trainer, threads)


class LocalTeacher:
    """Log-probabilities as the trainer computes them, of weights that never change; see `retrain.api.Teacher`."""

    def __init__(self, trainer: Trainer, limits: MemoryLimits, device: Any, threads: int) -> None:
        self._trainer: Trainer | None = trainer
        self._limits, self._device, self._threads = limits, device, threads

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """See `Trainer.reference_logprobs`: of the weights as they were loaded."""
        assert self._trainer is not None, "the teacher is closed"
        with working_on(self._device, self._threads):
            return self._trainer.reference_logprobs(rows, temperature)

    def state(self) -> Mapping[str, Any]:
        """The sizes that it has settled on."""
        return asdict(self._limits)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep them."""
        self._limits.restore(state)

    def close(self) -> None:
        """Drop the weights."""
        self._trainer = None


def teacher_config(config: Config) -> Config:
    """The configuration under which the teacher loads: its model and adapter in place of the run's own."""
    adapter, name = config.value(ADAPTER, ""), config.value(MODEL, "") or config.model.model
    own: dict[str, Any] = {"model": name, "adapter": adapter, "lora_rank": 1}
    lora: dict[str, Any] = {"alpha": 0, "rslora": False, "dora": False}
    if adapter:
        document = _adapter_document(config)
        own["lora_rank"] = document.get("r", 1)
        lora |= {"alpha": document.get("lora_alpha", 0), "rslora": bool(document.get("use_rslora", False))}
    tables = {
        **config.tables,
        "model": config.model.model_copy(update=own),
        "lora": config.lora.model_copy(update=lora),
    }
    moved = {
        path.replace("teacher.", "model."): config.origin(path) for path in (ADAPTER, MODEL) if config.value(path, "")
    }
    return replace(config, tables=tables, origins={**config.origins, **moved})


def adapter_problems(config: Config) -> list[Problem]:
    """What is wrong with the adapter of a configuration that `teacher_config` made."""
    problems = start_problems(config)
    return [replace(problem, where=problem.where.replace("[model]", "[teacher]")) for problem in problems]


def _adapter_document(config: Config) -> dict[str, Any]:
    try:
        folder = locate_adapter(config.value(ADAPTER, ""))
        found = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (ConfigError, OSError, ValueError, RecursionError):  # `adapter_problems` says what is wrong
        return {}
    return found if isinstance(found, dict) else {}
