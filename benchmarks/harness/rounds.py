"""Contenders side by side: every round runs each of them once, in alternating order, so that a busy spell hits all."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.processes import Failed, Run, watch

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A program that writes a line to `lines`, below the folder it runs in, whenever a unit of work is done.

    It must have written `count` of them when it ends.
    """

    name: str
    command: Sequence[str]
    lines: str
    count: int
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The runs of each contender by name, one per round; of those that failed, why."""

    runs: dict[str, list[Run]]
    failures: dict[str, str]


def add_only(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """`--only`, the same for every benchmark with contenders."""
    text = f"contenders of this name, else those whose name holds it, of: {'; '.join(names)}"
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help=text)


def chosen(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those that `--only` names: a text that is a whole name picks that one alone."""
    wanted = {name for text in texts for name in ([text] if text in names else [n for n in names if text in n])}
    return [name for name in names if name in wanted]


def run_rounds(contenders: Sequence[Contender], rounds: int, folder: Path, device: str) -> Rounds:
    """Run all; a contender that fails is left out from then on, and the others go on."""
    found = Rounds(runs={contender.name: [] for contender in contenders}, failures={})
    names = list(found.runs)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.name in found.failures:
                continue
            print(f"round {number + 1}/{rounds}: {contender.name}", file=sys.stderr, flush=True)
            place = folder / f"{names.index(contender.name)}-{number}"
            try:
                found.runs[contender.name].append(run_one(contender, place, device))
            except Failed as error:
                print(error, file=sys.stderr, flush=True)
                found.failures[contender.name] = error.reason
                del found.runs[contender.name]
    return found


def run_one(contender: Contender, folder: Path, device: str) -> Run:
    """A single run; `Failed` if it ends without all of its lines, too."""
    environ = {**OFFLINE, **contender.environ}
    run = watch(contender.command, folder=folder, lines=contender.lines, environ=environ, device=device)
    if len(run.records) != contender.count:
        raise Failed(f"it ended without an error after {len(run.records)} of {contender.count} records")
    return run
