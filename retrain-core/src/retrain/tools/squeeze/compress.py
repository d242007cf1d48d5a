"""The same adapter at a smaller rank: each module's best approximation, written as a PEFT adapter."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.types import Floats
from retrain.records.files import write_folder, write_json
from retrain.tools.squeeze import adapter as lora
from retrain.tools.squeeze.spectrum import Solver, one_thread, solver_for, variance_kept

MARK = "squeeze.json"  # marks a folder that we wrote and may replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedLayer:
    module: str
    rank: int
    source_rank: int
    kept: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAdapter:
    path: Path
    source: Path
    rank: int
    source_rank: int
    alpha: float
    num_bytes: int
    source_bytes: int
    layers: tuple[CompressedLayer, ...]

    def as_data(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "source": str(self.source)}


def compress_adapter(path: Path | str, output: Path | str, rank: int, *, device: str = "cpu") -> CompressedAdapter:
    """Write the adapter in `path` at `rank` into the folder `output`.

    Each module's `scale * B A` becomes its best approximation of that rank (Eckart-Young), split evenly:
    B' = U sqrt(S), A' = sqrt(S) V^T. The scale stays: alpha' = alpha k / r, with rsLoRA alpha sqrt(k / r), never
    rounded. A module of a smaller rank keeps it. The dtype, every other tensor and every other key of the configuration
    stay. A module without an update keeps the first rows of A and B = 0, so that it can still be trained. The folder
    appears when it is complete; only a folder that this function wrote is replaced. ConfigError when the adapter or the
    folder cannot be used. Algorithm 2 of arXiv:2602.10993.
    """
    if rank < 1:
        what, fix = f"{rank} is not a rank", "give whole numbers from 1"
        raise lora.unusable("rank", code="squeeze.bad-rank", what=what, fix=fix)
    adapter = lora.read_adapter(path)
    folder = Path(output).expanduser()
    what, fix = "", "choose a folder that does not exist yet"
    if adapter.folder.resolve().is_relative_to(folder.resolve()):
        what = "is the adapter to compress, or contains it"
    elif folder.exists() and not folder.is_dir():
        what = "is a file"
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / MARK).is_file():
        what = "is not empty, and was not written by an earlier compression"
    if what:
        raise lora.unusable(folder, code="squeeze.output-taken", what=what, fix=fix)
    kept_rank = min(rank, adapter.rank)
    writer = _Writer(adapter, kept_rank, solver_for(device))
    modules = [(pair.module, min(pair.rank, kept_rank)) for pair in adapter.pairs]
    document = adapter.config.squeezed(kept_rank, modules)

    def result() -> CompressedAdapter:
        return CompressedAdapter(
            path=folder,
            source=adapter.folder,
            rank=kept_rank,
            source_rank=adapter.rank,
            alpha=document["lora_alpha"],
            num_bytes=sum(info.num_bytes for info in writer.tensors),
            source_bytes=sum(info.num_bytes for info in adapter.file.tensors.values()),
            layers=tuple(writer.layers),
        )

    def fill(target: Path) -> None:
        metadata = dict(adapter.file.metadata) or {"format": "pt"}
        lora.write_tensor_file(target / lora.WEIGHTS_FILE, writer.tensors, writer.contents, metadata)
        text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
        (target / lora.CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        write_json(target / MARK, result().as_data())

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with one_thread():
            write_folder(folder, fill)
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror or error}", "choose a writable folder with enough space"
        raise lora.unusable(folder, code="squeeze.unwritable", what=what, fix=fix) from error
    return result()


class _Writer:
    """Supplies the tensors of the new file; a pair is computed when its first factor is requested."""

    def __init__(self, adapter: lora.Adapter, rank: int, solver: Solver) -> None:
        self._adapter = adapter
        self._rank = rank
        self._solver = solver
        self._pair_of = {info.name: pair for pair in adapter.pairs for info in (pair.a, pair.b)}
        self._last: tuple[str, Floats, Floats] | None = None
        self.layers: list[CompressedLayer] = []
        factors = [info for pair in adapter.pairs for info in self._smaller(pair)]
        self.tensors = [*factors, *adapter.others]

    def contents(self, info: lora.TensorInfo) -> Iterable[bytes]:
        pair = self._pair_of.get(info.name)
        if pair is None:
            return self._adapter.file.chunks(info.name)
        a, b = self._factors(pair)
        return (lora.encode(a if info.name == pair.a.name else b, info.dtype, name=info.name),)

    def _smaller(self, pair: lora.LoraPair) -> tuple[lora.TensorInfo, lora.TensorInfo]:
        rank = min(pair.rank, self._rank)
        shapes = (rank, *pair.a.shape[1:]), (pair.b.shape[0], rank, *pair.b.shape[2:])
        a, b = (
            replace(info, shape=shape, num_bytes=math.prod(shape) * lora.ITEM_BYTES.get(info.dtype, 0))
            for info, shape in zip((pair.a, pair.b), shapes, strict=True)
        )
        return a, b

    def _factors(self, pair: lora.LoraPair) -> tuple[Floats, Floats]:
        if self._last is not None and self._last[0] == pair.module:
            return self._last[1:]
        a, b = self._adapter.factors(pair)
        rank = min(pair.rank, self._rank)
        small_a, small_b, s = self._solver.truncate(a, b, rank)
        if not s.any():
            small_a, small_b = a[:rank], np.zeros((b.shape[0], rank))
        kept = float(variance_kept(s)[rank - 1]) if s.any() else None
        layer = CompressedLayer(module=pair.module, rank=rank, source_rank=pair.rank, kept=kept)
        # Factors of different dtypes are not adjacent in the file, so a pair may be computed twice.
        if layer not in self.layers:
            self.layers.append(layer)
        self._last = (pair.module, small_a, small_b)
        return small_a, small_b
