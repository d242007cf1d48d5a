"""Frozen weights, read from safetensors directly into the fused tensors of the decoder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retrain.api import PhaseProgress
from retrain_local.model.architecture import Architecture

# Triton loads rows of the product of a stacked matrix as vectors if their stride is a multiple of 16 numbers.
STACKED_MULTIPLE = 16
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def stacked_rows(rows: int) -> int:
    """Return the rows that are allocated below a stacked matrix for an adapter's `rows`."""
    return -(-rows // STACKED_MULTIPLE) * STACKED_MULTIPLE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """One or more matrices with the same input, stacked: [sum of outputs, inputs].

    `names` are their modules in transformers, `sizes` their outputs. `stacked` has the adapter's rows below `weight`.
    """

    weight: Tensor
    bias: Tensor | None
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stacked: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> Linear:
        """Return the same tensors if device and dtype already match, otherwise copies."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        if self.stacked is None:
            return replace(self, weight=self.weight.to(device, dtype), bias=bias)
        stacked = self.stacked.to(device, dtype)
        return replace(self, weight=stacked[: len(self.weight)], bias=bias, stacked=stacked)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadsNorm:
    """Trained norm weights of queries and keys: two vectors, each for all of its heads."""

    queries_D: Tensor
    keys_D: Tensor
    heads: int
    kv_heads: int

    def expanded(self) -> Tensor:
        return torch.cat([self.queries_D.expand(self.heads, -1), self.keys_D.expand(self.kv_heads, -1)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer; `heads_norm` is [heads + kv_heads, head_size], the norm weights of queries and keys."""

    attention_norm: Tensor
    qkv: Linear
    heads_norm: Tensor | HeadsNorm | None
    output: Linear
    inner_norm: Tensor
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def norm_HD(self) -> Tensor | None:
        return self.heads_norm.expanded() if isinstance(self.heads_norm, HeadsNorm) else self.heads_norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All frozen tensors of a decoder; `head` is `embedding` where they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    def mapped(self, moved: Callable[[Tensor], Tensor]) -> Weights:
        """Apply `moved` to embedding, head and norms; linear layers belong to the projections."""
        layers = tuple(
            replace(
                layer,
                attention_norm=moved(layer.attention_norm),
                heads_norm=None if layer.norm_HD is None else moved(layer.norm_HD),
                inner_norm=moved(layer.inner_norm),
            )
            for layer in self.layers
        )
        embedding = moved(self.embedding)
        head = embedding if self.head is self.embedding else moved(self.head)
        return Weights(embedding=embedding, layers=layers, norm=moved(self.norm), head=head)

    @property
    def count(self) -> int:
        tensors = [self.embedding, self.norm] + ([self.head] if self.head is not self.embedding else [])
        for layer in self.layers:
            tensors += [layer.attention_norm, layer.inner_norm]
            tensors += [x for linear in layer.linears for x in (linear.weight, linear.bias) if x is not None]
        heads = sum(2 * layer.norm_HD.shape[-1] for layer in self.layers if layer.norm_HD is not None)
        return int(sum(x.numel() for x in tensors) + heads)


class UnfitWeightsError(Exception):
    """The checkpoint lacks tensors that the architecture needs, or has them in another shape than config.json says."""

    @classmethod
    def missing(cls, names: Sequence[str]) -> UnfitWeightsError:
        return cls(f"{len(names)} weights are missing, first {names[0]}; they would stay random")


class Reader:
    """Tensors by name from the safetensors files of one folder; a context manager, one tensor in memory at a time.

    `spare_rows` are allocated below every matrix of a `Linear`, for `Linear.stacked`. `progress` counts tensors.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        spare_rows: int = 0,
        progress: PhaseProgress | None = None,
    ) -> None:
        self._folder, self._device, self._dtype, self.spare_rows = folder, device, dtype, spare_rows
        self._progress = progress or PhaseProgress()
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        from safetensors import safe_open

        for name in file_names(self._folder):
            file = self._stack.enter_context(safe_open(self._folder / name, framework="pt", device="cpu"))
            self._files |= dict.fromkeys(file.keys(), file)
        self._progress.begin("tensors", len(self._files))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def names(self) -> list[str]:
        return sorted(self._files)

    def dtype(self, name: str) -> torch.dtype:
        one = self._files[name].get_slice(name)
        return (one[:1] if one.get_shape() else self._files[name].get_tensor(name)).dtype

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def read(self, name: str, into: Tensor) -> Tensor:
        self._progress.add(1)
        return into.copy_(self._files[name].get_tensor(name))

    def whole(self, name: str) -> Tensor:
        return self.read(name, self.empty(*self.shape(name)))


def file_names(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return [SINGLE]
    return sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))


def read_weights(
    reader: Reader, architecture: Architecture, *, pack: Callable[[Linear], Linear] | None = None
) -> Weights:
    """Read all weights of a decoder, fused and quantised by `pack`; UnfitWeightsError when the files lack some."""
    prefix = "" if "embed_tokens.weight" in reader else "model."
    shapes = dict(_shapes(architecture, prefix))
    is_tied = architecture.is_tied and "lm_head.weight" not in reader
    if is_tied:
        del shapes["lm_head.weight"]
    if missing := sorted(name for name in shapes if name not in reader):
        raise UnfitWeightsError.missing(missing)
    for name, shape in shapes.items():
        if reader.shape(name) != shape:
            found = list(reader.shape(name))
            raise UnfitWeightsError(f"{name} is {found} in the file, config.json says {list(shape)}")

    embedding = reader.whole(f"{prefix}embed_tokens.weight")
    layers = tuple(_layer(reader, prefix, f"layers.{at}.", architecture, pack) for at in range(architecture.layers))
    head = embedding if is_tied else reader.whole("lm_head.weight")
    if architecture.is_tied and not is_tied and torch.equal(head, embedding):
        head = embedding  # some files store the tied head as well
    return Weights(embedding=embedding, layers=layers, norm=reader.whole(f"{prefix}norm.weight"), head=head)


def _shapes(a: Architecture, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}embed_tokens.weight", (a.vocabulary, a.hidden)
    yield f"{prefix}norm.weight", (a.hidden,)
    yield "lm_head.weight", (a.vocabulary, a.hidden)
    for at in range(a.layers):
        layer = f"{prefix}layers.{at}."
        yield f"{layer}input_layernorm.weight", (a.hidden,)
        yield f"{layer}post_attention_layernorm.weight", (a.hidden,)
        if a.normalises_heads:
            yield f"{layer}self_attn.q_norm.weight", (a.head_size,)
            yield f"{layer}self_attn.k_norm.weight", (a.head_size,)
        for name, (out, inside) in matrices(a).items():
            yield f"{layer}{name}.weight", (out, inside)
            if name.rpartition(".")[2] in a.biased:
                yield f"{layer}{name}.bias", (out,)


def matrices(a: Architecture) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the matrices of one layer, by module name, in the order of their modules."""
    queries, keys = a.heads * a.head_size, a.kv_heads * a.head_size
    return {
        "self_attn.q_proj": (queries, a.hidden),
        "self_attn.k_proj": (keys, a.hidden),
        "self_attn.v_proj": (keys, a.hidden),
        "self_attn.o_proj": (a.hidden, queries),
        "mlp.gate_proj": (a.inner, a.hidden),
        "mlp.up_proj": (a.inner, a.hidden),
        "mlp.down_proj": (a.hidden, a.inner),
    }


def _layer(
    reader: Reader, prefix: str, layer: str, a: Architecture, pack: Callable[[Linear], Linear] | None
) -> LayerWeights:
    def vector(name: str) -> Tensor:
        return reader.whole(f"{prefix}{layer}{name}.weight")

    def fused(*names: str) -> Linear:
        full = tuple(f"{prefix}{layer}{name}" for name in names)
        sizes = tuple(reader.shape(f"{name}.weight")[0] for name in full)
        outputs, spare = sum(sizes), stacked_rows(len(names) * reader.spare_rows)
        stacked = reader.empty(outputs + spare, reader.shape(f"{full[0]}.weight")[1])
        weight = stacked[:outputs]
        bias = reader.empty(sum(sizes)) if full[0].rpartition(".")[2] in a.biased else None
        for name, rows in zip(full, weight.split(sizes), strict=True):
            reader.read(f"{name}.weight", rows)
        if bias is not None:
            for name, part in zip(full, bias.split(sizes), strict=True):
                reader.read(f"{name}.bias", part)
        modules = tuple(f"model.{layer}{name}" for name in names)
        linear = Linear(weight=weight, bias=bias, names=modules, sizes=sizes, stacked=stacked if spare else None)
        return pack(linear) if pack else linear

    heads_norm = None
    if a.normalises_heads:
        queries, keys = vector("self_attn.q_norm"), vector("self_attn.k_norm")
        heads_norm = HeadsNorm(queries_D=queries, keys_D=keys, heads=a.heads, kv_heads=a.kv_heads).expanded()
    return LayerWeights(
        attention_norm=vector("input_layernorm"),
        qkv=fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        heads_norm=heads_norm,
        output=fused("self_attn.o_proj"),
        inner_norm=vector("post_attention_layernorm"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )
