"""Reads and writes safetensors files one tensor at a time, including bfloat16, unknown to numpy.

https://huggingface.co/docs/safetensors/index#format: length of the header (8 bytes), header (JSON), tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats
from retrain.text.terminal_text import printable

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # dtypes allowed for the factors of an adapter
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
CHUNK = 2**22
ALIGNMENT = 8
METADATA = "__metadata__"
FIX = "give a complete adapter folder, as `save_pretrained()` of PEFT writes it"


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
            raise unusable(path, "file not found", fix=FIX) from None
        except (OSError, ValueError, SafetensorError) as error:
            raise unusable(path, f"is not a readable safetensors file: {error}", fix=FIX) from error
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
            what = f"{name} has dtype {info.dtype}"
            raise unusable(self.path, what, fix=f"save the adapter in one of {', '.join(ITEM_BYTES)}")
        raw_N = np.frombuffer(b"".join(self.chunks(name)), dtype=_NUMPY[info.dtype])
        if info.dtype == "BF16":
            raw_N = (raw_N.astype(np.uint32) << 16).view(np.float32)
        values_N = raw_N.astype(np.float64)
        bad_K = np.flatnonzero(~np.isfinite(values_N))
        if len(bad_K):
            what = f"{name} holds {len(bad_K)} numbers that are not finite, the first at {int(bad_K[0])}"
            fix = "use an earlier checkpoint: this one is unusable"
            raise unusable(self.path, what, fix=fix)
        return values_N.reshape(info.shape)

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, unchanged; ConfigError if the file has shrunk meanwhile."""
        info = self.tensors[name]
        left = info.num_bytes
        with self.path.open("rb") as stream:
            stream.seek(info.start)
            while left:
                chunk = stream.read(min(left, CHUNK))
                if not chunk:
                    raise unusable(self.path, f"ends within {name}", fix=FIX)
                left -= len(chunk)
                yield chunk


def encode(values: Floats, dtype: str, *, name: str) -> bytes:
    """Return numbers in a dtype of `ITEM_BYTES`, rounded to nearest, ties to even; ConfigError if one does not fit."""
    with np.errstate(over="ignore"):
        if dtype == "BF16":
            bits_N = values.astype(np.float32).view(np.uint32)
            raw_N = ((bits_N + np.uint32(0x7FFF) + ((bits_N >> 16) & 1)) >> 16).astype("<u2")
            is_finite = bool(((raw_N & 0x7F80) != 0x7F80).all())
        else:
            narrow = values.astype(_NUMPY[dtype])
            raw_N, is_finite = narrow, bool(np.isfinite(narrow).all())
    if not is_finite:
        what = f"a number of the compressed {name} is too large for {dtype}"
        raise unusable("compression", what, fix="save the source adapter in float32 and compress that")
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
            if written != info.num_bytes:  # the file would contradict its header
                raise ValueError(f"{info.name}: {written} bytes instead of {info.num_bytes}")


def unusable(path: Path | str, what: str, *, fix: str, why: str = "") -> ConfigError:
    """Return the error for an adapter or folder that cannot be used, with untrusted names made printable."""
    return ConfigError(Problem(where=printable(str(path)), what=printable(what), why=printable(why), fix=fix))
