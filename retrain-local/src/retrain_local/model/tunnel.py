"""Passes an `Attend` to the attention and the mixers inside a model of transformers, in place of its cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain_local.attention.rows import Move
from retrain_local.decoder import Attend
from retrain_local.model.experts import current_routing, routed
from retrain_local.model.recurrent import with_fast_steps
from retrain_local.model.states import Mixed, Mixers


class Tunnel(Cache):  # type: ignore[misc]
    """Takes the place of the cache that transformers hands from layer to layer, and stores nothing.

    Every layer gets it as an argument, even when another thread recomputes the layer for its gradient. Attention gets
    its new keys and values back.
    """

    def __init__(self, attend: Attend) -> None:
        super().__init__(layers=[])
        self.attend, self.routing = attend, current_routing()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def get_mask_sizes(self, query_length: int, *_: Any, **__: Any) -> tuple[int, int]:
        return query_length, 0


_current = threading.local()


def current() -> Attend | None:
    """Return the `Attend` of the layer that is being computed in this thread."""
    return getattr(_current, "attend", None)


def divert(model: nn.Module, mixers: Mixers | None) -> None:
    """Let the attention of `model` find the `Attend` of a `Tunnel`, and its mixers run by that `Attend`'s `mix`."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.__dict__["forward"] = _announced(partial(type(module).forward, module))
    for number, layer in enumerate(mixers.layers if mixers else ()):
        module = model.get_submodule(layer.name)
        # Not `module.forward`: in a copied model it is the other model's function.
        forward = type(module).forward
        if next(module.parameters()).device.type == "cpu":
            forward = with_fast_steps(forward)
        module.__dict__["forward"] = _diverted(partial(forward, module), number)


def _announced(forward: Callable[..., Any]) -> Callable[..., Any]:
    def announced(*args: Any, **kwargs: Any) -> Any:
        cache = next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)
        before, _current.attend = current(), getattr(cache, "attend", current())
        try:
            with routed(getattr(cache, "routing", current_routing())):
                return forward(*args, **kwargs)
        finally:
            _current.attend = before

    return announced


def _diverted(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    def diverted(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        tunnel = next((each for each in given if isinstance(each, Tunnel)), None)
        if tunnel is None:
            return forward(*args, **kwargs)
        packed = next(each.shape[:2] for each in given if isinstance(each, Tensor) and each.dim() == 3)
        others: tuple[None, ...] = ()

        def run(move: Move, cache: Any) -> Tensor:
            nonlocal others

            def moved(each: Any) -> Any:
                if isinstance(each, Tunnel):
                    return cache
                return move(each) if isinstance(each, Tensor) and each.shape[:2] == packed else each

            out = forward(*map(moved, args), **{name: moved(each) for name, each in kwargs.items()})
            if not isinstance(out, tuple):
                return out
            others = (None,) * (len(out) - 1)
            return out[0]

        assert isinstance(tunnel.attend, Mixed)
        out = tunnel.attend.mix(number, run)
        return (out, *others) if others else out

    return diverted
