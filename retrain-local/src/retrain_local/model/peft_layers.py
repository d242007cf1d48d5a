"""PEFT's LoRA on the modules of transformers, and sampling modules that use the published adapter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from retrain_local.model import projection
from retrain_local.model.adapter import ADAPTER, PREFIX, file_names
from retrain_local.model.pair import Lora, Placement, Publish


def attach(base: Any, lora: Lora) -> PeftModel:
    """LoRA on every linear layer except the head, initialised from the seed; torch's global random state is kept."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    device = next(base.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about weight layouts and versions: nothing a user can act on
        torch.manual_seed(lora.seed)
        peft = get_peft_model(base, config)
    peft.eval()
    return peft


def trainable(peft: PeftModel) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in a fixed order."""
    return {name: p for name, p in peft.named_parameters() if p.requires_grad}


def create_sampler(peft: PeftModel, place: Placement, device: torch.device) -> tuple[Any, Publish]:
    """Modules that sample with what was last published, and the function that publishes.

    They share every frozen tensor whose device and dtype agree. For small fp32 models they hold merged matrices
    W + scale B A, which saves three operations per layer and token; these are computed afresh from the untouched W each
    time, so nothing drifts. In bf16 merging would round the update away: there they have copies of A and B.
    """
    layers = {name: m for name, m in peft.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    # expert layers have no such attribute
    matrices = [getattr(layer.get_base_layer(), "weight", None) for layer in layers.values()]
    is_plain = all(isinstance(w, Tensor) and w.dtype == torch.float32 for w in matrices)
    is_small = is_plain and sum(w.numel() for w in matrices if w is not None) <= projection.MERGE_LIMIT
    model = _copy(peft.get_base_model(), place, device)
    has_magnitudes = any(layer.lora_magnitude_vector for layer in layers.values())
    if place.sampler_dtype == torch.float32 and is_small and not has_magnitudes:
        return model, _merging(model, layers, trainable(peft))
    return model, _copying(model, trainable(peft))


def _merging(model: nn.Module, layers: Mapping[str, LoraLayer], trained: Mapping[str, nn.Parameter]) -> Publish:
    pairs = []
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        plain = copy.copy(model.get_submodule(name).get_base_layer())
        frozen = plain.weight.detach()
        plain._parameters = plain._parameters | {"weight": nn.Parameter(frozen.clone(), requires_grad=False)}
        setattr(model.get_submodule(parent), child, plain)
        pairs.append((name, layer, frozen, plain.weight))

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        given = file_names(trained) if adapter is None else adapter
        with torch.no_grad():
            for name, layer, frozen, merged in pairs:
                a, b = (given[f"{PREFIX}{name}.lora_{kind}.weight"].to(frozen.device) for kind in "AB")
                delta = b @ a * layer.scaling[ADAPTER]
                torch.add(frozen, delta.T if layer.fan_in_fan_out else delta, out=merged)

    return publish


def _copying(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Publish:
    own = dict(model.named_parameters())
    copies = {name: own[name.removeprefix(PREFIX)] for name in trained}
    for p in copies.values():
        p.requires_grad_(False)
    targets = file_names(copies)

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        given = file_names(trained) if adapter is None else adapter
        with torch.no_grad():
            for name, mine in targets.items():
                mine.copy_(given[name])

    return publish


def _copy(model: nn.Module, place: Placement, device: torch.device) -> Any:
    """Other modules around the same frozen tensors, or around copies on another device or in another dtype."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        is_cast = p.dtype == place.trainer_dtype and not p.requires_grad
        there = p.detach().to(device, place.sampler_dtype if is_cast else p.dtype)
        shares = there.data_ptr() == p.data_ptr() and not p.requires_grad
        memo[id(p)] = p if shares else nn.Parameter(there.clone() if p.requires_grad else there, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to(device)  # in their dtype, which rotary frequencies need
    return copy.deepcopy(model, memo)
