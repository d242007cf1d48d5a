"""A PEFT adapter on disk, read module by module as pairs of factors, and its safetensors file.

https://huggingface.co/docs/safetensors/index#format: length of the header (8 bytes), header (JSON), tensors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Floats
from retrain.records.checkpoints import locate_adapter
from retrain.records.reading import parse_record, read_regular
from retrain.text.terminal_text import printable

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # dtypes allowed for the factors of an adapter
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
CHUNK = 2**22
ALIGNMENT = 8
METADATA = "__metadata__"
FIX = "give a complete adapter folder, as `save_pretrained()` of PEFT writes it"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
REMOTE = "tinker://"
# Products of two such numbers, and the squares of those, are finite in float64.
LARGEST = 1e70
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?")
_LORA = re.compile(r"\.lora_[A-Za-z]")
# These initialisations move base weights into the factors: their spectrum is not the update's.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
REFUSED = {
    "use_dora": "DoRA divides by a column norm of base weight plus update, and the base weights are not available here",
    "target_parameters": "fused expert parameters stack one adapter per expert in each factor",
    "use_bdlora": "block-diagonal factors do not multiply to the update",
}
Rank = Annotated[int, Field(strict=True, ge=1)]
Alpha = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# PEFT's rule: a pattern matches the end of the module's name, starting at a dot.
Pattern = Annotated[re.Pattern[str], BeforeValidator(lambda text: rf"(.*\.)?({text})$")]
T = TypeVar("T")


class LoraConfig(BaseModel):
    """Rank and scale of every module: `Delta = scale * B A`, scale = alpha / r, or alpha / sqrt(r) with rsLoRA."""

    model_config = ConfigDict(frozen=True)

    path: Path
    document: dict[str, Any]
    r: Rank
    lora_alpha: Alpha
    use_rslora: bool = False
    rank_pattern: dict[Pattern, Rank] = {}
    alpha_pattern: dict[Pattern, Alpha] = {}

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.r)

    def alpha_of(self, module: str) -> float:
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha)

    def scale(self, alpha: float, rank: int) -> float:
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def alpha_at(self, alpha: float, rank: int, smaller: int) -> float:
        """Return the alpha that keeps `scale` at another rank: alpha k / r, with rsLoRA alpha sqrt(k / r)."""
        return alpha * (math.sqrt(smaller / rank) if self.use_rslora else smaller / rank)

    def squeezed(self, rank: int, modules: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """Return the document for `rank`, in which every module keeps its scale.

        `modules` are all names with their new ranks. Modules that differ from the rest get a pattern.
        """
        alpha = self.alpha_at(self.lora_alpha, self.r, rank)
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        # Longest first: one name may be the ending of another, and PEFT takes the first pattern that matches.
        for module, smaller in sorted(modules, key=lambda pair: -len(pair[0])):
            pattern = f"^{re.escape(module)}"
            own = self.alpha_at(self.alpha_of(module), self.rank_of(module), smaller)
            if smaller != rank:
                ranks[pattern] = smaller
            if not math.isclose(own, alpha, rel_tol=1e-12):
                alphas[pattern] = own
        patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
        return {**self.document, "r": rank, "lora_alpha": alpha, **patterns}


def read_lora_config(folder: Path) -> LoraConfig:
    """Read the configuration of the adapter in `folder`; ConfigError unless it is plain LoRA."""
    path = folder / CONFIG_FILE
    try:
        document = parse_record(read_regular(path), allow_nan=True)
    except (OSError, ValueError, RecursionError) as error:
        what = f"is not a readable JSON object: {error}"
        raise unusable(path, code="squeeze.config-unreadable", what=what, fix=FIX) from error
    if (kind := document.get("peft_type")) != "LORA":
        fix = "only LORA adapters have a rank that can be squeezed"
        raise unusable(path, code="squeeze.not-lora", what=f"peft_type is {kind!r}", fix=fix)
    for name, why in REFUSED.items():
        if document.get(name):
            fix = "train without it, or keep this adapter's rank"
            raise unusable(path, code="squeeze.lora-variant", what=f"{name} is set", why=why, fix=fix)
    init = document.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        what, why = f"init_lora_weights is {init!r}", "its factors hold base weights too"
        fix = "convert it first: save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        raise unusable(path, code="squeeze.base-weights-in-factors", what=what, why=why, fix=fix)
    given = {name: value for name, value in document.items() if value is not None}
    try:
        return LoraConfig.model_validate({"lora_alpha": None, "r": None, **given, "path": path, "document": document})
    except ValidationError as error:
        first = error.errors()[0]
        key = " ".join([str(first["loc"][0]), *map(repr, first["loc"][1:2])])
        what, why = "holds a value that cannot be used", f"{key} is {first['input']!r}: {first['msg']}"
        fix = "correct it, or give the adapter_config.json that PEFT wrote"
        raise unusable(path, code="squeeze.config-bad-value", what=what, why=why, fix=fix) from None


def _by_pattern(values: Mapping[re.Pattern[str], T], module: str, default: T) -> T:
    return next((value for each, value in values.items() if each.match(module)), default)


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
        return max(pair.rank for pair in self.pairs)

    def factors(self, pair: LoraPair) -> tuple[Floats, Floats]:
        """Read A as (rank, in) and B as (out, rank), in float64; ConfigError for numbers that are not finite."""
        a, b = self.file.values(pair.a.name), self.file.values(pair.b.name)
        if max(np.abs(a).max(), np.abs(b).max()) > LARGEST:
            what = f"the factors of {pair.module} are too large to be multiplied"
            fix = "use an earlier checkpoint: this one has diverged"
            raise unusable(self.file.path, code="squeeze.factors-too-large", what=what, fix=fix)
        return a.reshape(pair.rank, -1), b.reshape(-1, pair.rank)


def read_adapter(path: Path | str) -> Adapter:
    """Read names and shapes of the adapter in a folder, or of the newest one below a run's folder.

    ConfigError says why it is unusable.
    """
    folder = locate_adapter(path)
    config = read_lora_config(folder)
    weights = folder / WEIGHTS_FILE
    if not weights.exists() and (folder / PICKLED_FILE).exists():
        why, fix = "unpickling can run code, so only safetensors are read", "save it with safe_serialization=True"
        raise unusable(folder / PICKLED_FILE, code="squeeze.pickled", what="is pickled", why=why, fix=fix)
    file = TensorFile(weights)
    pairs, others = _pair(config, file)
    return Adapter(folder=folder, config=config, file=file, pairs=pairs, others=others)


def local_copy(adapter: str, config: Config, plugins: Plugins) -> str:
    """Return the path itself, or a copy of a `tinker://` path; ConfigError if no plugin can fetch it."""
    if not adapter.startswith(REMOTE):
        return adapter
    folder = plugins.call_backend("fetch_adapter", adapter, config)
    if folder is None:
        what = "is an adapter on a Tinker service, and no plugin can fetch it"
        fix = f"install its plugin ({install_line('retrain-tinker')}), or download the adapter and give its folder"
        raise unusable(adapter, code="squeeze.remote-adapter", what=what, fix=fix)
    return str(folder)


def _pair(config: LoraConfig, file: TensorFile) -> tuple[tuple[LoraPair, ...], tuple[TensorInfo, ...]]:
    sides: dict[str, dict[str, TensorInfo]] = {}
    others: list[TensorInfo] = []
    for name, info in file.tensors.items():
        match = _FACTOR.fullmatch(name)
        if match:
            sides.setdefault(match["module"], {})[match["side"]] = info
        elif "lora_magnitude_vector" in name:
            what, fix = f"{name} belongs to DoRA", "train without use_dora"
            raise unusable(file.path, code="squeeze.dora-weights", what=what, fix=fix)
        elif _LORA.search(name) and not name.endswith(".bias"):
            what = f"{name} is neither an A nor a B of a module"
            raise unusable(file.path, code="squeeze.unknown-factor", what=what, fix=FIX)
        else:
            others.append(info)
    if not sides:
        raise unusable(file.path, code="squeeze.no-factors", what="holds no LoRA factors", fix=FIX)

    def by_number(name: str) -> list[tuple[int, str]]:  # `layers.2` before `layers.10`
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

    ordered = sorted(sides, key=by_number)
    return tuple(_checked(config, file, module, sides[module]) for module in ordered), tuple(others)


def _checked(config: LoraConfig, file: TensorFile, key: str, found: Mapping[str, TensorInfo]) -> LoraPair:
    for side, other in ("AB", "BA"):
        if side not in found:
            what = f"{found[other].name} has no matching {side}"
            raise unusable(file.path, code="squeeze.unpaired-factor", what=what, fix=FIX)
    module, a, b = key.removeprefix(PREFIX), found["A"], found["B"]
    shapes = f"{a.name} {list(a.shape)} and {b.name} {list(b.shape)}"
    is_pair = len(a.shape) >= 2 and len(b.shape) >= 2 and a.shape[0] == b.shape[1] and set(b.shape[2:]) <= {1}
    if not is_pair or 0 in (*a.shape, *b.shape):
        what, why = f"{shapes} do not multiply", "A is (rank, in), B is (out, rank)"
        raise unusable(file.path, code="squeeze.factor-shapes", what=what, why=why, fix=FIX)
    rank, alpha = config.rank_of(module), config.alpha_of(module)
    if a.shape[0] != rank:
        what = f"{shapes}, but {CONFIG_FILE} gives {module} rank {rank}"
        fix = f"restore the {CONFIG_FILE} that belongs to these weights"
        raise unusable(file.path, code="squeeze.rank-differs", what=what, fix=fix)
    return LoraPair(module=module, a=a, b=b, rank=rank, alpha=alpha, scale=config.scale(alpha, rank))


# A safetensors file, one tensor at a time, bfloat16 included, unknown to numpy.


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int = 0  # offset in its file


class TensorFile:
    """A safetensors file whose header has been checked; ConfigError when it is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="numpy"):  # checks lengths, offsets and overlaps
                pass
            with path.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
        except FileNotFoundError:
            raise unusable(path, code="squeeze.weights-missing", what="file not found", fix=FIX) from None
        except (OSError, ValueError, SafetensorError) as error:
            what = f"is not a readable safetensors file: {error}"
            raise unusable(path, code="squeeze.weights-unreadable", what=what, fix=FIX) from error
        self.metadata: Mapping[str, str] = header.pop(METADATA, None) or {}
        self.tensors = {
            name: TensorInfo(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
                start=8 + length + entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }

    def values(self, name: str) -> Floats:
        """Return a tensor as float64; ConfigError unless its dtype is in `ITEM_BYTES`, and all numbers are finite."""
        info = self.tensors[name]
        if info.dtype not in ITEM_BYTES:
            what, fix = f"{name} has dtype {info.dtype}", f"save the adapter in one of {', '.join(ITEM_BYTES)}"
            raise unusable(self.path, code="squeeze.weights-dtype", what=what, fix=fix)
        raw_N = np.frombuffer(b"".join(self.chunks(name)), dtype=_NUMPY[info.dtype])
        # numpy has no bfloat16: it is the upper half of a float32.
        if info.dtype == "BF16":
            raw_N = (raw_N.astype(np.uint32) << 16).view(np.float32)
        values_N = raw_N.astype(np.float64)
        bad_K = np.flatnonzero(~np.isfinite(values_N))
        if len(bad_K):
            what = f"{name} holds {len(bad_K)} numbers that are not finite, the first at {int(bad_K[0])}"
            fix = "use an earlier checkpoint: this one is unusable"
            raise unusable(self.path, code="squeeze.weights-not-finite", what=what, fix=fix)
        return values_N.reshape(info.shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        info = self.tensors[name]
        left = info.num_bytes
        with self.path.open("rb") as stream:
            stream.seek(info.start)
            while left:
                chunk = stream.read(min(left, CHUNK))
                if not chunk:
                    raise unusable(self.path, code="squeeze.weights-cut", what=f"ends within {name}", fix=FIX)
                left -= len(chunk)
                yield chunk


def encode(values: Floats, dtype: str, *, name: str) -> bytes:
    """Return numbers in a dtype of `ITEM_BYTES`, rounded to nearest, ties to even; ConfigError if one does not fit."""
    with np.errstate(over="ignore"):
        if dtype == "BF16":
            # Half of the last kept bit, less one where that bit is 0: a tie goes to the even neighbour.
            bits_N = values.astype(np.float32).view(np.uint32)
            raw_N = ((bits_N + np.uint32(0x7FFF) + ((bits_N >> 16) & 1)) >> 16).astype("<u2")
            is_finite = bool(((raw_N & 0x7F80) != 0x7F80).all())
        else:
            narrow = values.astype(_NUMPY[dtype])
            raw_N, is_finite = narrow, bool(np.isfinite(narrow).all())
    if not is_finite:
        what = f"a number of the compressed {name} is too large for {dtype}"
        fix = "save the source adapter in float32 and compress that"
        raise unusable("compression", code="squeeze.dtype-overflow", what=what, fix=fix)
    return np.ascontiguousarray(raw_N).tobytes()


def write_tensor_file(
    path: Path,
    tensors: Sequence[TensorInfo],
    contents: Callable[[TensorInfo], Iterable[bytes]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file; `contents` supplies the bytes of each tensor.

    Wider dtypes come first, as the library writes them, so that every tensor is aligned; then the order is by name.
    """
    ordered = sorted(tensors, key=lambda info: (-ITEM_BYTES.get(info.dtype, ALIGNMENT), info.name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for info in ordered:
        end = offset + info.num_bytes
        header[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for info in ordered:
            written = sum(stream.write(chunk) for chunk in contents(info))
            # The header is written already, and a file that contradicts it cannot be read.
            if written != info.num_bytes:
                raise ValueError(f"{info.name}: {written} bytes instead of {info.num_bytes}")


def unusable(path: Path | str, *, code: str, what: str, fix: str, why: str = "") -> ConfigError:
    """Return the error for an adapter or folder that cannot be used, with untrusted names made printable."""
    where = printable(str(path))
    return ConfigError(Problem(code=code, where=where, what=printable(what), why=printable(why), fix=fix))
