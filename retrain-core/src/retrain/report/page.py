"""The report: sections about the runs, the comparison, curves, settings and completions as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.report.budgets import budget_section, time_section
from retrain.report.charts import curve_section
from retrain.report.completions import completions_section
from retrain.report.gather import Material
from retrain.report.parts import Links, figures_of
from retrain.report.plugin_sections import PluginSection, sections_of
from retrain.report.settings import settings_section
from retrain.report.shell import sections_page
from retrain.report.summary import files_section, health_section, summary_section, title_of
from retrain.report.text import plain
from retrain.report.verdicts import findings, verdict_section


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The page as HTML, and the names of its sections."""

    html: str
    title: str
    sections: tuple[str, ...]
    num_figures: int


def render(material: Material, plugin_given: Sequence[PluginSection], *, folder: Path, made: str) -> Report:
    """The page for a file in `folder`; `made` says when and how it was made. All data is untrusted."""
    links, title = Links(folder), title_of(material)
    drawn_by_plugins, texts_of_plugins = sections_of(plugin_given, links)
    found = (
        summary_section(material, links, findings(material)),
        verdict_section(material),
        curve_section(material),
        budget_section(material),
        time_section(material),
        *drawn_by_plugins,
        settings_section(material),
        completions_section(material, links),
        health_section(material),
        texts_of_plugins,
        files_section(material, links, made),
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
