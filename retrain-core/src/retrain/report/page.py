"""The report: sections about the runs, the comparison, curves, settings and completions, and sections of plugins.

All text of plugins (`retrain_report_sections`) is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.load import load_config
from retrain.kernel.contracts.report import ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError, RetrainError
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Capabilities, CheckpointMode, Determinism
from retrain.records.record_names import CONFIG_FILE
from retrain.report import summary
from retrain.report.charts import curve_section
from retrain.report.completions import completions_section
from retrain.report.gather import Material, ReportRun
from retrain.report.parts import Heading, Links, Part, Pre, Section, Tiles, drawn, figures_of, lede, note, plain
from retrain.report.settings import settings_section
from retrain.report.shell import sections_page
from retrain.report.verdicts import findings, verdict_section
from retrain.run.tables import registered_tables

Given = tuple[str, str, str | ReportSection]  # condition, empty for the whole report; title, body
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
class Report:
    html: str
    title: str
    sections: tuple[str, ...]
    num_figures: int


def render(material: Material, plugin_given: Sequence[Given], *, folder: Path, made: str) -> Report:
    """Return the page for a file in `folder`; `made` is a line about its origin. All data is untrusted."""
    links, title = Links(folder), summary.title_of(material)
    drawn_by_plugins, texts_of_plugins = sections_of(plugin_given, links)
    found = (
        summary.summary_section(material, links, findings(material)),
        verdict_section(material),
        curve_section(material),
        summary.budget_section(material),
        summary.time_section(material),
        *drawn_by_plugins,
        settings_section(material),
        completions_section(material, links),
        summary.health_section(material),
        texts_of_plugins,
        summary.files_section(material, links, made),
    )
    sections = [section for section in found if section]
    baseline = material.study.baseline if material.study and material.study.comparisons else ""
    html = sections_page(
        "retrain report",
        title,
        sections,
        conditions=[plain(label, 120) for label in material.drawable],
        shown=[index for index, label in enumerate(material.drawable) if label in material.shown],
        baseline=material.drawable.index(baseline) if baseline in material.drawable else -1,
    )
    names = tuple(section.name for section in sections)
    return Report(html=html, title=title, sections=names, num_figures=len(list(figures_of(sections))))


def plugin_sections(material: Material, plugins: Plugins) -> list[Given]:
    """Return sections about the first run of each condition that is shown; a plugin's exception becomes a section."""
    found: dict[str, list[tuple[str, str | ReportSection]]] = {}
    for label in material.shown:
        run = next(iter(material.drawn(label)), None)
        if run is None or run.candidate.folder is None:
            continue
        try:
            view = _view(run, run.candidate.folder, plugins)
            answers = plugins.notify("retrain_report_sections", run=view, campaign=material.source.campaign)
        except RetrainError as error:
            answers = [{"A plugin failed": str(error)}]
        found[label] = [
            (str(title), body if isinstance(body, ReportSection) else str(body))
            for answer in answers
            for title, body in (answer.items() if isinstance(answer, Mapping) else ())
        ]
    first, *others = found.values() or [[]]
    everywhere = [pair for pair in first if all(pair in other for other in others)]
    own = [
        (label if len(material.shown) > 1 else "", *pair)
        for label, pairs in found.items()
        for pair in pairs
        if pair not in everywhere
    ]
    return [*(("", *pair) for pair in everywhere), *own]


def sections_of(given: Sequence[Given], links: Links) -> tuple[list[Section], Section | None]:
    """Return the sections with plots, one for each name, and one section with the texts of all plugins."""
    parts: dict[str, list[Part]] = {}
    titles: dict[str, str] = {}
    texts: list[Part] = []
    for condition, title, body in given:
        if isinstance(body, str):
            texts += [Heading(title, remark=condition), Pre(body)]
            continue
        name = re.sub(r"[^a-z0-9-]", "-", body.name.lower())
        name = f"plugin-{name}" if name in PAGE_IDS or not name else name
        titles.setdefault(name, title)
        plots = [drawn(plot) for plot in body.plots]
        found = parts.setdefault(name, [])
        found += [Heading(condition)] if condition else []
        found += [lede(body.text), Tiles("plots", plots)] if plots else [note(body.text)]
        found += [note("From ", links.to(file, file.name), ".") for file in body.files]
    drawn_sections = [Section(name, titles[name], found) for name, found in parts.items()]
    return drawn_sections, Section("plugins", "From plugins", texts) if texts else None


def _view(run: ReportRun, folder: Path, plugins: Plugins) -> RunView:
    """Return the run as its `config.toml` describes it, with the capabilities that its backend declares."""
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
