"""Prints the doctor's findings: one line each, with the fix below those that matter."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable
from retrain.tools.doctor.examine import Examination

STYLES = {"ok": "green", "warn": "yellow", "missing": "red", "failed": "red"}
STATUS_WIDTH = 8


def show(found: Examination, *, skipped_logprobs: bool = False) -> None:
    """Print all findings, then the verdict."""
    console = Console(highlight=False)
    width = max(len(finding.name) for finding in found.findings) + 2
    for finding in found.findings:
        _print_finding(console, finding, width)
    if skipped_logprobs:
        _print(console, Text("The log-probabilities were not compared: fix the rest first.", style="yellow"))
    _print(console, Text("\n") + _verdict(found))


def _print_finding(console: Console, finding: Diagnosis, width: int) -> None:
    is_unused = finding.status == "missing" and not finding.needed
    style = "dim" if is_unused else STYLES[finding.status]
    status = "absent" if is_unused else finding.status
    line = Text.assemble((f"{status:<{STATUS_WIDTH}}", style), _safe(f"{finding.name:<{width}}"))
    line.append(_safe(finding.detail), style="dim" if is_unused else "")
    _print(console, line)
    if finding.fix:
        fix = Text(" " * (STATUS_WIDTH + width) + f"fix: {_safe(finding.fix)}", style="dim" if is_unused else "bold")
        _print(console, fix)


def _verdict(found: Examination) -> Text:
    count = len(found.fatal)
    if not found.source:
        if count:
            broken = sum(finding.name.startswith("plugin ") for finding in found.fatal)
            plugins = f"{broken} of the installed plugins failed to load." if broken else ""
            return Text(plugins or "The installation is not whole.", style="bold red")
        return Text("No configuration was given: `retrain doctor CONFIG` checks whether it can run here.")
    if count:
        things = "1 thing" if count == 1 else f"{count} things"
        verb = "is" if count == 1 else "are"
        return Text(f"{things} that {found.source} needs {verb} missing or broken.", style="bold red")
    return Text(f"Everything that {found.source} needs is here.", style="bold green")


def _print(console: Console, line: Text) -> None:
    console.print(line, soft_wrap=True)


def _safe(text: str) -> str:
    return printable(hide_text(text.replace("\n", " ")))
