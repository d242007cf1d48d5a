"""Collects the sections of plugins (`retrain_report_sections`) and writes them as HTML; everything is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import load_config
from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError, RetrainError
from retrain.kernel.plugins.capabilities import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Capabilities, CheckpointMode, Determinism
from retrain.records.reading import number
from retrain.records.record_names import CONFIG_FILE
from retrain.report.gather import Material, ReportRun
from retrain.report.markup import Links, note, plot, section, table
from retrain.report.text import plain, text
from retrain.run.check import registered_tables

HOOK = "retrain_report_sections"
MAX_CHARS = 20_000
PAGE_IDS = (
    *("summary", "verdict", "curves", "budget", "time", "settings", "completions", "health", "plugins", "files"),
    *("main", "data", "plotly", "theme", "trouble", "legend"),
)
UNDECLARED = Capabilities(
    reports_sync_loss=False,
    preserves_token_advantages=False,
    supports_checkpoint_resume=False,
    checkpoint_resume_mode=CheckpointMode.UNSUPPORTED,
    determinism=Determinism.NONE,
    provides_entropy=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSection:
    """A titled section from a plugin; `condition` is empty if it applies to the whole report."""

    title: str
    body: str | ReportSection
    condition: str = ""


def plugin_sections(material: Material, plugins: Plugins) -> list[PluginSection]:
    """Sections about the first run of each condition that is shown; an exception of a plugin becomes a section too."""
    found: dict[str, list[tuple[str, str | ReportSection]]] = {}
    for label in material.shown:
        run = next(iter(material.drawn(label)), None)
        if run is None or run.candidate.folder is None:
            continue
        try:
            view = _view(run, run.candidate.folder, plugins)
            answers = plugins.notify(HOOK, run=view, campaign=material.source.campaign)
        except RetrainError as error:
            answers = [{"A plugin failed": str(error)}]
        for answer in answers:
            found.setdefault(label, []).extend(_bodies(answer))
    everywhere = _common(list(found.values()))
    sections = [PluginSection(title=title, body=body) for title, body in everywhere]
    for label, pairs in found.items():
        sections += [
            PluginSection(title=title, body=body, condition=label if len(material.shown) > 1 else "")
            for title, body in pairs
            if (title, body) not in everywhere
        ]
    return sections


def text_section(sections: Sequence[PluginSection]) -> str:
    """The texts of all plugins in one section."""
    texts = [each for each in sections if isinstance(each.body, str)]
    parts = [
        f'<h3>{text(each.title)}{_of(each)}</h3><pre class="plugin" tabindex="0">{text(each.body, MAX_CHARS)}</pre>'
        for each in texts
    ]
    return section("plugins", "From plugins", *parts) if parts else ""


def plot_section(
    sections: Sequence[PluginSection], links: Links, first_number: int
) -> tuple[str, list[dict[str, Any]]]:
    """The `ReportSection`s of one name as a section, and their figures, numbered from `first_number`."""
    parts: list[str] = []
    figures: list[dict[str, Any]] = []
    for each in sections:
        body = each.body
        if isinstance(body, ReportSection):
            plots = [_plot(first_number + len(figures) + index, one) for index, one in enumerate(body.plots)]
            figures += map(_figure, body.plots)
            parts += [f"<h3>{text(each.condition)}</h3>"] if each.condition else []
            parts.append(f'<p class="lede">{text(body.text)}</p>' if plots else note(body.text))
            parts += [f'<div class="plots">{"".join(plots)}</div>'] if plots else []
            parts += [f'<p class="note">From {links.to(file, file.name)}.</p>' for file in body.files]
    return section(_name(sections[0]), sections[0].title, *parts), figures


def by_name(sections: Sequence[PluginSection]) -> dict[str, list[PluginSection]]:
    """The sections that have plots, by their name in the page."""
    groups: dict[str, list[PluginSection]] = {}
    for each in sections:
        if isinstance(each.body, ReportSection):
            groups.setdefault(_name(each), []).append(each)
    return groups


def _bodies(answer: object) -> Iterator[tuple[str, str | ReportSection]]:
    for title, body in answer.items() if isinstance(answer, Mapping) else ():
        yield str(title), body if isinstance(body, ReportSection) else str(body)


def _common(answers: Sequence[Sequence[tuple[str, str | ReportSection]]]) -> list[tuple[str, str | ReportSection]]:
    """The sections that are identical for all conditions."""
    first, *others = answers or [[]]
    return [pair for pair in first if all(pair in other for other in others)]


def _view(run: ReportRun, folder: Path, plugins: Plugins) -> RunView:
    """The run as its own `config.toml` describes it; what its backend promises is what it declares."""
    tables = registered_tables(plugins)
    try:
        config, _ = load_config(folder / CONFIG_FILE, tables=tables, environ={})
    except ConfigError:
        config, _ = load_config(None, tables=tables, environ={})
    return RunView(
        config=config,
        condition=run.candidate.condition,
        folder=folder,
        seed=run.candidate.seed or 0,
        first_step=0,
        capabilities=declared_capabilities(config, plugins) or UNDECLARED,
    )


def _name(section: PluginSection) -> str:
    name = section.body.name if isinstance(section.body, ReportSection) else ""
    name = re.sub(r"[^a-z0-9-]", "-", name.lower())
    return f"plugin-{name}" if name in PAGE_IDS or not name else name


def _of(section: PluginSection) -> str:
    return f' <span class="soft">{text(section.condition)}</span>' if section.condition else ""


def _plot(number: int, drawn: ReportPlot) -> str:
    cells = [[text(cell) for cell in row] for row in drawn.rows]
    numbers = table(drawn.title, drawn.heads, cells) if cells else ""
    return plot(number, drawn.title, drawn.note, numbers, kind="tall")


def _figure(drawn: ReportPlot) -> dict[str, Any]:
    return {
        "kind": "plugin",
        "x": [number(x) for x in drawn.x],
        "lines": [{"name": plain(name, 120), "y": [number(y) for y in ys]} for name, ys in drawn.lines.items()],
        "thin": [[number(y) for y in ys] for ys in drawn.thin_lines],
        "points": [number(y) for y in drawn.points],
        "labels": [plain(label, 200) for label in drawn.labels],
        "x_title": plain(drawn.x_title, 120),
        "y_title": plain(drawn.y_title, 120),
        "x_mark": number(drawn.x_mark),
        "y_mark": number(drawn.y_mark),
        "log": drawn.is_log_x,
        "share": drawn.is_share,
    }
