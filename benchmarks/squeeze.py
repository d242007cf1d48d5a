"""Time and memory of rank analysis and compression, on a random adapter of the shape of Qwen3-4B's.

Run: `python benchmarks/squeeze.py` (196 modules of rank 128 in float32, 0.9 GB on disk below the temporary folder).
Target: analysis in under 60 s and 2 GB on 2 cores. Each part runs in a process of its own, so that its peak is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from retrain.tools.squeeze.adapter import ITEM_BYTES, TensorInfo, encode, write_tensor_file

HIDDEN, QUERY, KEYS, INNER = 2560, 4096, 1024, 9728  # Qwen3-4B: width, 32 x 128, 8 x 128, feed-forward
MODULES = {  # name -> (in, out)
    "self_attn.q_proj": (HIDDEN, QUERY),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (QUERY, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
DECAY = 1.5  # singular values fall like k^-1.5, so that a rank in the middle is recommended


def main() -> None:
    """Make the adapter, measure both parts, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28, help="blocks of 7 modules; 36 is all of Qwen3-4B")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="F32")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--part", choices=("analysis", "compression"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(measure(options.part, options.folder)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "adapter"
        figures = make_adapter(folder, options.layers, options.rank, options.dtype)
        for part in ("analysis", "compression"):
            command = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            figures |= json.loads(done.stdout)
    for name, value in figures.items():
        print(f"{name:<28} {value:.6g}" if isinstance(value, float) else f"{name:<28} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measure(part: str, folder: Path) -> dict[str, float | int | None]:
    """Seconds and peak memory of one part, in this process."""
    from retrain.squeeze import analyze_adapter, compress_adapter

    started, cpu = time.perf_counter(), time.process_time()
    found: dict[str, float | int | None] = {}
    if part == "analysis":
        found["recommended_rank"] = analyze_adapter(folder).recommended_rank
    else:
        compress_adapter(folder, folder.parent / "small", 32)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    return {**found, f"{part}_s": seconds, f"{part}_cpu_s": cpu_seconds, f"{part}_peak_mb": peak / 1e6}


def make_adapter(folder: Path, layers: int, rank: int, dtype: str) -> dict[str, float | int]:
    """A seeded adapter with a falling spectrum; returns its size."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    infos = []
    for layer in range(layers):
        for name, (inner, outer) in MODULES.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            infos.append(_info(f"{key}.lora_A.weight", dtype, (rank, inner)))
            infos.append(_info(f"{key}.lora_B.weight", dtype, (outer, rank)))
    stream = np.random.default_rng(0)
    falling = np.arange(1, rank + 1) ** -DECAY

    def contents(info: TensorInfo) -> Iterator[bytes]:
        values = stream.standard_normal(info.shape) / np.sqrt(max(info.shape))
        yield encode(values * falling if info.shape[1] == rank else values, info.dtype, name=info.name)

    write_tensor_file(folder / "adapter_model.safetensors", infos, contents, {"format": "pt"})
    return {"modules": len(infos) // 2, "rank": rank, "adapter_mb": sum(info.num_bytes for info in infos) / 1e6}


def _info(name: str, dtype: str, shape: Sequence[int]) -> TensorInfo:
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), num_bytes=int(np.prod(shape)) * ITEM_BYTES[dtype])


if __name__ == "__main__":
    main()
