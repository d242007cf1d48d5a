"""Passes an `Attend` to the attention and the mixers inside a model of transformers, in place of its cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain_local.attention.rows import Move
from retrain_local.decoder import Attend, within
from retrain_local.model.experts import ROUTING
from retrain_local.model.recurrent import with_fast_steps
from retrain_local.model.states import Mixed, Mixers
from retrain_local.model.written import PASSAGE, Marked, Mask, Passage


class Tunnel(Passage, Cache):  # type: ignore[misc]
    """Takes the place of the cache that transformers hands from layer to layer, and stores nothing.

    Every layer gets it as an argument, even when another thread recomputes the layer for its gradient. Attention gets
    its new keys and values back. Subclasses belong to the cache class that a model insists on.
    """

    def __init__(self, attend: Attend, positions_N: Tensor) -> None:
        Cache.__init__(self, layers=[])
        self.attend, self.positions_N, self.routing = attend, positions_N, ROUTING.get()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states.as_subclass(Marked), value_states.as_subclass(Marked)

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False


def divert(model: nn.Module, mixers: Mixers | None) -> None:
    """Let the attention of `model` find the `Attend` of a `Tunnel`, and its mixers run by that `Attend`'s `mix`."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.__dict__["forward"] = _announced(partial(type(module).forward, module))
        elif isinstance(module, nn.Embedding) and "position_ids" in signature(type(module).forward).parameters:
            module.__dict__["forward"] = _placed(partial(type(module).forward, module))
    for number, layer in enumerate(mixers.layers if mixers and not mixers.is_body else ()):
        module = model.get_submodule(layer.name)
        # Not `module.forward`: in a copied model it is the other model's function.
        forward = type(module).forward
        if next(module.parameters()).device.type == "cpu":
            forward = with_fast_steps(forward)
        module.__dict__["forward"] = _diverted(partial(forward, module), number)


def _announced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        passage = next((each for each in (*args, *kwargs.values()) if isinstance(each, Passage)), None)
        with within(PASSAGE, passage), within(ROUTING, getattr(passage, "routing", ROUTING.get())):
            return forward(*args, **kwargs)

    return announced


def _placed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward pass of learned positions, without its count from the length of the cache."""
    parameters = signature(forward)

    def placed(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs)
        if isinstance(tunnel := PASSAGE.get(), Tunnel):
            given.arguments["position_ids"] = tunnel.positions_N
        return forward(*given.args, **given.kwargs)

    return placed


def _diverted(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    def diverted(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        tunnel = next((each for each in given if isinstance(each, Tunnel)), None)
        if tunnel is None:
            return forward(*args, **kwargs)
        packed = next(each.shape[:2] for each in given if isinstance(each, Tensor) and each.dim() == 3)
        shapes: list[Any] = []

        def run(move: Move, cache: Any) -> Tensor:
            nonlocal shapes

            def moved(each: Any) -> Any:
                if isinstance(each, Tunnel):
                    return cache
                is_row = isinstance(each, Tensor) and not isinstance(each, Mask) and each.shape[:2] == packed
                return move(each) if is_row else each

            out = forward(*map(moved, args), **{name: moved(each) for name, each in kwargs.items()})
            if not isinstance(out, tuple):
                return out
            rows = out[0].shape[:2], out[0].dim()  # a state of [rows, heads, ...] has one dimension more
            is_row = [isinstance(each, Tensor) and (each.shape[:2], each.dim()) == rows for each in out]
            shapes = [each.shape[2:] if kept else None for each, kept in zip(out, is_row, strict=True)]
            parts = [each.flatten(2) for each, kept in zip(out, is_row, strict=True) if kept]
            return torch.cat(parts, dim=2) if len(parts) > 1 else out[0]

        assert isinstance(tunnel.attend, Mixed)
        out = tunnel.attend.mix(number, run)
        if not shapes:
            return out
        parts = iter(out.flatten(2).split([shape.numel() for shape in shapes if shape is not None], dim=2))
        return tuple(None if shape is None else next(parts).unflatten(2, shape) for shape in shapes)

    return diverted
