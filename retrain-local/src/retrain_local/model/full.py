"""A decoder of the Llama family that is trained as a whole, and the products that its gradient goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrain_local.model.architecture import Architecture
from retrain_local.model.llama import LlamaDecoder
from retrain_local.model.model_files import Folder, ModelFiles
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.projection import Matrix, Plain, frozen_matrix
from retrain_local.model.weights import HeadsNorm, LayerWeights, Linear, Reader, Weights, read_weights

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class ReadsReference:
    """A decoder trained as a whole; its reference replaces `attributes`, and is read from the files at first use."""

    attributes: ClassVar[tuple[str, ...]]
    read_reference: Callable[[], object]
    _read: object = None

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        self._read = self._read or self.read_reference()
        own = {name: getattr(self, name) for name in self.attributes}
        try:
            self.__dict__ |= {name: getattr(self._read, name) for name in self.attributes}
            yield
        finally:
            self.__dict__ |= own


class FullDecoder(ReadsReference, LlamaDecoder):
    attributes = ("_embedding", "_norm", "_head", "_sampled_head", "_layers")

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.is_ordered = False  # the embedding's gradient scatters


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedLinear:
    """x W^T + bias with every number trained; `parts` are views of the fused matrix, then of the bias."""

    linear: Linear
    parts: tuple[nn.Parameter, ...]

    def __call__(self, x_NI: Tensor) -> Tensor:
        return _Linear.apply(x_NI, self.linear, *self.parts)


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    """Stores only x for the backward pass; the weights are rounded to its dtype in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Linear, *parts: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return functional.linear(x, linear.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), linear, g = ctx.saved_tensors, ctx.linear, gradients[0]
        of_parts = (g.T @ x).to(linear.weight.dtype).split(linear.sizes)
        if linear.bias is not None:
            of_parts += g.sum(0, dtype=linear.bias.dtype).split(linear.sizes)
        of_x = g @ linear.weight.to(g.dtype) if ctx.needs_input_grad[0] else None
        return of_x, None, *of_parts


def norm_names(at: int) -> list[str]:
    """Return the names of a layer's norms: before attention, before the feed-forward part, of queries, of keys."""
    layer = f"model.layers.{at}."
    names = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    return [f"{layer}{name}.weight" for name in names]


def create_full_pair(
    folder: Folder, architecture: Architecture, place: Placement, shard: Callable[..., Any] | None = None
) -> Pair:
    """Create a pair that trains all weights, by transformers' names and in fp32 whatever dtype the products have."""
    # With bf16 products a weight is rounded where it is used, in both directions, as torch.autocast does it: the
    # numbers equal a working copy's, without its memory.
    with Reader(folder.weights(), place.trainer, torch.float32, progress=place.progress) as reader:
        read = read_weights(reader, architecture)
        dtypes = {name.removeprefix("model."): reader.dtype(name) for name in reader.names()}
    weights, linears, parameters = _trained(read, architecture)
    total = sum(p.numel() for p in parameters.values())
    given = {"parameters": total, "dtype": place.trainer_dtype}

    def reference() -> LlamaDecoder:
        with Reader(folder.weights(), place.trainer, place.trainer_dtype) as reader:
            frozen = read_weights(reader, architecture)
        products = [
            partial(functional.linear, weight=linear.weight, bias=linear.bias)
            for layer in frozen.layers
            for linear in layer.linears
        ]
        return LlamaDecoder(architecture, frozen, products, head=Plain(frozen.head), **given)

    samplers: list[_Sampler] = []
    for device in place.samplers:
        with folder.refusals(device):
            samplers.append(_Sampler(architecture, weights, device, place.sampler_dtype, total))

    values: Mapping[str, Tensor] = parameters
    if shard is None:
        trained = FullDecoder(architecture, weights, linears, head=Plain(weights.head), **given)
    else:
        parts = list(parameters), architecture, weights, linears
        trained, parameters, values = shard(*parts, mesh=place.mesh, **given)
        del read, weights, linears, parts
    trained.read_reference, trained.padding = reference, folder.document.get("pad_token_id")

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        with torch.no_grad():
            for sampler in samplers:
                sampler.take(values if adapter is None else adapter)

    files = ModelFiles(
        document=dict(folder.document),
        companions=folder.companions(),
        dtypes={name: dtypes[name.removeprefix("model.")] for name in parameters},
    )
    return Pair(
        trained=trained,
        samplers=tuple(sampler.decoder for sampler in samplers),
        parameters=parameters,
        total=total,
        eos_ids=folder.eos_ids(),
        adapter_config={},
        publish=publish,
        files=files,
    )


class _SampledLinear:
    """x W^T + bias with copies of both on the sampler's device."""

    def __init__(self, linear: Linear, device: torch.device, dtype: torch.dtype) -> None:
        self._names, self._device, self._dtype = linear.names, device, dtype
        self._matrix = frozen_matrix(linear.weight.to(device, dtype, copy=True))
        self._bias = None if linear.bias is None else linear.bias.to(device, dtype, copy=True)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self._matrix.linear(x_NI, self._bias)

    def take(self, values: Mapping[str, Tensor]) -> None:
        # copied in place, so that CUDA graphs see them
        weight = torch.cat([values[f"{name}.weight"] for name in self._names])
        self._matrix.take(weight.to(self._device, self._dtype))
        if self._bias is not None:
            self._bias.copy_(torch.cat([values[f"{name}.bias"] for name in self._names]))


class _Sampler:
    def __init__(
        self, architecture: Architecture, weights: Weights, device: torch.device, dtype: torch.dtype, total: int
    ) -> None:
        self._heads = architecture.heads
        self._weights = weights.mapped(lambda x: x.detach().to(device, dtype, copy=True))
        linears = (linear for layer in weights.layers for linear in layer.linears)
        self._linears = [_SampledLinear(linear, device, dtype) for linear in linears]
        self._head: Matrix = frozen_matrix(self._weights.head)  # unless prepacked, that tensor itself
        self.decoder = LlamaDecoder(architecture, self._weights, self._linears, head=self._head, parameters=total)
        self.decoder.fuse()

    def take(self, values: Mapping[str, Tensor]) -> None:
        mine = self._weights
        mine.embedding.copy_(values[EMBEDDING])
        mine.norm.copy_(values[NORM])
        if mine.head is not mine.embedding:
            mine.head.copy_(values[HEAD])
        self._head.take(mine.head)
        for linear in self._linears:
            linear.take(values)
        for at, layer in enumerate(mine.layers):
            names = norm_names(at)
            layer.attention_norm.copy_(values[names[0]])
            layer.inner_norm.copy_(values[names[1]])
            if isinstance(layer.heads_norm, Tensor):
                layer.heads_norm[: self._heads].copy_(values[names[2]])
                layer.heads_norm[self._heads :].copy_(values[names[3]])


def _trained(read: Weights, architecture: Architecture) -> tuple[Weights, list[TrainedLinear], dict[str, nn.Parameter]]:
    """Turn tensors into parameters: a fused matrix into its parts, and repeated norms into one vector each."""
    embedding = nn.Parameter(read.embedding)
    head = embedding if read.head is read.embedding else nn.Parameter(read.head)
    found = {EMBEDDING: embedding, NORM: nn.Parameter(read.norm)} | ({} if head is embedding else {HEAD: head})
    layers: list[LayerWeights] = []
    linears: list[TrainedLinear] = []
    for at, layer in enumerate(read.layers):
        norms = [nn.Parameter(layer.attention_norm), nn.Parameter(layer.inner_norm)]
        if layer.norm_HD is not None:
            norms += [nn.Parameter(layer.norm_HD[place].clone()) for place in (0, architecture.heads)]
        found |= dict(zip(norm_names(at), norms, strict=False))
        for linear in layer.linears:
            tensors = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
            parts = tuple(nn.Parameter(part) for tensor in tensors for part in tensor.split(linear.sizes))
            names = [f"{name}.{kind}" for kind in ("weight", "bias") for name in linear.names]
            found |= dict(zip(names, parts, strict=False))
            linears.append(TrainedLinear(linear=linear, parts=parts))
        heads_norm = None
        if len(norms) > 2:
            sizes = {"heads": architecture.heads, "kv_heads": architecture.kv_heads}
            heads_norm = HeadsNorm(queries_D=norms[2], keys_D=norms[3], **sizes)
        layers.append(replace(layer, attention_norm=norms[0], inner_norm=norms[1], heads_norm=heads_norm))
    trained = Weights(embedding=embedding, layers=tuple(layers), norm=found[NORM], head=head)
    return trained, linears, found
