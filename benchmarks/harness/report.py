"""What a benchmark leaves behind: a Markdown table on the screen and in a page, and everything as JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.figures import Spread

PLACES = ("--json", "--markdown", "--peer-python", "--folder", "--carried", "--server-python")
MODEL = "--model"  # a folder on this machine: its name is enough
WIDTH = 128
QUIET = 0.7  # load average at the start beyond which a table says so
END = "<!-- end of benchmark -->"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """`--json FILE` and `--markdown FILE`, the same for every benchmark."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file")
    text = "put the table into this page, between its markers, or make a new file"
    parser.add_argument("--markdown", type=Path, metavar="FILE", help=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`rows` are the table; `figures` everything else worth keeping; `machine` says where it was measured.

    `failures` are contenders without a figure, and why.
    """

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    figures: Mapping[str, Any]
    machine: Mapping[str, Any]
    failures: Mapping[str, str] = field(default_factory=dict)

    def publish(self, options: argparse.Namespace) -> None:
        """Print the table, and write the files that were asked for; exit code 1 if a contender failed."""
        print(self.markdown())
        if options.json:
            document = {"benchmark": self.name, "command": command_line(), **self.machine, **self.figures}
            document |= {"failures": dict(self.failures)}
            text = json.dumps(document, indent=2, default=_plain, allow_nan=False)
            options.json.write_text(text + "\n", encoding="utf-8")
        if options.markdown:
            paste(options.markdown, self.name, self.markdown())
        if self.failures:
            sys.exit(f"failed: {', '.join(self.failures)}")

    def markdown(self) -> str:
        """The table, and below it how and where it was measured."""
        lines = [f"| {' | '.join(self.columns)} |", "|" + "---|" * len(self.columns)]
        blank = ["-"] * (len(self.columns) - 2)
        failed = [[name, f"failed: {reason.replace('|', '/')}", *blank] for name, reason in self.failures.items()]
        lines += [f"| {' | '.join(row)} |" for row in (*self.rows, *failed)]
        told = " ".join([f"`{command_line()}`; {describe(self.machine)}.", *filter(None, self.notes)])
        return "\n".join([*lines, "", *textwrap.wrap(told, WIDTH, break_long_words=False, break_on_hyphens=False)])


def paste(page: Path, name: str, table: str) -> None:
    """Replace what stands between `<!-- benchmark: name -->` and the next end marker; a new page is made of both."""
    begin = f"<!-- benchmark: {name} -->"
    if not page.exists():
        page.write_text(f"{begin}\n\n{table}\n\n{END}\n", encoding="utf-8")
        return
    head, marker, rest = page.read_text(encoding="utf-8").partition(begin)
    _, end, tail = rest.partition(END)
    if not marker or not end:
        sys.exit(f"{page} has no line {begin} followed by {END}")
    page.write_text(f"{head}{begin}\n\n{table}\n\n{END}{tail}", encoding="utf-8")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """All options but places on this machine."""
    kept = {name: value for name, value in vars(options).items() if f"--{name.replace('_', '-')}" not in PLACES}
    return kept | {"model": Path(kept["model"]).name} if kept.get("model") else kept


def command_line() -> str:
    """How this benchmark was started, without places on this machine."""
    words, shown = list(sys.argv[1:]), ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
    while words:
        word = words.pop(0)
        if word in PLACES:
            words.pop(0)
        elif word == MODEL:
            shown += [word, Path(words.pop(0)).name]
        elif word.partition("=")[0] not in PLACES:
            shown.append(word)
    return shlex.join(shown)


def describe(machine: Mapping[str, Any]) -> str:
    """Date, processor and versions in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    device = machine["card"] or f"{machine['cores']} cores of {machine['processor']}"
    told = f"{machine['date']}, {device}, {versions}, commit {machine['commit']}"
    load = machine["load_at_start"]
    return told if load < QUIET else f"{told}; the machine was not quiet (load average {load:.1f})"


def seconds(spread: Spread) -> str:
    """`0.412 s (0.40-0.43)`: median and quartiles."""
    return f"{_short(spread.median)} s ({_short(spread.low)}-{_short(spread.high)})"


def times(spread: Spread | None) -> str:
    """`2.31 (2.2-2.4)`: how many times, with quartiles; a dash where there is nothing to compare with."""
    return "-" if spread is None else f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def plain(ratio: float | None) -> str:
    """`2.31`, or a dash where there is nothing to compare with."""
    return "-" if ratio is None else f"{ratio:.2f}"


def percent(share: float | None) -> str:
    """`43%`, or a dash where it was not measured."""
    return "-" if share is None else f"{share:.0%}"


def mebibytes(count: float | None) -> str:
    """Memory in MiB, or a dash where it was not measured."""
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"


def _short(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if 0 < value < 100 else 0
    return f"{value:.{digits}f}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {k: None if v in (math.inf, -math.inf) else v for k, v in dataclasses.asdict(value).items()}
    return str(value)
