"""Llama-family decoder for packed rows: few operations per layer, and no GPU synchronisation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retrain_local.decoder import Attend, PagedAttend, Scores, Shape
from retrain_local.model.architecture import Architecture
from retrain_local.model.decode_kernels import DecodeKernels, fused_decode, scratch_target
from retrain_local.model.fused import fused_operations
from retrain_local.model.operations import Operations, Turn
from retrain_local.model.prepacked import Matrix
from retrain_local.model.projection import Projection, Trained
from retrain_local.model.stacked import SampledInParts
from retrain_local.model.weights import LayerWeights, Weights


@dataclass(frozen=True, slots=True, eq=False)
class Projections:
    """The four fused projections of a layer."""

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection

    def trained(self) -> Iterator[Trained]:
        """Those with a trained adapter, and a reference."""
        return (p for p in (self.qkv, self.output, self.gate_up, self.down) if isinstance(p, Trained))


class LlamaDecoder:
    """Llama, Qwen2, Qwen3, Mistral; see `Decoder`.

    `recompute` keeps one activation per layer in a pass that is differentiated and makes the others again.
    `padding` is a token whose embedding gets no gradient as an input, as in transformers' modules.
    """

    padding: int | None = None

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        projections: Sequence[Projection],
        *,
        head: Matrix,
        parameters: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`projections` are four for each layer; `head` has the numbers of `weights.head`, for sampling.

        Weights that are trained may be wider than `dtype`, the one of the activations; they are rounded when used.
        """
        self.device, self.dtype = weights.embedding.device, dtype or weights.embedding.dtype
        self.head_parameters = tuple(p for p in (weights.head,) if isinstance(p, nn.Parameter))
        self.shape = _shape(architecture, parameters)
        self.recompute, self.is_ordered = False, True
        self._operations = Operations()
        self._embedding, self._norm, self._head = weights.embedding, weights.norm, weights.head
        self._sampled_head = head
        self._decode: DecodeKernels | None = None
        self._eps = architecture.norm_eps
        frequencies_P, self._magnitude = architecture.rotation.frequencies(architecture.head_size)
        self._frequencies_P = frequencies_P.to(self.device)
        self._layers = [
            _Layer(at, architecture, layer, Projections(*projections[4 * at : 4 * at + 4]), self.dtype)
            for at, layer in enumerate(weights.layers)
        ]

    def keep_reference(self) -> None:
        for projection in self._trained():
            projection.keep_reference()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        for projection in self._trained():
            projection.is_reference = True
        try:
            yield
        finally:
            for projection in self._trained():
                projection.is_reference = False

    def _trained(self) -> Iterator[Trained]:
        return (projection for layer in self._layers for projection in layer.projections.trained())

    def fuse(self) -> None:
        """Use fused kernels between the products where this device has them."""
        self._operations = fused_operations(self.device, self.dtype, self.shape)
        products = [p for layer in self._layers for p in (layer.projections.qkv, layer.projections.gate_up)]
        ranks = {p.rank if isinstance(p, SampledInParts) else None for p in products}
        if len(ranks) == 1 and (rank := ranks.pop()) is not None:
            self._decode = fused_decode(self.device, self.dtype, self.shape, rank)

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        angles_N1P = (positions_N[:, None].float() * self._frequencies_P)[:, None]
        cos_N1P = (angles_N1P.cos() * self._magnitude).to(self.dtype)
        sin_N1P = (angles_N1P.sin() * self._magnitude).to(self.dtype)
        x_ND = functional.embedding(ids_N, self._embedding, self.padding).to(self.dtype)
        if self._decode is not None and isinstance(attend, PagedAttend) and not torch.is_grad_enabled():
            added_ND = None
            for layer in self._layers:
                added_ND = layer.decoded(x_ND, added_ND, cos_N1P, sin_N1P, attend, self._decode)
            return self._decode.add_norm(x_ND, added_ND, self._norm, self._eps)
        if not x_ND.is_cuda:
            x_ND = x_ND.float()  # the sum over all layers: rounding it in each cost bf16 a quarter of its gap
        is_trained = torch.is_grad_enabled()
        again = self.recompute and is_trained
        # nothing is saved without a gradient, and a checkpoint saves by hooks of its own
        do = self._operations if is_trained and not again else replace(self._operations, spares=nullcontext)
        given = cos_N1P, sin_N1P, attend, do
        for layer in self._layers:
            if again:
                x_ND = checkpoint(layer, x_ND, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ND = layer(x_ND, *given)
        return self._operations.rms_norm(x_ND, self._norm.to(self.dtype), self._eps)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return functional.linear(hidden_MD, self._head.to(hidden_MD.dtype))
        return self._sampled_head.linear(hidden_MD)


class _Layer:
    def __init__(
        self, at: int, architecture: Architecture, weights: LayerWeights, projections: Projections, dtype: torch.dtype
    ) -> None:
        self._at, self._weights, self.projections, self._dtype = at, weights, projections, dtype
        self._eps = architecture.norm_eps
        self._scores = Scores(scale=architecture.head_size**-0.5, window=architecture.windows[at])
        self._heads, self._kv_heads = architecture.heads, architecture.kv_heads
        self._size = architecture.head_size

    def __call__(self, x_ND: Tensor, cos_N1P: Tensor, sin_N1P: Tensor, attend: Attend, do: Operations) -> Tensor:
        weights, project = self._weights, self.projections
        x_ND = x_ND + project.output(self._attended(x_ND, cos_N1P, sin_N1P, attend, do))
        normed_ND = do.rms_norm(x_ND, weights.inner_norm.to(self._dtype), self._eps)
        with do.spares(normed_ND):
            gate_up = project.gate_up(normed_ND)
        inner = do.swiglu(gate_up)
        with do.spares(inner):
            return x_ND + project.down(inner)

    def decoded(
        self,
        x_ND: Tensor,
        added_ND: Tensor | None,
        cos_N1P: Tensor,
        sin_N1P: Tensor,
        attend: PagedAttend,
        do: DecodeKernels,
    ) -> Tensor:
        """The same for one token per row, without a gradient: `added_ND` is still to be added to x, so is what returns.

        The projections have to be `SampledInParts`; x is changed in place.
        """
        weights, project = self._weights, self.projections
        normed_ND = do.add_norm(x_ND, added_ND, weights.attention_norm, self._eps)
        assert isinstance(project.qkv, SampledInParts)
        assert isinstance(project.gate_up, SampledInParts)
        product, turn, target = project.qkv.parts(normed_ND), self._turn(cos_N1P, sin_N1P), attend.target(self._at)
        if target is not None:
            queries_NHD = do.heads(product, turn, target)
            gathered = attend.read(self._at, queries_NHD, self._scores)
        else:
            own = scratch_target(len(x_ND), self._kv_heads, self._size, product.y_NO)
            queries_NHD = do.heads(product, turn, own)
            gathered = attend(self._at, queries_NHD, own.keys_SKD, own.values_SKD, self._scores)
        normed_ND = do.add_norm(x_ND, project.output(gathered.flatten(1)), weights.inner_norm, self._eps)
        return project.down(do.swiglu(project.gate_up.parts(normed_ND)))

    def _attended(self, x_ND: Tensor, cos_N1P: Tensor, sin_N1P: Tensor, attend: Attend, do: Operations) -> Tensor:
        normed_ND = do.rms_norm(x_ND, self._weights.attention_norm.to(self._dtype), self._eps)
        with do.spares(normed_ND):
            qkv = self.projections.qkv(normed_ND).view(len(x_ND), -1, self._size)
        queries_NHD, keys_NKD, values_NKD = do.split_heads(qkv, self._turn(cos_N1P, sin_N1P))
        return attend(self._at, queries_NHD, keys_NKD, values_NKD, self._scores).flatten(1)

    def _turn(self, cos_N1P: Tensor, sin_N1P: Tensor) -> Turn:
        norm_HD = self._weights.norm_HD
        return Turn(
            heads=self._heads,
            kv_heads=self._kv_heads,
            cos_N1P=cos_N1P,
            sin_N1P=sin_N1P,
            norm_HD=None if norm_HD is None else norm_HD.to(self._dtype),
            eps=self._eps,
        )


def _shape(architecture: Architecture, parameters: int) -> Shape:
    return Shape(
        layers=architecture.layers,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_size=architecture.head_size,
        value_size=architecture.head_size,
        hidden=architecture.hidden,
        inner=architecture.inner,
        vocabulary=architecture.vocabulary,
        context=architecture.context,
        parameters=parameters,
    )
