"""FSDP2 (`torch.distributed.fsdp.fully_shard`) around a decoder that is trained as a whole, layer by layer.

Every rank keeps a part of each weight. A layer is gathered before it computes and given up afterwards, forward and
backward; embedding, final norm and head stay gathered from the beginning of a pass to the end of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from retrain_local.decoder import Attend
from retrain_local.devices.group import whole
from retrain_local.model.architecture import Architecture
from retrain_local.model.full import EMBEDDING, HEAD, NORM, FullDecoder, TrainedLinear, norm_names
from retrain_local.model.weights import HeadsNorm, LayerWeights, Weights


class ShardedLinear(nn.Module):  # type: ignore[misc]
    """x W^T + bias of every part, side by side: parts are gathered one by one, so a fused matrix would be a copy."""

    def __init__(self, linear: TrainedLinear) -> None:
        super().__init__()
        self.names, count = linear.linear.names, len(linear.linear.names)
        self.weights, self.biases = nn.ParameterList(linear.parts[:count]), nn.ParameterList(linear.parts[count:])

    def forward(self, x_NI: Tensor) -> Tensor:
        biases = list(self.biases) or [None] * len(self.weights)
        return torch.cat([functional.linear(x_NI, w, b) for w, b in zip(self.weights, biases, strict=True)], dim=1)


class ShardedLayer(nn.Module):  # type: ignore[misc]
    """The weights of a layer, as `LayerWeights` names them, and the layer that computes with them."""

    compute: Callable[..., Tensor]

    def __init__(self, layer: LayerWeights, projections: Sequence[ShardedLinear]) -> None:
        super().__init__()
        self.attention_norm, self.inner_norm = layer.attention_norm, layer.inner_norm
        self.projections = nn.ModuleList(projections)
        if isinstance(layer.heads_norm, HeadsNorm):
            self.queries_norm, self.keys_norm = layer.heads_norm.queries_D, layer.heads_norm.keys_D
            self._heads = {"heads": layer.heads_norm.heads, "kv_heads": layer.heads_norm.kv_heads}

    @property
    def norm_HD(self) -> Tensor | None:
        if not hasattr(self, "queries_norm"):
            return None
        return HeadsNorm(queries_D=self.queries_norm, keys_D=self.keys_norm, **self._heads).expanded()

    def forward(self, x_ND: Tensor, *given: Any) -> Tensor:
        return self.compute(x_ND, *given)


class _Root(nn.Module):  # type: ignore[misc]
    def __init__(self, decoder: ShardedDecoder, layers: Sequence[ShardedLayer], weights: Weights) -> None:
        super().__init__()
        self._hidden, self.layers = decoder.hidden_of, nn.ModuleList(layers)
        self.embedding, self.norm = weights.embedding, weights.norm
        self.head = None if weights.head is weights.embedding else weights.head

    def forward(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        return self._hidden(self, ids_N, positions_N, attend)


class ShardedDecoder(FullDecoder):
    """A `FullDecoder` that this rank holds a part of; all ranks call the same methods at the same time."""

    def __init__(
        self, architecture: Architecture, weights: Weights, linears: Sequence[TrainedLinear], *, mesh: Any, **given: Any
    ) -> None:
        projections = [ShardedLinear(linear) for linear in linears]
        layers = [ShardedLayer(w, projections[4 * at : 4 * at + 4]) for at, w in enumerate(weights.layers)]
        modules: Any = tuple(layers)
        super().__init__(architecture, replace(weights, layers=modules), projections, head=None, **given)
        for layer, own in zip(layers, self._layers, strict=True):
            layer.compute = own
        self._layers: Any = layers
        self._is_reference = False
        self._root: Any = _Root(self, layers, weights)
        wide = self.dtype == torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=None if wide else self.dtype,
            reduce_dtype=None if wide else torch.float32,
            cast_forward_inputs=False,
        )
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self._root, mesh=mesh, mp_policy=precision)

    def parameters(self) -> dict[str, nn.Parameter]:
        root = self._root
        found = {EMBEDDING: root.embedding, NORM: root.norm} | ({} if root.head is None else {HEAD: root.head})
        for at, layer in enumerate(root.layers):
            norms = ("attention_norm", "inner_norm", "queries_norm", "keys_norm")
            found |= {
                name: getattr(layer, own)
                for name, own in zip(norm_names(at), norms, strict=True)
                if hasattr(layer, own)
            }
            for linear in layer.projections:
                for kind, parts in (("weight", linear.weights), ("bias", linear.biases)):
                    found |= dict(zip((f"{name}.{kind}" for name in linear.names), parts, strict=False))
        return found

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        if self._is_reference:
            return super().hidden(ids_N, positions_N, attend)
        # FSDP does not notice the end of a pass without a gradient.
        self._root.reshard()
        return self._root(ids_N, positions_N, attend)

    def hidden_of(self, root: _Root, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Compute `hidden` while embedding, norm and head of `root` are gathered."""
        self._embedding, self._norm = root.embedding, root.norm
        self._head = root.embedding if root.head is None else root.head
        self.head_parameters = (self._head,)
        return super().hidden(ids_N, positions_N, attend)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        if self._is_reference:
            return super().logits(hidden_MD)
        return functional.linear(hidden_MD, self._head.to(hidden_MD.dtype))  # gathered by `hidden`

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        with super().as_reference():
            self._is_reference = True
            try:
                yield
            finally:
                self._is_reference = False


def shard(
    names: Iterable[str], *parts: Any, **given: Any
) -> tuple[ShardedDecoder, dict[str, nn.Parameter], Mapping[str, Tensor]]:
    """Create the decoder; return also its parameters under `names`, sharded and whole."""
    decoder = ShardedDecoder(*parts, **given)
    found = decoder.parameters()
    parameters = {name: found[name] for name in names}
    return decoder, parameters, Gathered(parameters)


class Gathered(Mapping[str, Tensor]):
    """Weights by name, whole: each is gathered when it is read, so all ranks read the same ones in the same order."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._parameters[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)
