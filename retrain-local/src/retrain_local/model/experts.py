"""The routers of a mixture of experts: which experts they choose in a forward pass."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a model, in order: each chooses `chosen` of `experts` for every token."""

    names: tuple[str, ...]
    experts: int
    chosen: int

    def attach(self, model: nn.Module) -> None:
        """Let the routers of `model` report to the `Routing` of the forward pass."""
        for number, name in enumerate(self.names):
            module = model.get_submodule(name)
            # Not `module.forward`: in a copied model it is the other model's function.
            module.__dict__["forward"] = _reported(partial(type(module).forward, module), number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """The experts of one forward pass over N tokens, [N, chosen] by the number of the router."""

    chosen: dict[int, Tensor] = field(default_factory=dict)

    def chosen_NLK(self) -> Tensor:
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], dim=1)


_current = threading.local()


def current_routing() -> Routing | None:
    """Return the `Routing` of the forward pass that this thread computes, if it is recorded."""
    return getattr(_current, "routing", None)


@contextmanager
def routed(routing: Routing | None) -> Iterator[None]:
    before, _current.routing = current_routing(), routing
    try:
        yield
    finally:
        _current.routing = before


def _reported(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    def reported(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        routing = current_routing()
        if routing is not None:
            # A layer that is computed again for its gradient reports the same experts again.
            routing.chosen[number] = out[2]
        return out

    return reported


def find_routers(model: nn.Module, run: Callable[[], object]) -> Routers | None:
    """Return the routers of a forward pass; None unless all are of transformers' common kind and of one size.

    Such a router returns logits [N, experts], weights [N, chosen] and indices [N, chosen].
    """
    sizes: dict[str, tuple[int, int]] = {}

    def note(name: str, module: nn.Module, args: Any, out: Any) -> None:
        match out:
            case (Tensor() as logits, Tensor() as weights, Tensor() as indices, *_):
                is_choice = indices.dtype == torch.int64 and indices.dim() == logits.dim() == 2
                if is_choice and weights.shape == indices.shape and len(logits) == len(indices):
                    sizes[name] = logits.shape[1], indices.shape[1]

    handles = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if len(set(sizes.values())) != 1:
        return None
    experts, chosen = next(iter(sizes.values()))
    return Routers(names=tuple(sizes), experts=experts, chosen=chosen)


def count_experts(routers: Routers, routing: Routing) -> Tensor:
    """Return how many tokens each router sends to each expert, [L, experts]."""
    chosen_LM = routing.chosen_NLK().transpose(0, 1).flatten(1)
    # Sums of integers are the same in any order.
    counts_LE = chosen_LM.new_zeros(len(chosen_LM), routers.experts)
    return counts_LE.scatter_add_(1, chosen_LM, torch.ones_like(chosen_LM))


def load_metrics(counts_LE: NDArray[np.int64]) -> Mapping[str, float]:
    """Return the metrics of how evenly the tokens of a step are spread over the experts."""
    shares_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    logs_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)
    experts = counts_LE.shape[1]
    return {
        "expert_load_entropy": float(-(shares_LE * logs_LE).sum(axis=1).mean() / math.log(max(2, experts))),
        "expert_load_max": float(shares_LE.max() * experts),
        "expert_unused_frac": float((counts_LE == 0).mean()),
    }
