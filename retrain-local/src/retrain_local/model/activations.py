"""Measures what a model of transformers stores of a token for the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.memory.limits import trim_heap
from retrain_local.memory.sizes import MEASURED_ROW, Activations
from retrain_local.model.hf_decoder import HfDecoder

PLAIN = "plain"


def measure_activations(
    decoder: HfDecoder, model: nn.Module, copied: int, times: Mapping[int, int] | None = None
) -> Activations:
    """Measure one forward pass over a row of `MEASURED_ROW` tokens, or the context, and one over half of it.

    `copied` are a token's keys and values, copied by attention over several rows. In a copy with fewer layers, layer i
    counts as `times[i]` layers.
    """
    length = min(MEASURED_ROW, decoder.shape.context or MEASURED_ROW)
    each = Counter[int]()
    repeated, totals = 0.0, []
    for size in (length // 2, length):
        kept = _kept(decoder, model, size)
        shares = {at: elements / size * (times or {}).get(at[0], 1) for at, elements in kept.items()}
        totals.append(sum(shares.values()))
    for (layer, _), elements in kept.items():
        each[layer] += elements
    trim_heap()
    repeated = sum(share for (_, is_repeated), share in shares.items() if is_repeated)
    return Activations(
        packed=int(totals[1] - repeated),
        repeated=int(repeated) + copied,
        largest=max(each.values()) // length,
        row=length,
        slope=(totals[1] - totals[0]) / (length - length // 2),
    )


def _kept(decoder: HfDecoder, model: nn.Module, length: int) -> Counter[tuple[int, bool]]:
    """Return the elements kept of a row, by layer, and whether a shared prompt is repeated there for each row."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept, seen = Counter[tuple[int, bool]](), dict[int, Any]()
    inside = [(-1, decoder.tier == PLAIN)]

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage  # alive, so that no other tensor gets its address
            kept[inside[-1]] += storage.nbytes() // decoder.dtype.itemsize
        return tensor.detach()  # a result that its own graph held would never be freed

    vocabulary = decoder.shape.vocabulary
    ids_T = (torch.arange(length, device=decoder.device) * 7919 + 17) % vocabulary
    attend = decoder.packed(PaddedAttend)(Spans.apart((length,)), decoder.device)
    mixers = {layer.name for layer in (decoder.mixers.layers if decoder.mixers else ())}
    with _announced(model, mixers, inside), torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        decoder.hidden(ids_T, torch.arange(length, device=decoder.device), attend)
    return kept


def _announced(model: nn.Module, mixers: Collection[str], inside: list[tuple[int, bool]]) -> ExitStack:
    """Have the last of `inside` name the layer that computes, and whether it reads whole rows."""

    def enter(place: tuple[int, bool], *_: Any) -> None:
        inside.append((max(place[0], inside[-1][0]), place[1] or inside[-1][1]))

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = ExitStack()
    for name, module in model.named_modules():
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        if name in mixers or (len(numbers) == 1 and name.endswith(f".{numbers[0]}")):
            place = (numbers[0] if numbers else -1, name in mixers)
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, place)))
            hooks.enter_context(module.register_forward_hook(leave))
    return hooks
