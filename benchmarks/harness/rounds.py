"""Contenders side by side: every round runs each of them once, in alternating order, so that a busy spell hits all."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.processes import Run, watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A program that writes a line to `lines`, below the folder it runs in, whenever a unit of work is done."""

    name: str
    command: Sequence[str]
    lines: str
    environ: Mapping[str, str] = field(default_factory=dict)


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def run_rounds(contenders: Sequence[Contender], rounds: int, folder: Path, device: str) -> dict[str, list[Run]]:
    """The runs of each contender by name, one per round."""
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            print(f"round {number + 1}/{rounds}: {contender.name}", file=sys.stderr, flush=True)
            place = folder / f"{list(runs).index(contender.name)}-{number}"
            environ = {**OFFLINE, **contender.environ}
            run = watch(contender.command, folder=place, lines=contender.lines, environ=environ, device=device)
            runs[contender.name].append(run)
    return runs
