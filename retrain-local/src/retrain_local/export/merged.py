"""The weights of a model with its adapter merged in, one tensor at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from retrain.api import PhaseProgress
from retrain_local.export.adapter_file import AdapterFile, Delta, refusal
from retrain_local.model.architecture import read_architecture
from retrain_local.model.model_files import MASTER_FILE, Folder
from retrain_local.model.qlora import quantiser
from retrain_local.model.weights import Linear, Reader, read_weights

CPU = torch.device("cpu")
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedWeights:
    """Tensors of a base by name; `deltas` change some of them.

    `replaced` are matrices that the run did not compute with as they are on disk: it had quantised them.
    """

    reader: Reader
    deltas: Mapping[str, Delta]
    replaced: Mapping[str, Callable[[], Tensor]]

    def names(self) -> list[str]:
        """In order."""
        return self.reader.names()

    def dtype(self) -> torch.dtype:
        """The dtype that most numbers of the base have on disk."""
        sizes: dict[torch.dtype, int] = {}
        for name in self.names():
            dtype = self.reader.dtype(name)
            sizes[dtype] = sizes.get(dtype, 0) + self.count(name)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def count(self, name: str) -> int:
        """How many numbers a tensor has."""
        return math.prod(int(size) for size in self.reader.shape(name))

    def num_bytes(self, name: str, dtype: torch.dtype) -> int:
        """Of the tensor in that dtype; integers keep theirs."""
        stored = self.reader.dtype(name)
        size: int = (dtype if stored.is_floating_point else stored).itemsize
        return self.count(name) * size

    def base(self, name: str) -> Tensor:
        """The tensor without the adapter, in fp32."""
        if name in self.replaced:
            return self.replaced[name]()
        return self.reader.read(name, torch.empty(self.reader.shape(name), dtype=torch.float32))

    def tensor(self, name: str) -> Tensor:
        """The merged tensor in fp32; integers, which are no weights, as they are."""
        stored = self.reader.dtype(name)
        if not stored.is_floating_point:
            return self.reader.read(name, torch.empty(self.reader.shape(name), dtype=stored))
        base = self.base(name)
        return self.deltas[name].merged(base) if name in self.deltas else base


@contextmanager
def open_merged(
    folder: Folder,
    adapter: AdapterFile | None,
    *,
    quantize: str,
    dtype: torch.dtype,
    progress: PhaseProgress | None = None,
) -> Iterator[MergedWeights]:
    """Within the block, the merged weights of a base; `dtype` is the run's, in which it quantised its matrices.

    ConfigError when the adapter is of another base.
    """
    path = folder.weights()
    if folder.document.get("quantization_config"):
        what, why = f"the base {folder.name} is stored quantised", "its tensors are not the numbers of its matrices"
        raise refusal(folder.where, what, why=why, fix="name the unquantised model of the same weights as base")
    with Reader(path, CPU, torch.float32, progress=progress) as reader:
        deltas = {} if adapter is None else _located(reader, adapter, folder.name)
        replaced = _masters(path) if quantize == "none" else _dequantised(folder, path, quantize, dtype)
        yield MergedWeights(reader=reader, deltas=deltas, replaced=replaced)


def _masters(path: Path) -> dict[str, Callable[[], Tensor]]:
    """The trained numbers of a checkpoint of all weights before they were rounded to the dtype of the model's file."""
    file = path / MASTER_FILE
    if not file.is_file():
        return {}
    stored: Any = safe_open(file, framework="pt", device="cpu")
    return {name: partial(stored.get_tensor, name) for name in list(stored.keys())}


def _located(reader: Reader, adapter: AdapterFile, base: str) -> dict[str, Delta]:
    """The changes by the names of the base's tensors; ConfigError when they are not of this base."""
    located: dict[str, Delta] = {}
    for module, delta in (adapter.deltas or {}).items():
        name = next((name for name in _tensor_names(module) if name in reader), None)
        fix = "name the base that the adapter was trained on"
        if name is None:
            raise refusal(adapter.folder, f"{base} has no matrix {module}", fix=fix)
        if reader.shape(name) != delta.shape:
            what = f"changes {module} of shape {list(delta.shape)}; in {base} it is {list(reader.shape(name))}"
            raise refusal(adapter.folder, what, fix=fix)
        located[name] = delta
    return located


def can_stream(folder: Folder, adapter: AdapterFile | None) -> bool:
    """Whether every module that the adapter changes is a tensor of the base's files; else only PEFT can merge it."""
    if adapter is None:
        return True
    if adapter.deltas is None:
        return False
    with Reader(folder.weights(), CPU, torch.float32) as reader:
        return any(name in reader for module in adapter.deltas for name in _tensor_names(module))


def _tensor_names(module: str) -> tuple[str, str]:
    """What the matrix of a module may be called in the files of a base: some omit the name of the model's body."""
    return f"{module}.weight", f"{module.partition('.')[2]}.weight"


def _dequantised(folder: Folder, path: Path, kind: str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """The matrices W' that a run with `[model] quantize` computes with, in fp32; see `qlora`.

    Quantised as the run does it: in its dtype, and with the matrices that it stacks stacked.
    """
    architecture = read_architecture(folder.document)
    if architecture is None:
        raise refusal(folder.where, f"quantize = {kind!r} is not served for this model", fix="set it to none")
    with Reader(path, CPU, dtype) as reader:
        weights = read_weights(reader, architecture, pack=quantiser(kind))
        stored = set(reader.names())
    found: dict[str, Callable[[], Tensor]] = {}
    for layer in weights.layers:
        for linear in layer.linears:
            for at, name in enumerate(linear.names):
                own = next(each for each in _tensor_names(name) if each in stored)
                found[own] = partial(_expanded, linear, at)
    return found


def _expanded(linear: Linear, at: int) -> Tensor:
    part: Tensor = linear.weight.split(linear.sizes)[at]
    return part.float()


def in_order(names: Sequence[str]) -> list[str]:
    """Names by the numbers in them: layers.2 before layers.10."""
    return sorted(names, key=lambda name: [(int(x), "") if x.isdecimal() else (-1, x) for x in _NUMBER.split(name)])
