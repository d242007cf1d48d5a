"""Sections that a plugin adds to a report: plots and tables, as data that the report escapes and draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPlot:
    """A plot: named lines over `x` with thin unnamed ones behind them, or one labelled point per `x`.

    Every series has the length of `x`, with None for a missing value. `x_mark` and `y_mark` are drawn as dashed lines.
    `heads` and `rows` are the same numbers as a table, for readers without the plot. `is_share` shows y in percent.
    All text is untrusted: the report escapes it.
    """

    title: str
    x: Sequence[float]
    note: str = ""
    lines: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    thin_lines: Sequence[Sequence[float | None]] = ()
    points: Sequence[float | None] = ()
    labels: Sequence[str] = ()
    x_title: str = ""
    y_title: str = ""
    x_mark: float | None = None
    y_mark: float | None = None
    is_log_x: bool = False
    is_share: bool = False
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSection:
    """A separate section of a report: a sentence, plots, and the files they are based on.

    `name` is its anchor in the page and its name in `retrain report --json`: lower-case letters, digits and dashes.
    """

    name: str
    text: str
    plots: Sequence[ReportPlot] = ()
    files: Sequence[Path] = ()
