"""The memory of a run on this backend, for `capacity`, `explain` and the start of a run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from retrain.api import Config, ConfigError, MemoryEstimate, MemoryModel, Workload
from retrain_local.checks import ENGINE
from retrain_local.memory import sizes
from retrain_local.memory.estimate import estimate
from retrain_local.memory.shape import ModelShape, read_shape


def estimate_memory(config: Config, model_folder: Callable[..., Path]) -> MemoryModel:
    folder, trust, rank = model_folder(), config.model.trust_remote_code, config.model.lora_rank
    shape = read_shape(folder, where=config.place("model.model"))
    if not shape.is_native:
        from retrain_local.model.qlora import silence_advice

        silence_advice()
        from retrain_local.model.measure import measure  # takes seconds

        shape = replace(shape, kept=measure(folder, rank=rank, trust_remote_code=trust))
    others = other_models(config, shape, model_folder)

    def estimated(work: Workload, runtime_bytes: int | None, device_bytes: int | None) -> MemoryEstimate:
        return estimate(shape, work, runtime_bytes=runtime_bytes, device_bytes=device_bytes, others=others)

    return MemoryModel(
        parameters=shape.parameters,
        is_counted=shape.is_counted,
        lora_parameters=shape.lora_parameters(rank),
        checkpoint_bytes=0 if rank else shape.parameters * sizes.FULL_CHECKPOINT_BYTES,
        context=shape.context,
        estimate=estimated,
        can_quantise=shape.is_native,
        tier=_tier(shape),
    )


def _tier(shape: ModelShape) -> str:
    if shape.is_native:
        return "native, this backend's own decoder"
    if shape.kept is None:
        return ""
    if shape.kept.why:
        return f"plain, the model's own forward pass: {shape.kept.why}"
    states = f" and a state of {shape.row_bytes / 2**10:,.0f} KiB a row" if shape.row_bytes else ""
    return f"paged, transformers' modules with this backend's attention{states}"


def other_models(config: Config, own: ModelShape, model_folder: Callable[..., Path]) -> dict[str, ModelShape]:
    """Return a teacher in this process, if its `config.json` is on this machine, and the reference of all weights."""
    found = {}
    name, adapter = config.teacher.model, config.teacher.adapter
    if (name or adapter) and config.teacher.engine == ENGINE:
        if name in ("", config.model.model):
            found["teacher"] = own
        else:
            folder = None
            with suppress(ConfigError):
                folder = model_folder(name)
            if folder is not None:
                found["teacher"] = read_shape(folder, where=config.place("teacher.model"))
    if config.kl.coef and not config.model.lora_rank:
        found["reference"] = own
    return found
