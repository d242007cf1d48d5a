"""Where a benchmark ran, and what that machine could do at most."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ("torch", "transformers", "peft", "trl")
ASK = (
    "import json, sys; from importlib import metadata as m\n"
    "def v(n):\n"
    "    try: return m.version(n)\n"
    "    except m.PackageNotFoundError: return ''\n"
    "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
)
LARGEST = 2**31  # bytes that are moved to measure a rate
# Data sheets: memory in bytes/s; dense bf16 with fp32 sums, without sparsity, in operations/s. First match wins.
CARDS = {
    "B200": (8.0e12, 2250e12),
    "H200": (4.8e12, 989.5e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100": (3.35e12, 989.5e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100 80GB": (1.935e12, 312e12),
    "A100": (1.555e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "L4": (0.300e12, 121e12),
    "A10G": (0.600e12, 70e12),
    "RTX 5090": (1.792e12, 209.5e12),
    "RTX 4090": (1.008e12, 165.2e12),
    "RTX 3090": (0.936e12, 71e12),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes per second that memory gives, operations per second of matrix products, and where the figures are from."""

    bytes_per_s: float
    operations_per_s: float
    source: str


def machine(device: str, python: str = sys.executable) -> dict[str, Any]:
    """Date, processor, card and versions; `python` is the interpreter whose packages count (the peers').

    Asked for before the work begins: the load average is then that of other programs.
    """
    done = subprocess.run([python, "-c", ASK, *PACKAGES], capture_output=True, text=True, check=True)
    found = {name: version for name, version in json.loads(done.stdout).items() if version}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "card": card() if device == "cuda" else "",
        "system": platform.platform(terse=True),
        "versions": {"Python": platform.python_version(), **found},
        "commit": _commit(),
        "load_at_start": os.getloadavg()[0],
    }


def card() -> str:
    """The first CUDA device's name, or nothing."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def rates(device: str, size: int, threads: int = 0, dtype: str = "") -> Rates:
    """Of a known card as its data sheet says; of any other device as measured here, moving as many bytes as `size`.

    `dtype` is that of the product, `fp32` or `bf16`; empty: fp32 on a CPU, else bf16.
    """
    if device == "cuda":
        name = card()
        for known, (bytes_per_s, operations_per_s) in CARDS.items():
            if known in name:
                return Rates(bytes_per_s=bytes_per_s, operations_per_s=operations_per_s, source=f"data sheet, {known}")
    settings = (device, str(threads), str(min(size, LARGEST)), *filter(None, [dtype]))
    command = [sys.executable, str(HERE.parent / "workers/rates.py"), *settings]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: Mapping[str, float] = json.loads(done.stdout)
    how = f", {threads or 'all'} threads{dtype and ', ' + dtype}" if device == "cpu" else ""
    return Rates(**measured, source=f"measured{how}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
