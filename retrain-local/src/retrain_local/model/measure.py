"""Measures the tier of a model and the state of its layers on a shallow random model of its configuration."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from retrain_local.memory.shape import Kept
from retrain_local.model.composite import text_config
from retrain_local.model.hf_model import quiet
from retrain_local.model.probe import choose_route
from retrain_local.model.states import tensors_in
from retrain_local.model.targets import linear_names, set_targets

# The sizes of the copy. They affect neither the tier nor the state of a token or a row.
FEW = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
}
# Bounds the memory of this measurement, since a command may run it only to show a configuration.
MOST_PARAMETERS = 400_000_000


def measure(folder: Path, *, trust_remote_code: bool = False) -> Kept | None:
    """Return the measured sizes; None for a model that cannot be built, or is not a causal language model."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        text = text_config(config) or config
        kinds = _kinds(text)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(text)
        adapted = _adapted(whole)
        model = _shallow(text, kinds)
        route = None if model is None else choose_route(model)
    # Configurations and modules may raise errors of any class. The caller then uses a formula of the sizes.
    except Exception:
        return None
    if model is None or route is None:
        return None
    depth, shape = len(set(kinds)) if len(set(kinds)) > 1 else 2, route.shape
    if route.why:
        token, row = ((each or 0) * len(kinds) // depth for each in (shape.token_bytes, shape.row_bytes))
        return Kept(tier="plain", why=route.why, token_elements=token // 4, row_bytes=row, **adapted)
    keys, states = Counter[int](), Counter[int]()
    for name, size in zip(route.attention, shape.key_sizes, strict=True):
        keys[_layer(name)] += size.kv_heads * (size.head_size + size.value_size)
    for mixer in route.mixers.layers if route.mixers else ():
        states[_layer(mixer.name)] += sum(tensor.nbytes for tensor in tensors_in(mixer.kept))
    places = list(dict.fromkeys(kinds))
    token, row = (sum(found[places.index(kind)] for kind in kinds) for found in (keys, states))
    return Kept(tier="paged", why="", token_elements=token, row_bytes=row, **adapted)


def _kinds(text: Any) -> list[str]:
    kinds, layers = list(getattr(text, "layer_types", None) or ()), int(text.num_hidden_layers)
    return kinds if len(kinds) == layers else ["layer"] * layers


def _shallow(text: Any, kinds: list[str]) -> Any | None:
    """Return a random model with one layer of each kind, or two of the only one; None if that is too large."""
    copied, distinct = copy.deepcopy(text), list(dict.fromkeys(kinds))
    distinct = distinct if len(distinct) > 1 else distinct * 2
    copied.num_hidden_layers = len(distinct)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == len(kinds):
            setattr(copied, name, distinct if name == "layer_types" else value[: len(distinct)])
        elif name in FEW and isinstance(value, int):
            setattr(copied, name, min(value, FEW[name]))
        elif name.endswith("_token_id"):
            setattr(copied, name, None)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(copied).parameters())
    if count > MOST_PARAMETERS:
        return None
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copied, dtype=torch.float32, attn_implementation="eager")
    return model.eval().requires_grad_(False)


def _adapted(whole: Any) -> dict[str, int]:
    """Return the elements of an adapter per rank, and of the matrices that it adapts."""
    config = LoraConfig()
    set_targets(whole, config, ["all-linear"], ())
    targets = set(config.target_modules or ())
    names = (name for name in linear_names(whole) if name in targets or name.rpartition(".")[2] in targets)
    shapes = [whole.get_submodule(name).weight.shape for name in names]
    return {"adapter_width": sum(map(sum, shapes)), "adapted_elements": sum(shape.numel() for shape in shapes)}


def _layer(name: str) -> int:
    """Return the number in a module's name; 0 for a module outside the layers."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)
