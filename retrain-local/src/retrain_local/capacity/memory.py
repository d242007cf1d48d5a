"""Peak memory of a run on the backend `local`, phase by phase, from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from retrain.api import Config, ConfigError, MemoryEstimate, MemoryModel, MemoryPhase, Workload
from retrain_local import sizes
from retrain_local.capacity.sampling import cache_budget, sampling_phase
from retrain_local.capacity.shape import ModelShape, read_shape
from retrain_local.capacity.training import pack_tokens, training_phase

HERE = "pytorch"  # the engine of a teacher in this process
NONE: Mapping[str, ModelShape] = MappingProxyType({})


def estimate_memory(config: Config, model_folder: Callable[..., Path]) -> MemoryModel:
    """Peak memory of sampling and training in this process; ConfigError when `config.json` does not say the sizes."""

    def locate(name: str) -> str | None:
        try:
            return str(model_folder(name))
        except ConfigError:  # a teacher of unknown size is left out
            return None

    shape = read_shape(model_folder(), where=config.place("model.model"))
    rank, others = config.model.lora_rank, other_models(config, shape, locate)

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
    )


def other_models(config: Config, own: ModelShape, locate: Callable[[str], str | None]) -> dict[str, ModelShape]:
    """The models beside the trained one: a teacher in this process, and the reference where all weights are trained.

    A teacher whose `config.json` is not at hand is left out.
    """
    found = {}
    name, adapter = config.teacher.model, config.teacher.adapter
    if (name or adapter) and config.teacher.engine == HERE:
        if name in ("", config.model.model):
            found["teacher"] = own
        elif (folder := Path(locate(name) or name).expanduser()).is_dir():
            found["teacher"] = read_shape(folder, where=config.place("teacher.model"))
    if config.kl.coef and not config.model.lora_rank:
        found["reference"] = own
    return found


def estimate(
    shape: ModelShape,
    work: Workload,
    *,
    runtime_bytes: int | None = None,
    device_bytes: int | None = None,
    others: Mapping[str, ModelShape] = NONE,
) -> MemoryEstimate:
    """Peak memory if every completion reaches `max_tokens`, with the weights of `others` beside those of the model.

    A measured `runtime_bytes` replaces the known need of an empty process. `device_bytes` is the memory of the GPU, of
    which activations and the key-value cache take their shares. On a GPU the estimate is of device memory only.
    """
    runtime = runtime_bytes
    if runtime is None:
        runtime = sizes.RUNTIME_BYTES[work.device] + (0 if shape.is_native else sizes.HOSTED_BYTES[work.device])
    apart = bool(work.samplers)
    trainer = {"runtime": runtime} | _trained(shape, work)
    element = sizes.weight_bytes(work.device, work.model_dtype)
    trainer |= {name: _frozen(other, work, element) for name, other in others.items()}
    sampler = {"runtime": runtime} | _sampled(shape, work, is_apart=apart)
    if not (apart and work.device == "cuda"):
        trainer = sampler = trainer | sampler
    tokens, recompute = pack_tokens(shape, work, _free(device_bytes, trainer))
    training = training_phase(shape, work, tokens, recompute=recompute, resident=trainer)
    pool = cache_budget(work, _free(device_bytes, sampler))
    sampling = sampling_phase(shape, work, pool, resident=sampler)
    if work.device == "cpu":
        phases = (training,) if work.is_served else _in_one_process(work, sampling, training)
        needed = max(phase.peak_bytes for phase in phases)
    else:
        phases = (training,) if work.is_served else (sampling, training)
        again = work.gradient_checkpointing != "off"
        least = [training_phase(shape, work, work.micro_batch_tokens or 1, recompute=again, resident=trainer)]
        if not work.is_served:
            least.append(sampling_phase(shape, work, work.cache_bytes or 1, resident=sampler))
        needed = max(phase.peak_bytes for phase in least)
    return MemoryEstimate(phases=phases, pack_tokens=tokens, at_once=sampling.at_once, needed_bytes=needed)


def _free(device_bytes: int | None, resident: Mapping[str, int]) -> int | None:
    """Free memory before the first step, when the optimizer has no moments yet."""
    if device_bytes is None:
        return None
    return max(0, device_bytes - sum(size for name, size in resident.items() if name != "optimizer"))


def _trained(shape: ModelShape, work: Workload) -> dict[str, int]:
    """The base model, the adapter with its moments, and on a CPU the host's records of every sampled token.

    Without an adapter the weights are trained in fp32, whatever dtype computes.
    """
    adapter = shape.lora_parameters(work.lora_rank) * sizes.ADAPTER_BYTES
    element = sizes.weight_bytes(work.device, work.model_dtype) if work.lora_rank else sizes.ADAPTER_BYTES
    weights = _frozen(shape, work, element)
    parts = {"weights": weights, "adapter": adapter, "optimizer": 2 * (adapter if work.lora_rank else weights)}
    if work.device == "cpu":
        parts["host"] = work.most_sampled * work.max_tokens * sizes.HOST_TOKEN_BYTES
    return parts


def _frozen(shape: ModelShape, work: Workload, element: int) -> int:
    """All weights, `element` bytes each, with the adapted matrices in fewer bits where they are quantised."""
    spared = element - sizes.QUANTISED_BYTES.get(work.quantize, element)
    return shape.parameters * element - int(shape.adapted_elements * spared)


def _sampled(shape: ModelShape, work: Workload, *, is_apart: bool) -> dict[str, int]:
    """Memory of the sampler beside the frozen weights, which it shares on the same device in the same dtype."""
    if work.is_served:
        return {}
    trained = sizes.weight_bytes(work.device, work.model_dtype)
    element = {"bf16": 2, "fp8": 1}.get(work.dtype, trained)
    if not work.lora_rank:
        return {"sampler": (shape.parameters + _prepacked(shape, work.device)) * element}
    if work.quantize in sizes.QUANTISED_BYTES:  # a small model is sampled from an expanded copy
        is_copied = shape.adapted_elements <= sizes.MERGE_LIMIT
        adapter = shape.sampler_adapter_elements(work.lora_rank) * element
        return {"sampler": adapter + (is_copied * shape.adapted_elements + _prepacked(shape, work.device)) * element}
    if element == trained == 4 and shape.adapted_elements <= sizes.MERGE_LIMIT:
        own = shape.adapted_elements * element
    else:
        adapter = shape.sampler_adapter_elements(work.lora_rank) * trained
        own = adapter + (shape.adapted_elements * element if element != trained else 0)
    own += _prepacked(shape, work.device) * element
    return {"sampler": own + (shape.parameters * trained if is_apart else 0)}


def _prepacked(shape: ModelShape, device: str) -> int:
    """Elements of the head, which a CPU holds again in the layout of its product if the model is small."""
    head = shape.vocabulary * shape.hidden
    is_copied = device == "cpu" and shape.is_native and head >= sizes.PREPACK_FROM
    return head if is_copied and shape.adapted_elements <= sizes.MERGE_LIMIT else 0


def _in_one_process(work: Workload, sampling: MemoryPhase, training: MemoryPhase) -> tuple[MemoryPhase, ...]:
    """On a CPU both phases share a heap, which retains some memory of the other; in split mode both run at once."""
    if work.samplers:
        return (training.together_with(sampling, name="both at once"),)
    is_on_heap = sizes.is_on_heap(training.block_bytes, work.device)
    kept = int(sizes.HEAP_KEPT * training.parts["activations"]) if is_on_heap else 0
    return sampling.with_part("heap_kept", kept), training
