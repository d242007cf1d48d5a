"""Measures the tier of a model and the state of its layers on a shallow random model of its configuration."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoConfig

from retrain_local.memory.shape import Kept
from retrain_local.memory.sizes import Activations
from retrain_local.model.activations import measure_activations
from retrain_local.model.adapter import Lora
from retrain_local.model.composite import built, is_whole, text_config
from retrain_local.model.experts import fit_experts, layer_number
from retrain_local.model.hf_model import attach, quiet
from retrain_local.model.probe import Route, choose_route
from retrain_local.model.states import tensors_in
from retrain_local.model.targets import linear_names, set_targets

# The sizes of a copy. They affect neither its tier, nor its states, nor its activations.
FEW = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    "block_multiple_of": 1,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
}
# Most of a model's weights. Activations are linear in these sizes, so those of two copies with shares of them tell.
INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
SHARES = (8, 16)
# Counts of layers without experts, and of layers that read other layers' keys and values.
FIRST_DENSE, LAST_SHARED = "first_k_dense_replace", "num_kv_shared_layers"
# Bounds the memory of this measurement, since a command may run it only to show a configuration.
MOST_PARAMETERS = 400_000_000


def measure(folder: Path, *, rank: int, trust_remote_code: bool = False) -> Kept | None:
    """Return the measured sizes; None for sizes without a model, or one that cannot be built or is not causal.

    `rank` is that of the adapter, 0 if all weights are trained.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        if not config.architectures:  # sizes from a table or a command, not from a model's own file
            return None
        text = config.get_text_config(decoder=True) if is_whole(config) else text_config(config) or config
        # The differences between layers, for each of them.
        first, last = (getattr(text, name, None) or 0 for name in (FIRST_DENSE, LAST_SHARED))
        count = text.num_hidden_layers
        places = [(number < first, number >= count - last) for number in range(count)]
        kinds = list(zip(*_lists(text).values(), places, strict=True))
        with torch.device("meta"):
            whole = built(config, text)
        adapted = _adapted(whole)
        wide, narrow = (_shallow(config, text, kinds, share) for share in SHARES)
        if wide is None or narrow is None:
            return None
        route = choose_route(wide)
        kept = _of_layers(route, kinds)
        copied = 0 if route.why else kept["token_elements"]
        activations = _whole(*(_activations(model, route, rank, kinds, copied) for model in (wide, narrow)))
    # Configurations and modules may raise errors of any class. The caller then uses a formula of the sizes.
    except Exception:
        return None
    finally:
        gc.collect()  # the copies are cycles, through the methods that a route has replaced
    return Kept(why=route.why, activations=activations, **kept, **adapted)


def _of_layers(route: Route, kinds: list[Any]) -> dict[str, int]:
    """Return the numbers of a token and the bytes of a row that all layers keep."""
    shape, times = route.shape, _times(kinds)
    if route.why or (route.mixers and route.mixers.is_body):
        token, row = ((each or 0) * len(kinds) // len(times) for each in (shape.token_bytes, shape.row_bytes))
        return {"token_elements": token // 4, "row_bytes": row}
    keys, states = Counter[int](), Counter[int]()
    for name, size in zip(route.attention, shape.key_sizes, strict=True):
        keys[layer_number(name)] += size.kv_heads * (size.head_size + size.value_size)
    for mixer in route.mixers.layers if route.mixers else ():
        states[layer_number(mixer.name)] += sum(tensor.nbytes for tensor in tensors_in(mixer.kept))
    token, row = (sum(found[layer] * count for layer, count in times.items()) for found in (keys, states))
    return {"token_elements": token, "row_bytes": row}


def _activations(model: Any, route: Route, rank: int, kinds: list[Any], copied: int) -> Activations:
    if rank:
        model = attach(model, Lora(rank=rank, alpha=rank), route.mixing).get_base_model()
    else:
        model.requires_grad_(True)
    return measure_activations(route.decoder(model), model, copied, _times(kinds))


def _whole(wide: Activations, narrow: Activations) -> Activations:
    a, b = (1.0 / share for share in SHARES)
    names = ("packed", "repeated", "largest")
    sizes = {name: (getattr(wide, name), getattr(narrow, name)) for name in names}
    return replace(wide, **{name: int(x + (x - y) * (1.0 - a) / (a - b)) for name, (x, y) in sizes.items()})


def _lists(text: Any) -> dict[str, list[Any]]:
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    return {name: value for name, value in lists.items() if len(value) == text.num_hidden_layers}


def _times(kinds: list[Any]) -> dict[int, int]:
    """Return how many layers each layer of the copy stands for: one of each kind, or two of the only one."""
    counts = list(Counter(kinds).values())
    # No gradient goes into the first layer, so it keeps a little less than others.
    return dict(enumerate(counts if len(counts) > 1 else [1, counts[0] - 1]))


def _shared(size: int, share: int) -> int:
    # Experts are grouped in the copy if they are in the model, see `fit_experts`.
    return size if size % (8 * max(SHARES)) else size // share


def _shallow(config: Any, text: Any, kinds: list[Any], share: int) -> Any | None:
    """Return a random model with one layer of each kind, or two of the only one, and a share of the inner sizes.

    None if that is too large.
    """
    copied, places = copy.deepcopy(text), [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    places = places if len(places) > 1 else places * 2
    for name, value in _lists(text).items():
        few = [value[place] for place in places]
        setattr(copied, name, [_shared(each, share) for each in few] if name in INNER else few)
    copied.num_hidden_layers = len(places)
    if hasattr(text, "num_blocks"):
        copied.num_blocks = len(places)
    for name, value in vars(text).items():
        if isinstance(value, int) and (name in FEW or name in INNER):
            setattr(copied, name, min(value, FEW[name]) if name in FEW else _shared(value, share))
        elif name == FIRST_DENSE and value:
            copied.first_k_dense_replace = sum(place < value for place in places)
        elif name == LAST_SHARED and value:
            copied.num_kv_shared_layers = sum(place >= len(kinds) - value for place in places)
        elif name.endswith("_token_id") and not (isinstance(value, int) and value < FEW["vocab_size"]):
            setattr(copied, name, None)
    with torch.device("meta"):
        count = sum(p.numel() for p in built(config, copied).parameters())
    if count > MOST_PARAMETERS:
        return None
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("meta"):  # where torch's own initialisation, replaced below, costs nothing
            model = built(config, copied, dtype=torch.float32, attn_implementation="eager")
        model.to_empty(device="cpu").init_weights()
    fit_experts(model)
    return model.eval().requires_grad_(False)


def _adapted(whole: Any) -> dict[str, int]:
    """Return the elements of an adapter per rank, and of the matrices that it adapts."""
    config = LoraConfig()
    set_targets(whole, config, ["all-linear"], ())
    targets = set(config.target_modules or ())
    names = (name for name in linear_names(whole) if name in targets or name.rpartition(".")[2] in targets)
    shapes = [whole.get_submodule(name).weight.shape for name in names]
    return {"adapter_width": sum(map(sum, shapes)), "adapted_elements": sum(shape.numel() for shape in shapes)}
