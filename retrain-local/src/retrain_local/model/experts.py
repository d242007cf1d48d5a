"""The routers of a mixture of experts: which experts they choose in a forward pass, or are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
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
            module.__dict__["forward"] = _reported(partial(type(module).forward, module), number, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """The experts of one forward pass over N tokens, [N, chosen] by the number of the router.

    `given_NLK` replace the chosen ones, -1 leaves the choice to the router; `chosen` are the router's own either way.
    """

    given_NLK: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)

    def chosen_NLK(self) -> Tensor:
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], dim=1)


# Of the forward pass that this thread computes, if it is recorded.
ROUTING: ContextVar[Routing | None] = ContextVar("routing", default=None)


def _reported(forward: Callable[..., Any], number: int, experts: int) -> Callable[..., Any]:
    def reported(*args: Any, **kwargs: Any) -> Any:
        routing = ROUTING.get()
        if routing is None:
            return forward(*args, **kwargs)
        given = None if routing.given_NLK is None else _Given(routing.given_NLK[:, number], experts)
        with given or nullcontext():
            out = forward(*args, **kwargs)
        # A layer that is computed again for its gradient reports the same experts again.
        routing.chosen[number] = given.chosen_NK if given else out[2]
        return out

    return reported


class _Given(TorchFunctionMode):  # type: ignore[misc]
    """Puts the given experts in place of a router's own `topk`; the values are the router's, so is their gradient."""

    chosen_NK: Tensor

    def __init__(self, given_NK: Tensor, experts: int) -> None:
        super().__init__()
        self._given_NK, self._scores = given_NK, (len(given_NK), experts)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Routers with groups of experts choose these first, by scores of another shape or by another number.
        is_topk = func in (torch.topk, Tensor.topk) and args[0].shape == self._scores
        if not is_topk or out.indices.shape != self._given_NK.shape:
            return out
        self.chosen_NK = out.indices
        indices_NK = torch.where(self._given_NK < 0, out.indices, self._given_NK.long())
        return type(out)((args[0].gather(-1, indices_NK), indices_NK))


def find_routers(model: nn.Module, run: Callable[[], object]) -> Routers | None:
    """Return the routers of a forward pass; None unless all are of transformers' common kind and of one size.

    Such a router returns logits [N, experts], weights [N, chosen] and indices [N, chosen].
    """
    found: dict[str, tuple[int, int, bool]] = {}

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if not isinstance(out, tuple) or len(out) < 3 or not all(isinstance(each, Tensor) for each in out[:3]):
            return
        logits, weights, own_NK = out[:3]
        sizes = len(own_NK), logits.shape[-1], own_NK.shape[-1]
        shapes = logits.shape, weights.shape, own_NK.shape
        if own_NK.dtype != torch.int64 or shapes != (sizes[:2], sizes[::2], sizes[::2]):
            return
        with _Given(others_NK := (own_NK + 1) % sizes[1], sizes[1]):
            _, weights, given_NK, *_ = module.forward(*args, **kwargs)
        # A weight of 0 is of an expert that the router would never choose.
        found[name] = *sizes[1:], torch.equal(given_NK, others_NK) and bool((weights != 0).all())

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(note, name), with_kwargs=True))
        run()
    if len(set(found.values())) != 1:
        return None
    experts, chosen, can_replay = next(iter(found.values()))
    return Routers(names=tuple(found), experts=experts, chosen=chosen, can_replay=can_replay)


def fit_experts(model: Any) -> None:
    """Compute experts one by one if torch cannot group their products: in bf16 it needs rows of eight numbers."""
    shapes = (p.shape[1:] for name, p in model.named_parameters() if p.dim() == 3 and "experts" in name)
    if any(size % 8 for shape in shapes for size in shape) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def layer_number(name: str) -> int:
    """Return the number in a module's name; 0 for a module outside the layers."""
    return int(next(filter(str.isdecimal, name.split(".")), 0))


def fitted(rows: Sequence[TrainRow], routers: Routers | None, layers: int) -> tuple[TrainRow, ...]:
    """Return the rows with the experts of the routers, all or none: servers report all layers, dense ones too.

    BackendError for experts that the model cannot have chosen.
    """
    if routers is None or all(row.experts_TLK is None for row in rows):
        return tuple(replace(row, experts_TLK=None) for row in rows)
    found, numbers = [], [layer_number(name) for name in routers.names]
    for index, row in enumerate(rows):
        shape = (len(row.tokens_T), *routers.size)
        given = np.full(shape, -1, np.int16) if row.experts_TLK is None else row.experts_TLK
        own = given[:, numbers] if given.shape == (shape[0], layers, shape[2]) else given
        if own.shape != shape or not ((own >= -1) & (own < routers.experts)).all():
            what = f"row {index} has experts of shape {list(given.shape)} that the model cannot have chosen"
            why = f"it chooses {routers.chosen} of {routers.experts} experts in {len(numbers)} of {layers} layers"
            fix = "serve the model that is trained, or start the server without reporting experts"
            raise BackendError(Problem(code="backend.row-experts", what=what, why=why, fix=fix))
        found.append(replace(row, experts_TLK=own))
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
