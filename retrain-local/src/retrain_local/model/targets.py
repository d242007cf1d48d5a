"""The layers that get an adapter: linear layers, and on request the fused matrices of experts."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from retrain_local.model.adapter import PREFIX
from retrain_local.model.experts import layer_number

# Fused kernels of these types read some weights without calling the layer, so an adapter around it would be skipped;
# PEFT refuses the same names.
FUSED_MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
UNREACHED = frozenset({"out_proj", "conv1d"})
# A number of layers after which transformers divides these weights at inference, but not the adapter around them.
RESCALE, RESCALED = "rescale_every", frozenset({"output", "value"})


def linear_names(model: Any) -> set[str]:
    """Return the linear layers except the head.

    Routers are left out. Many are a subclass of `nn.Linear` whose forward pass does not return the product.
    """
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if module is not head and is_product(module)}


def is_product(module: nn.Module) -> bool:
    if type(module) in (nn.Linear, Conv1D):
        return True
    if not isinstance(module, nn.Linear):
        return False
    x = torch.ones(1, 1, module.in_features, device=module.weight.device, dtype=module.weight.dtype)
    if x.is_meta:
        return type(module).forward is nn.Linear.forward
    with torch.no_grad():
        try:
            found = module(x)
        except Exception:  # a subclass may want more arguments
            return False
        return isinstance(found, Tensor) and torch.equal(found, functional.linear(x, module.weight, module.bias))


class UnknownTargetError(Exception):
    """A name in `[lora] targets` that is in no module of the model."""


def set_targets(model: Any, config: LoraConfig, targets: Iterable[str], attention: Collection[str]) -> None:
    """Give `config` the names of the layers that `targets` mean; `attention` are modules of attention and mixers.

    UnknownTargetError for a name without a layer.
    """
    linear, modules, parameters = linear_names(model), set[str](), set[str]()
    for target in targets:
        if target == "all-linear":
            found = _unconverted(model, config, linear)
        elif target == "attention":
            # The tier plain does not know the modules of attention.
            mixing = attention or [n for n, module in model.named_modules() if "Attention" in type(module).__name__]
            found = {name for name in linear if any(name.startswith(f"{each}.") for each in mixing)}
        elif target == "experts":
            fused = {".".join(name.split(".")[-3:]) for name, p in model.named_parameters() if p.dim() == 3}
            found, parameters = set(), parameters | {name for name in fused if "expert" in name}
            if not fused:
                raise UnknownTargetError(target)
        else:
            found = {name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")}
        if not found and target != "experts":
            raise UnknownTargetError(target)
        modules |= found
    if model.config.model_type in FUSED_MAMBA:
        modules = {name for name in modules if _last(name) not in UNREACHED}
    if first := getattr(model.config, "rescaled_from", 0):
        modules = {name for name in modules if layer_number(name) < first or _last(name) not in RESCALED}
    # The last parts of the names will do if they match nothing else.
    last = {_last(name) for name in modules}
    others = {_last(name) for name, _ in model.named_modules() if name not in modules}
    config.target_modules = set(last if last.isdisjoint(others) else modules)
    config.target_parameters = sorted(parameters) or None


def _unconverted(model: Any, config: LoraConfig, names: Iterable[str]) -> set[str]:
    """Drop names that PEFT would convert to those of an older checkpoint's layers: of separate experts, most of all."""
    try:
        from peft.utils.transformers_weight_conversion import (
            convert_peft_adapter_state_dict_for_transformers as renamed,
        )
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # before PEFT 0.19
        return set(names)
    trial = copy.deepcopy(config)
    kept = set()
    for name in names:
        trial.target_modules, trial.target_parameters = {name}, None
        try:
            convert_peft_config_for_transformers(trial, model=model, conversions=None)
        except ValueError:  # one matrix of a fused pair
            continue
        if name in trial.target_modules:
            kept.add(name)
    # PEFT 0.21 renames Laguna's shared experts when it loads an adapter, and leaves them without one.
    keys = {f"{PREFIX}{name}.lora_A.weight": name for name in kept}
    trial.target_modules = kept
    return {keys[key] for key in renamed(model, trial, dict.fromkeys(keys, torch.empty(1))) if key in keys}


def _last(name: str) -> str:
    return name.rpartition(".")[2]
