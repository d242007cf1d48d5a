"""Llama-family decoder for packed rows: few operations per layer, and no GPU synchronisation.

Below it the pair of a trained decoder and its samplers over one set of frozen tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from retrain_local.attention.packed import MakeAttend
from retrain_local.decoder import Attend, PagedAttend, Scores, Shape, Target
from retrain_local.memory import sizes
from retrain_local.model.adapter import Lora, adapter_config, create_adapters
from retrain_local.model.architecture import Architecture
from retrain_local.model.fused import DecodeKernels, fused_decode, fused_gates, fused_operations
from retrain_local.model.model_files import Folder
from retrain_local.model.operations import Operations, Turn
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.projection import (
    Frozen,
    Matrix,
    Projection,
    Sampled,
    SampledInParts,
    SampledLowRank,
    SampledMerged,
    SampledStacked,
    Trained,
    TrainedLowRank,
    TrainedMerged,
    frozen_matrix,
)
from retrain_local.model.qlora import QuantisedLinear, quantiser
from retrain_local.model.weights import LayerWeights, Linear, Reader, Weights, matrices, read_weights


class LlamaDecoder:
    """A `TrainedDecoder` for the families of `architecture.FAMILIES`.

    `projections` are four for each layer: qkv, output, gate and up, down. `head` has the numbers of `weights.head`, for
    sampling. Weights that are trained may be wider than `dtype`, the activations' dtype; they are rounded when
    used. `padding` is a token whose embedding gets no gradient as an input, as in transformers' modules.
    """

    tier = "native"
    mixers = routers = None
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
        self.device, self.dtype = weights.embedding.device, dtype or weights.embedding.dtype
        self.head_parameters = tuple(p for p in (weights.head,) if isinstance(p, nn.Parameter))
        self.shape = Shape(
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
        self.recompute, self.is_ordered, self.is_reentrant = False, True, True
        self._operations = Operations()
        self._embedding, self._norm, self._head = weights.embedding, weights.norm, weights.head
        self._sampled_head = head
        self._decode: DecodeKernels | None = None
        self._eps = architecture.norm_eps
        frequencies_P, self._magnitude = architecture.rotation.frequencies(architecture.head_size)
        self._frequencies_P = frequencies_P.to(self.device)
        self._layers = [
            _Layer(at, architecture, layer, projections[4 * at : 4 * at + 4], self.dtype)
            for at, layer in enumerate(weights.layers)
        ]
        self._adapted = [p for p in projections if isinstance(p, Trained)]

    def packed(self, attend: MakeAttend) -> MakeAttend:
        return attend

    def keep_reference(self) -> None:
        for adapted in self._adapted:
            adapted.keep_reference()

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        for adapted in self._adapted:
            adapted.is_reference = True
        try:
            yield
        finally:
            for adapted in self._adapted:
                adapted.is_reference = False

    def fuse(self) -> None:
        """Use fused kernels between the products where this device has them."""
        self._operations = fused_operations(self.device, self.dtype, self.shape)
        self.shape = replace(self.shape, is_fused=self._operations != Operations())
        trained = {p.current.rank for p in self._adapted if isinstance(p, TrainedLowRank) and p.current is not None}
        if len(trained) == 1:
            gates = fused_gates(self.device, self.dtype, self.shape, trained.pop())
            self._operations = replace(self._operations, gates=gates)
        products = [p for layer in self._layers for p in (layer.qkv, layer.gate_up)]
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
            # Rounding the sum over layers in each layer made up a quarter of the gap between bf16 and fp32.
            x_ND = x_ND.float()
        is_trained = torch.is_grad_enabled()
        again = self.recompute and is_trained
        # nothing is saved without a gradient, and a checkpoint saves by its own hooks
        do = self._operations if is_trained and not again else replace(self._operations, spares=nullcontext)
        given = cos_N1P, sin_N1P, attend, do
        for layer in self._layers:
            if again:
                x_ND = checkpoint(layer, x_ND, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x_ND = layer(x_ND, *given)
        return self._operations.rms_norm(x_ND, self._norm.to(self.dtype), self._eps)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._sampled_head.linear(hidden_MD)
        if self.head_parameters:
            return functional.linear(hidden_MD, self._head.to(hidden_MD.dtype))
        logits_MV: Tensor = Frozen.apply(hidden_MD, self._sampled_head, self._head)
        return logits_MV


class _Layer:
    def __init__(
        self,
        at: int,
        architecture: Architecture,
        weights: LayerWeights,
        projections: Sequence[Projection],
        dtype: torch.dtype,
    ) -> None:
        self._at, self._weights, self._dtype = at, weights, dtype
        self.qkv, self._output, self.gate_up, self._down = projections
        self._eps = architecture.norm_eps
        self._scores = Scores(scale=architecture.head_size**-0.5, window=architecture.windows[at])
        self._heads, self._kv_heads = architecture.heads, architecture.kv_heads
        self._size = architecture.head_size

    def __call__(self, x_ND: Tensor, cos_N1P: Tensor, sin_N1P: Tensor, attend: Attend, do: Operations) -> Tensor:
        x_ND = x_ND + self._output(self._attended(x_ND, cos_N1P, sin_N1P, attend, do))
        normed_ND = do.rms_norm(x_ND, self._weights.inner_norm.to(self._dtype), self._eps)
        inner = self._gated(normed_ND, do)
        with do.spares(inner):
            return x_ND + self._down(inner)

    def _gated(self, normed_ND: Tensor, do: Operations) -> Tensor:
        with do.spares(normed_ND):
            if do.gates is not None and isinstance(self.gate_up, TrainedLowRank) and self.gate_up.current is not None:
                return self.gate_up.gated(normed_ND, self.gate_up.current, do.gates)
            gate_up = self.gate_up(normed_ND)
        return do.swiglu(gate_up)

    def decoded(
        self,
        x_ND: Tensor,
        added_ND: Tensor | None,
        cos_N1P: Tensor,
        sin_N1P: Tensor,
        attend: PagedAttend,
        do: DecodeKernels,
    ) -> Tensor:
        """Compute the layer for one token per row, no gradient; `added_ND` and the result are yet to be added to x."""
        weights = self._weights
        normed_ND = do.add_norm(x_ND, added_ND, weights.attention_norm, self._eps)
        assert isinstance(self.qkv, SampledInParts)
        assert isinstance(self.gate_up, SampledInParts)
        product, turn, target = self.qkv.parts(normed_ND), self._turn(cos_N1P, sin_N1P), attend.target(self._at)
        if target is not None:
            queries_NHD = do.heads(product, turn, target)
            gathered = attend.read(self._at, queries_NHD, self._scores)
        else:
            keys, values = product.y_NO.new_empty(2, len(x_ND), self._kv_heads, self._size)
            own = Target(keys_SKD=keys, values_SKD=values, slots_B=torch.arange(len(x_ND), device=x_ND.device))
            queries_NHD = do.heads(product, turn, own)
            gathered = attend(self._at, queries_NHD, own.keys_SKD, own.values_SKD, self._scores)
        normed_ND = do.add_norm(x_ND, self._output(gathered.flatten(1)), weights.inner_norm, self._eps)
        return self._down(do.swiglu(self.gate_up.parts(normed_ND)))

    def _attended(self, x_ND: Tensor, cos_N1P: Tensor, sin_N1P: Tensor, attend: Attend, do: Operations) -> Tensor:
        # apart from `__call__`, so that queries, keys and values are freed before the feed-forward part
        normed_ND = do.rms_norm(x_ND, self._weights.attention_norm.to(self._dtype), self._eps)
        with do.spares(normed_ND):
            qkv = self.qkv(normed_ND).view(len(x_ND), -1, self._size)
        heads = do.split_heads(qkv, self._turn(cos_N1P, sin_N1P))
        return attend(self._at, *heads, self._scores).flatten(1)

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


def create_llama_pair(folder: Folder, architecture: Architecture, lora: Lora, place: Placement) -> Pair:
    """Create the pair of a Llama-family model with an adapter; imports neither transformers nor PEFT."""
    pack = quantiser(place.quantize)
    spare_rows = lora.rank if place.is_stacked and pack is None else 0
    device, dtype = place.trainer, place.trainer_dtype
    with Reader(folder.weights(), device, dtype, spare_rows=spare_rows, progress=place.progress) as reader:
        weights = read_weights(reader, architecture, pack=pack)
    linears = [linear for layer in weights.layers for linear in layer.linears]
    adapters = create_adapters(linears, lora)
    parameters = {name: p for adapter in adapters for name, p in adapter.named().items()}
    total = weights.count + sum(p.numel() for p in parameters.values())
    targets = (name.rpartition(".")[2] for name in matrices(architecture))
    is_light = sum(linear.weight.numel() for linear in linears) <= sizes.MERGE_LIMIT
    is_merged = is_light and weights.embedding.dtype == torch.float32 and pack is None
    kind = TrainedMerged if is_merged else TrainedLowRank
    head = frozen_matrix(weights.head, may_copy=is_light)
    products = [kind(adapter) for adapter in adapters]
    trained = LlamaDecoder(architecture, weights, products, head=head, parameters=total)
    trained.fuse()
    samplers: list[LlamaDecoder] = []
    published: list[list[Sampled]] = []
    for device in place.samplers:
        with folder.refusals(device):
            moved = weights.mapped(partial(Tensor.to, device=device, dtype=place.sampler_dtype))
            may_copy = is_light or moved.embedding is not weights.embedding
            there = (linear.to(device, place.sampler_dtype) for linear in linears)
            how = {"is_merged": is_merged, "is_light": is_light, "may_copy": may_copy}
            published.append([_sampled(linear, lora.rank, **how) for linear in there])
            if (device, place.sampler_dtype) == (place.trainer, dtype):
                _share(products, published[-1])
            moved_head = head if moved.head is weights.head else frozen_matrix(moved.head, may_copy=may_copy)
            samplers.append(LlamaDecoder(architecture, moved, published[-1], head=moved_head, parameters=total))
            samplers[-1].fuse()

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        with torch.no_grad():
            for number, given in enumerate(adapters):
                values = given if adapter is None else given.holding(adapter)
                for sampled in published:
                    sampled[number].take(values)

    return Pair(
        trained=trained,
        samplers=tuple(samplers),
        parameters=parameters,
        total=total,
        eos_ids=folder.eos_ids(),
        adapter_config=adapter_config(targets, lora),
        publish=publish,
    )


def _share(products: Sequence[Trained], sampled: Sequence[Sampled]) -> None:
    """Let training multiply by the sampler's copies of the same matrices: no second copy, and no merging for a pack."""
    for product, other in zip(products, sampled, strict=True):
        if isinstance(product, TrainedMerged) and isinstance(other, SampledMerged):
            product.shared = other
        if isinstance(product, TrainedLowRank) and isinstance(other, SampledLowRank) and not other.expands:
            product.shared = other.frozen


def _sampled(linear: Linear, rank: int, *, is_merged: bool, is_light: bool, may_copy: bool) -> Sampled:
    if isinstance(linear, QuantisedLinear):
        return SampledLowRank(linear, rank, expands=not is_light)
    if is_merged and linear.weight.dtype == torch.float32:
        return SampledMerged(linear)
    if linear.stacked is not None:
        return SampledStacked(linear, linear.stacked, rank)
    return SampledLowRank(linear, rank, may_copy=may_copy)
