"""A PEFT adapter on disk, read module by module as pairs of factors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.plugins.first_party import install_line
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Floats
from retrain.records.checkpoints import locate_adapter
from retrain.tools.squeeze.lora_config import CONFIG_FILE, LoraConfig, read_lora_config
from retrain.tools.squeeze.tensor_file import FIX, TensorFile, TensorInfo, unusable

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
REMOTE = "tinker://"
LARGEST = 1e70  # products of two, and squares of those, are finite in float64
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
_LORA = re.compile(r"\.lora_[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraPair:
    """The factors of one module, `Delta = scale * B A`: A is (rank, in), B is (out, rank).

    The spatial axes of a convolution are flattened into `in`. Adapters of embeddings are read in the same way.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    rank: int
    alpha: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The content of an adapter folder; `others` are tensors other than factors (biases, modules saved whole)."""

    folder: Path
    config: LoraConfig
    file: TensorFile
    pairs: tuple[LoraPair, ...]
    others: tuple[TensorInfo, ...]

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(pair.rank for pair in self.pairs)

    def factors(self, pair: LoraPair) -> tuple[Floats, Floats]:
        """A as (rank, in) and B as (out, rank), in float64, from disk; ConfigError for numbers that are not finite."""
        a, b = self.file.values(pair.a.name), self.file.values(pair.b.name)
        if max(np.abs(a).max(), np.abs(b).max()) > LARGEST:
            what = f"the factors of {pair.module} are too large to be multiplied"
            raise unusable(self.file.path, what, fix="use an earlier checkpoint: this one has diverged")
        return a.reshape(pair.rank, -1), b.reshape(-1, pair.rank)


def read_adapter(path: Path | str) -> Adapter:
    """The adapter in a folder, or the newest one below a run's folder; ConfigError says why it is unusable.

    Only the names and shapes of tensors are read.
    """
    folder = locate_adapter(path)
    config = read_lora_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.exists() and (folder / PICKLED_FILE).exists():
        why = "unpickling a file can run code, so weights are read from safetensors only"
        raise unusable(folder / PICKLED_FILE, "is pickled", why=why, fix="save it with safe_serialization=True")
    file = TensorFile(weights)
    pairs, others = _pair(config, file)
    return Adapter(folder=folder, config=config, file=file, pairs=pairs, others=others)


def local_copy(adapter: str, config: Config, plugins: Plugins) -> str:
    """The path itself, or the folder of a copy of a `tinker://` path; ConfigError if no plugin can fetch it."""
    if not adapter.startswith(REMOTE):
        return adapter
    folder = plugins.call_backend("fetch_adapter", adapter, config)
    if folder is None:
        fix = f"{install_line('retrain-tinker')}, or download the adapter and give its folder"
        raise unusable(adapter, "is an adapter on a Tinker service, and no plugin can fetch it", fix=fix)
    return str(folder)


def _pair(config: LoraConfig, file: TensorFile) -> tuple[tuple[LoraPair, ...], tuple[TensorInfo, ...]]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    others: list[TensorInfo] = []
    for name, info in file.tensors.items():
        match = _FACTOR.fullmatch(name)
        if match:
            sides.setdefault(match["module"], {})[match["side"]] = info
        elif "lora_magnitude_vector" in name:
            raise unusable(file.path, f"{name} belongs to DoRA", fix="train without use_dora")
        elif _LORA.search(name) and not name.endswith(".bias"):
            raise unusable(file.path, f"{name} is neither an A nor a B of a module", fix=FIX)
        else:
            others.append(info)
    if not sides:
        raise unusable(file.path, "holds no LoRA factors", fix=FIX)
    ordered = sorted(sides.items(), key=lambda item: _by_number(item[0]))
    return tuple(_checked(config, file, module, found) for module, found in ordered), tuple(others)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sorting key that puts `layers.2` before `layers.10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _checked(config: LoraConfig, file: TensorFile, key: str, found: Mapping[str, TensorInfo]) -> LoraPair:
    """One module's pair; ConfigError if a factor is missing or the shapes do not match."""
    for side, other in ("AB", "BA"):
        if side not in found:
            raise unusable(file.path, f"{found[other].name} has no matching {side}", fix=FIX)
    module, a, b = key.removeprefix(PREFIX), found["A"], found["B"]
    shapes = f"{a.name} {list(a.shape)} and {b.name} {list(b.shape)}"
    is_pair = len(a.shape) >= 2 and len(b.shape) >= 2 and a.shape[0] == b.shape[1] and set(b.shape[2:]) <= {1}
    if not is_pair or 0 in (*a.shape, *b.shape):
        raise unusable(file.path, f"{shapes} do not multiply", why="A is (rank, in), B is (out, rank)", fix=FIX)
    rank, alpha = config.rank_of(module), config.alpha_of(module)
    if a.shape[0] != rank:
        what = f"{shapes}, but {CONFIG_FILE} gives {module} rank {rank}"
        raise unusable(file.path, what, fix=f"restore the {CONFIG_FILE} that belongs to these weights")
    return LoraPair(module=module, a=a, b=b, rank=rank, alpha=alpha, scale=config.scale(alpha, rank))
