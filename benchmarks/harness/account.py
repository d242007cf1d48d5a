"""The account of a step: seconds of each part, and how many times the bare products or bytes of that part."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.limits import Shape, Work
from harness.machine import Rates

WORKER = Path(__file__).parents[1] / "workers/account.py"


def watched(command: list[str], folder: Path, records: str, warm_up: int) -> list[str]:
    """The command of a run that keeps its account, of `python -m retrain ARGUMENTS`; `read` returns it."""
    arguments = command[command.index("retrain") + 1 :]
    settings = {"arguments": arguments, "file": str(_file(folder)), "records": records, "warm_up": warm_up}
    file = folder / "account-settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return [sys.executable, str(WORKER), str(file)]


def read(folder: Path, steps: int) -> dict[str, float]:
    """Seconds of each part of a step, the longest first."""
    found = json.loads(_file(folder).read_text(encoding="utf-8"))
    return {part: found[part] / steps for part in sorted(found, key=lambda part: -found[part])}


def bare_s(shape: Shape, work: Work, rank: int, item: int, peak: Rates) -> Mapping[str, float]:
    """The least seconds of the parts that have a limit, by the rates of this machine.

    Products by their operations or the bytes of their weights, whichever take longer; attention of decoding by the
    bytes of keys and values, each row's for itself.
    """
    tokens, drawn = work.groups * work.prompt + work.rows * work.new, work.rows * work.new
    contexts = sum(work.prompt + at for at in range(1, work.new + 1))

    def products(operations: float, read_bytes: float = 0.0) -> float:
        return max(operations / peak.operations_per_s, read_bytes / peak.bytes_per_s)

    adapter = shape.adapter(rank)
    return {
        "prefill: products": products(2 * shape.projections * work.groups * work.prompt),
        "decode: products": products(2 * shape.projections * drawn, item * shape.projections * work.new),
        "decode: head and loss": products(2 * shape.head * drawn, item * shape.head * work.new),
        "decode: attention": work.rows * contexts * shape.kv_bytes(item) / peak.bytes_per_s,
        "train: products": products(2 * (shape.projections + adapter) * tokens),
        "train, backward: products": products((2 * shape.projections + 4 * adapter) * tokens),
        "train: head and loss": products(4 * shape.head * drawn),
    }


def table(parts: Mapping[str, float], bare: Mapping[str, float]) -> list[list[str]]:
    """Rows of part, seconds, share of the step, and times its limit."""
    whole_s = sum(parts.values())
    rows = [
        [part, f"{spent_s:.3f} s", f"{spent_s / whole_s:.1%}", f"{spent_s / bare[part]:.2f}" if part in bare else ""]
        for part, spent_s in parts.items()
    ]
    return [*rows, ["together", f"{whole_s:.3f} s", "100%", ""]]


def _file(folder: Path) -> Path:
    return folder / "account.json"
