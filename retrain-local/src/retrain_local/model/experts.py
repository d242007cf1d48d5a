"""The routers of a mixture of experts: which experts they choose in a forward pass, or are given."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from retrain.api import BackendError, Problem, TrainRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a model, in order: each chooses `chosen` of `experts` for every token.

    With `can_replay` they take given experts instead, and weigh them by their own logits.
    """

    names: tuple[str, ...]
    experts: int
    chosen: int
    can_replay: bool

    @property
    def size(self) -> tuple[int, int]:
        """The number of routers, and of the experts that each chooses."""
        return len(self.names), self.chosen

    def attach(self, model: nn.Module) -> None:
        """Let the routers of `model` report to the `Routing` of the forward pass."""
        for number, name in enumerate(self.names):
            module = model.get_submodule(name)
            # Not `module.forward`: in a copied model it is the other model's function.
            module.__dict__["forward"] = _reported(partial(type(module).forward, module), number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """The experts of one forward pass over N tokens, [N, chosen] by the number of the router.

    `given_NLK` replace the chosen ones, -1 leaves the choice to the router; `chosen` are the router's own either way.
    """

    given_NLK: Tensor | None = None
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
        routing = current_routing()
        if routing is None:
            return forward(*args, **kwargs)
        # A layer that is computed again for its gradient reports the same experts again.
        if routing.given_NLK is None:
            out = forward(*args, **kwargs)
            routing.chosen[number] = out[2]
        else:
            with _Given(routing.given_NLK[:, number]) as mode:
                out = forward(*args, **kwargs)
            routing.chosen[number] = mode.chosen_NK
        return out

    return reported


class _Given(TorchFunctionMode):  # type: ignore[misc]
    """Puts the given experts in place of a router's own `topk`; the values are the router's, so is their gradient."""

    chosen_NK: Tensor

    def __init__(self, given_NK: Tensor) -> None:
        super().__init__()
        self._given_NK = given_NK

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Routers with groups of experts choose these first, by scores of another shape or by another number.
        if func not in (torch.topk, Tensor.topk) or out.indices.shape != self._given_NK.shape:
            return out
        self.chosen_NK = out.indices
        indices_NK = torch.where(self._given_NK < 0, out.indices, self._given_NK.long())
        return type(out)((args[0].gather(-1, indices_NK), indices_NK))


def find_routers(model: nn.Module, run: Callable[[], object]) -> Routers | None:
    """Return the routers of a forward pass; None unless all are of transformers' common kind and of one size.

    Such a router returns logits [N, experts], weights [N, chosen] and indices [N, chosen].
    """
    sizes: dict[str, tuple[int, int, bool]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        match out:
            case (Tensor() as logits, Tensor() as weights, Tensor() as indices, *_):
                is_choice = indices.dtype == torch.int64 and indices.dim() == logits.dim() == 2
                if is_choice and weights.shape == indices.shape and len(logits) == len(indices):
                    again = partial(module.forward, *args, **kwargs)
                    sizes[name] = (
                        logits.shape[1],
                        indices.shape[1],
                        _can_replay(again, weights, indices, logits.shape[1]),
                    )

    hook = partial(nn.Module.register_forward_hook, with_kwargs=True)
    handles = [hook(module, partial(note, name)) for name, module in model.named_modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if len(set(sizes.values())) != 1:
        return None
    experts, chosen, can_replay = next(iter(sizes.values()))
    return Routers(names=tuple(sizes), experts=experts, chosen=chosen, can_replay=can_replay)


def _can_replay(run: Callable[[], Any], weights_NK: Tensor, chosen_NK: Tensor, experts: int) -> bool:
    """True if a router that is given its own choice returns the same, and uses others that it is given."""
    with _Given(chosen_NK):
        _, own_NK, same_NK, *_ = run()
    others_NK = (chosen_NK + 1) % experts
    with _Given(others_NK):
        _, weights, indices_NK, *_ = run()
    is_same = torch.equal(same_NK, chosen_NK) and torch.equal(own_NK, weights_NK)
    # A weight of 0 is of an expert that the router would never choose.
    return is_same and torch.equal(indices_NK, others_NK) and bool((weights != 0).all())


def fitted(rows: Sequence[TrainRow], routers: Routers | None, layers: int) -> tuple[TrainRow, ...]:
    """Return the rows with the experts of the routers: servers report all layers, dense ones too.

    BackendError for experts that the model cannot have chosen.
    """
    if routers is None:
        return tuple(row if row.experts_TLK is None else replace(row, experts_TLK=None) for row in rows)
    found, numbers = [], [int(next(filter(str.isdecimal, name.split(".")), 0)) for name in routers.names]
    for index, row in enumerate(rows):
        given = row.experts_TLK
        if given is not None:
            shape, sizes = (len(row.tokens_T), *routers.size), list(given.shape)
            given = given[:, numbers] if given.shape == (shape[0], layers, shape[2]) else given
            if given.shape != shape or not ((given >= -1) & (given < routers.experts)).all():
                what = f"row {index} has experts of shape {sizes} that the model cannot have chosen"
                why = f"it chooses {routers.chosen} of {routers.experts} experts in {len(numbers)} of {layers} layers"
                fix = "serve the model that is trained, or start the server without reporting experts"
                raise BackendError(Problem(code="backend.row-experts", what=what, why=why, fix=fix))
            row = replace(row, experts_TLK=given)
        found.append(row)
    return tuple(found)


def count_experts(routers: Routers, routing: Routing, sampled_NLK: Tensor | None, index_M: Tensor) -> Tensor:
    """Return the tokens that each router sends to each expert, and how many of the M tokens differ from sampling.

    A vector: [L x experts] counts, the tokens with other experts than `sampled_NLK`, those with known ones.
    """
    chosen_NLK = routing.chosen_NLK()
    chosen_LM = chosen_NLK.transpose(0, 1).flatten(1)
    # Sums of integers are the same in any order.
    counts_LE = chosen_LM.new_zeros(len(chosen_LM), routers.experts)
    counts_LE.scatter_add_(1, chosen_LM, torch.ones_like(chosen_LM))
    found = chosen_LM.new_zeros(2)
    if sampled_NLK is not None:
        sampled_MLK, own_MLK = (each[index_M].sort().values for each in (sampled_NLK, chosen_NLK))
        known_M = (sampled_MLK >= 0).flatten(1).all(1)
        differs_M = (sampled_MLK != own_MLK).flatten(1).any(1)
        found = torch.stack([(differs_M & known_M).sum(), known_M.sum()])
    return torch.cat([counts_LE.flatten(), found])


def expert_metrics(counts: NDArray[np.int64], routers: Routers) -> Mapping[str, float]:
    """Return the metrics of a step from the sum of its `count_experts`."""
    *_, differing, known = counts.tolist()
    counts_LE = counts[:-2].reshape(-1, routers.experts)
    shares_LE = counts_LE / counts_LE.sum(axis=1, keepdims=True)
    logs_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)
    experts = counts_LE.shape[1]
    found = {"expert_mismatch_rate": differing / known} if known else {}
    return found | {
        "expert_load_entropy": float(-(shares_LE * logs_LE).sum(axis=1).mean() / math.log(max(2, experts))),
        "expert_load_max": float(shares_LE.max() * experts),
        "expert_unused_frac": float((counts_LE == 0).mean()),
    }
