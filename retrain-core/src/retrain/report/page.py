"""The page: one file without external resources. Its policy admits only plotly and our own script and style."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from retrain.kernel.version import __version__
from retrain.report.budgets import budget_section, time_section
from retrain.report.bundle import Bundle, plotly_bundle, source_hash
from retrain.report.charts import build_charts, points_for
from retrain.report.completions import completions_section, read_all
from retrain.report.curve_figures import curve_section
from retrain.report.differences import settings_section
from retrain.report.events import files_section, health_section
from retrain.report.gather import Material
from retrain.report.markup import Links, attribute
from retrain.report.plugin_sections import PluginSection, by_name, plot_section, text_section
from retrain.report.summary import lede_of, summary_section, title_of
from retrain.report.text import plain, text
from retrain.report.verdicts import findings, verdict_section

PLOTLY_STYLE = "/* plotly writes its rules here */"
HEADING = re.compile(r"<h2[^>]*>(.*?)</h2>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page as HTML, and the names of its sections."""

    html: str
    title: str
    sections: tuple[str, ...]
    num_figures: int


def render(material: Material, plugin_given: Sequence[PluginSection], *, folder: Path, made: str) -> Page:
    """The page for a file in `folder`; `made` says when and how it was made. All data is untrusted."""
    links, title = Links(folder), title_of(material)
    num_seeds = sum(len(material.of(label)) for label in material.shown)
    charts = build_charts(material, most_points=points_for(len(material.drawable), num_seeds))
    samples = read_all(material)
    parts: dict[str, str] = {"summary": summary_section(material, links, lede_of(material), findings(material))}
    figures: list[dict[str, Any]] = []
    builders: dict[str, Callable[[int], tuple[str, list[dict[str, Any]]]]] = {
        "verdict": partial(verdict_section, material),
        "curves": partial(curve_section, material, charts),
        "budget": partial(budget_section, material),
        "time": partial(time_section, material),
    }
    builders |= {name: partial(plot_section, group, links) for name, group in by_name(plugin_given).items()}
    for name, build in builders.items():
        parts[name], more = build(len(figures))
        figures += more
    parts["settings"] = settings_section(material)
    parts["completions"] = completions_section(samples, links)
    parts["health"] = health_section(material)
    parts["plugins"] = text_section(plugin_given)
    parts["files"] = files_section(material, links, made)
    present = {name: part for name, part in parts.items() if part}
    data = {
        "conditions": [plain(label, 120) for label in material.drawable],
        "shown": [index for index, label in enumerate(material.drawable) if label in material.shown],
        "baseline": _baseline(material),
        "figures": figures,
    }
    html = _document(title, present, data, plotly_bundle())
    return Page(html=html, title=title, sections=tuple(present), num_figures=len(figures))


def _baseline(material: Material) -> int:
    baseline = material.study.baseline if material.study and material.study.comparisons else ""
    return material.drawable.index(baseline) if baseline in material.drawable else -1


def _document(title: str, parts: Mapping[str, str], data: Mapping[str, Any], bundle: Bundle) -> str:
    style, script = _own("page.css"), _own("page.js")
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {source_hash(script)} {bundle.hash}; "
        f"style-src {source_hash(style)} {source_hash(PLOTLY_STYLE)}"
    )
    contents = "".join(f'<li><a href="#{name}">{_heading(part)}</a></li>' for name, part in parts.items())
    styles = "".join(
        f'<style id="{name}">{PLOTLY_STYLE}</style>' for name in ("plotly.js-style-global", *bundle.style_ids)
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="retrain {__version__}, plotly.js {attribute(bundle.version)}">
<title>{attribute(title)} · retrain report</title>
<style>{style}</style>
{styles}
</head>
<body>
<a class="skip" href="#main">Skip to the report</a>
<header class="top">
<div><p class="kicker">retrain report</p><h1>{text(title)}</h1></div>
<div class="controls"><button id="theme" type="button">Theme: as the system</button></div>
</header>
<div class="frame">
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<main id="main" tabindex="-1">
<noscript><p class="alert">Without JavaScript there are no plots; every table is there.</p></noscript>
<p id="trouble" class="alert" hidden></p>
{chr(10).join(parts.values())}
</main>
</div>
<script type="application/json" id="data">{_inert(data)}</script>
<script type="application/octet-stream" id="plotly">{bundle.packed}</script>
<script>{script}</script>
</body>
</html>
"""


def _heading(part_html: str) -> str:
    found = HEADING.search(part_html)
    return found[1] if found else ""


def _inert(data: Mapping[str, Any]) -> str:
    """JSON that cannot close its script element."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _own(name: str) -> str:
    return files("retrain.report").joinpath(name).read_text(encoding="utf-8")
