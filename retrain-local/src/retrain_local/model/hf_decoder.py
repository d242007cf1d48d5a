"""A causal language model of transformers behind the contract of `Decoder`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput

from retrain_local.attention.packed import MakeAttend
from retrain_local.attention.rows import Move
from retrain_local.decoder import Attend, Shape, within
from retrain_local.model.experts import Routers
from retrain_local.model.states import Mixed, Mixers, PackedMix, joined, mapped
from retrain_local.model.tunnel import Tunnel, divert
from retrain_local.model.written import PASSAGE

# Names of the cache among the arguments and outputs of models.
CACHES = ("past_key_values", "cache_params", "state")


class HfDecoder:
    """A causal language model of transformers as a `TrainedDecoder`, its attention and state behind `Attend`.

    The model with its body cut out is the head, so that the architecture's own code does soft-capping and scaling.
    """

    tier = "paged"
    shape: Shape
    routers: Routers | None = None
    is_ordered = False  # experts and other modules scatter
    is_reentrant = True
    head_parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, model: Any, mixers: Mixers | None = None, first_position: int = 0) -> None:
        self.device, self.dtype = model.device, model.dtype
        self.mixers, self._first_position = mixers, first_position
        self._model = model
        path = body_path(model)
        divert(model, mixers)
        has_own = mixers is not None and not mixers.is_body
        self._tunnel: Any = type("Tunnel", (Tunnel, type(mixers.empty())), {}) if mixers and has_own else Tunnel
        self._body = model.get_submodule(path)
        self._argument = cache_argument(self._body)
        self._head = _replaced(model, path.split("."), _Given(self._body))
        self._recompute = False
        self._has_token_types = any(name.endswith("token_type_ids") for name, _ in self._body.named_buffers())
        self._reference: list[tuple[nn.ModuleDict, nn.ModuleDict]] = []

    @property
    def recompute(self) -> bool:
        return self._recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if value == self._recompute:
            return
        self._recompute = value
        # transformers' own switch requires training mode and so enables dropout in some layers
        for module in self._model.modules():
            if not isinstance(module, GradientCheckpointingLayer):
                continue
            if value:
                again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
                module.__dict__["forward"] = again
            else:
                module.__dict__["forward"] = module.forward.args[0]

    def packed(self, attend: MakeAttend) -> MakeAttend:
        return (lambda spans, device: Mixed(attend(spans, device), PackedMix(spans, device))) if self.mixers else attend

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        if self.mixers and self.mixers.is_body:
            assert isinstance(attend, Mixed)
            return attend.mix(0, partial(self._mixed, ids_N[None]))[0]
        tunnel = self._tunnel(attend, positions_N)
        inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], "use_cache": True}
        if self._first_position:
            inputs["position_ids"] = inputs["position_ids"] + self._first_position
        if self._has_token_types:
            inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])  # the buffer is as long as one row
        with within(PASSAGE, tunnel):
            return self._body(**inputs, **{self._argument: tunnel}).last_hidden_state[0]

    def _mixed(self, ids_1N: Tensor, move: Move, cache: Any) -> Tensor:
        """Run a body that is one mixer; `cache` holds the state that it takes and returns."""
        assert self.mixers is not None
        ids_BT = move(ids_1N)
        if cache is None:
            return self._body(input_ids=ids_BT, use_cache=False).last_hidden_state
        if len(ids_BT) > 1 and not self.mixers.is_batched:
            rows = [SimpleNamespace(kept=mapped(cache.kept, itemgetter(slice(n, n + 1)))) for n in range(len(ids_BT))]
            outs = [self._mixed(ids_BT[n : n + 1], lambda x: x, row) for n, row in enumerate(rows)]
            cache.kept = joined([row.kept for row in rows])
            return torch.cat(outs)
        out = self._body(input_ids=ids_BT, use_cache=True, **{self._argument: cache.kept})
        cache.kept = getattr(out, self._argument)
        return out.last_hidden_state

    def keep_reference(self) -> None:
        self._reference = [(copy.deepcopy(layer.lora_A), copy.deepcopy(layer.lora_B)) for layer in self._adapted()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        layers = self._adapted()
        trained = [(layer.lora_A, layer.lora_B) for layer in layers]
        try:
            for layer in layers:
                # PEFT's own switch also freezes the parameters.
                layer._disable_adapters = not self._reference
            for layer, (a, b) in zip(layers, self._reference, strict=False):
                layer.lora_A, layer.lora_B = a, b
            yield
        finally:
            for layer, (a, b) in zip(layers, trained, strict=True):
                layer.lora_A, layer.lora_B, layer._disable_adapters = a, b, False

    def _adapted(self) -> list[LoraLayer]:
        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden_MD[None], use_cache=False).logits[0]


def cache_argument(body: nn.Module) -> str:
    names = inspect.signature(type(body).forward).parameters
    return next((name for name in CACHES if name in names), CACHES[0])


def body_path(model: Any) -> str:
    """Return the name of the part below the head."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    for name, module in model.named_modules():
        if name and module is body and isinstance(module, PreTrainedModel):
            return str(name)
    prefix = str(model.base_model_prefix)
    names = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return prefix if prefix in names or not names else str(names[0])


class _Output(BaseModelOutput):  # type: ignore[misc]
    """Hidden states. Other fields that an architecture reads (router logits, cross attentions) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):  # type: ignore[misc]
    """The body's place in the head, with the body's attributes: heads read multipliers there."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.__dict__["body"] = body

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> Any:
    """Return a copy of the module with the same tensors and another submodule at `path`."""
    found, child = copy.copy(module), module._modules[path[0]]
    assert child is not None
    found._modules = module._modules | {path[0]: _replaced(child, path[1:], new) if path[1:] else new}
    return found
