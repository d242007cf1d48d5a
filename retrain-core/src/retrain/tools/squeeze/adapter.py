"""A PEFT adapter on disk, read module by module as pairs of factors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.plugins.first_party import install_line
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Floats
from retrain.records.checkpoints import locate_adapter
from retrain.tools.squeeze.tensor_file import FIX, TensorFile, TensorInfo, unusable

# `adapter_config.json`: rank and scale of every module, and the same file for a smaller rank.


CONFIG_FILE = "adapter_config.json"
# These initialisations move base weights into the factors: their spectrum is not that of the update.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
REFUSED = {
    "use_dora": "DoRA divides by a column norm of base weight plus update, and the base weights are not available here",
    "target_parameters": "fused expert parameters stack one adapter per expert in each factor",
    "use_bdlora": "block-diagonal factors do not multiply to the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What PEFT computes with: `Delta = scale * B A`, scale = alpha / r, or alpha / sqrt(r) with rsLoRA."""

    path: Path
    document: Mapping[str, Any]
    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]  # regular expression on the module's name -> rank
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Rank of one module: the first pattern that its name matches, else `r`."""
        return self.ranks.get(_match(self.ranks, module), self.rank)

    def alpha_of(self, module: str) -> float:
        """Alpha of one module, by the same rule."""
        return self.alphas.get(_match(self.alphas, module), self.alpha)

    def scale(self, alpha: float, rank: int) -> float:
        """The factor in front of B A."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def alpha_at(self, alpha: float, rank: int, smaller: int) -> float:
        """The alpha that keeps `scale` at another rank: alpha k / r, with rsLoRA alpha sqrt(k / r)."""
        return alpha * (math.sqrt(smaller / rank) if self.use_rslora else smaller / rank)

    def squeezed(self, rank: int, modules: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """The document for `rank`; `modules` are all names with their new ranks.

        Every module keeps its scale. Modules that differ from the rest get a pattern of their own.
        """
        alpha = self.alpha_at(self.alpha, self.rank, rank)
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for module, smaller in sorted(
            modules, key=lambda pair: -len(pair[0])
        ):  # longest first: one name may be the ending of another
            pattern = f"^{re.escape(module)}"
            own = self.alpha_at(self.alpha_of(module), self.rank_of(module), smaller)
            if smaller != rank:
                ranks[pattern] = smaller
            if not math.isclose(own, alpha, rel_tol=1e-12):
                alphas[pattern] = own
        patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
        return {**self.document, "r": rank, "lora_alpha": alpha, **patterns}


def read_lora_config(folder: Path) -> LoraConfig:
    """The configuration of the adapter in `folder`; ConfigError if there is none, or it is not plain LoRA."""
    path = folder / CONFIG_FILE
    document = _read(path)
    if (kind := document.get("peft_type")) != "LORA":
        raise unusable(path, f"peft_type is {kind!r}", fix="only LORA adapters have a rank that can be squeezed")
    for name, why in REFUSED.items():
        if document.get(name):
            raise unusable(path, f"{name} is set", why=why, fix="train without it, or keep this adapter's rank")
    init = document.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        fix = "convert it first: save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        raise unusable(path, f"init_lora_weights is {init!r}", why="its factors hold base weights too", fix=fix)
    return LoraConfig(
        path=path,
        document=document,
        rank=_rank(path, "r", document.get("r")),
        alpha=_alpha(path, "lora_alpha", document.get("lora_alpha")),
        use_rslora=bool(document.get("use_rslora")),
        ranks={k: _rank(path, f"rank_pattern {k!r}", v) for k, v in _patterns(path, document, "rank_pattern")},
        alphas={k: _alpha(path, f"alpha_pattern {k!r}", v) for k, v in _patterns(path, document, "alpha_pattern")},
    )


def _read(path: Path) -> dict[str, Any]:
    fix = "give an adapter folder that PEFT wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise unusable(path, "file not found", fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(path, f"is not readable JSON: {error}", fix=fix) from error
    if not isinstance(document, dict):
        raise unusable(path, "is not a JSON object", fix=fix)
    return document


def _patterns(path: Path, document: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    patterns = document.get(name) or {}
    if not isinstance(patterns, dict):
        raise unusable(path, f"{name} is not an object", fix="write {pattern: value}, or {}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise unusable(path, f"{name} {pattern!r} is not a valid pattern: {error}", fix="correct it") from None
    return list(patterns.items())


def _rank(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unusable(path, f"{name} is {value!r}", fix="a rank is a whole number from 1")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise unusable(path, f"{name} is {value!r}", fix="an alpha is a finite number")
    return float(value)


def _match(patterns: Iterable[str], module: str) -> str:
    """The pattern that applies to a module by PEFT's rule: it must match the end of the name, starting at a dot."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)


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
