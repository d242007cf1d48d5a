"""The pages: the report's style, one script each, no data of a run; its script asks for them while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from retrain.report.bundle import source_hash
from retrain.report.chart_specs import CHARTS, ChartSpec
from retrain.report.lines import PASS_PREFIX
from retrain.report.text import plain, text
from retrain.report.watch.browse import AT_A_TIME, SHOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page, and the content security policy that it is sent with."""

    html: str
    policy: str


@cache
def _file(folder: str, name: str) -> str:
    return files(f"retrain.inspect.{folder}").joinpath(name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """The report's style sheet and what these pages add to it."""
    return _file("report", "page.css") + _file("watch", "watch.css")


def chart_data(spec: ChartSpec, group: str) -> dict[str, Any]:
    """A chart as the script draws it; names of parts and sets are a plugin's."""
    texts = {"group": group, "title": plain(spec.title), "note": spec.note, "unit": spec.unit.value}
    return texts | {"fields": spec.fields, **{name: getattr(spec, name) for name in ("is_graded", "is_pooling")}}


def document(
    name: object, main: str, main_html: str, script: str, setup: Mapping[str, Any], nav_html: str = ""
) -> Page:
    """A page around `main_html`, whose name is `main`; it runs one script of this folder, which reads `setup`.

    It runs and shows nothing else, asks only this server, and no other page can frame it.
    """
    shown, style, source = text(name), _style(), _file("watch", script)
    written = json.dumps(setup).replace("<", "\\u003c")
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        f"script-src {source_hash(source)}; style-src {source_hash(style)}"
    )
    html = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{shown} · retrain watch</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to {main}</a>
<header class="top">
<div><p class="kicker">retrain watch</p><h1>{shown}</h1></div>
{nav_html}
</header>
<main id="main" class="watch" tabindex="-1">
<noscript><p class="alert">This page needs JavaScript; `retrain status` and `retrain report` do not.</p></noscript>
<p id="trouble" class="alert" role="alert" hidden></p>
{main_html}
</main>
<script type="application/json" id="page-setup">{written}</script>
<script>{source}</script>
</body>
</html>
"""
    return Page(html=html, policy=policy)


def render(run: Path, every_s: float, *, campaign: str = "") -> Page:
    """The page about a run folder, of which it knows the name alone; it asks for news every few seconds.

    With the name of a `campaign` it leads back to the list of that campaign's runs.
    """
    charts = [chart_data(spec, group) for group, specs in CHARTS.items() for spec in specs]
    setup = {"charts": charts, "pass_prefix": PASS_PREFIX, "at_a_time": AT_A_TIME, "every_ms": 1000 * every_s}
    options = "".join(f"<option>{name}</option>" for name in SHOWN)
    back = f'<a href="../../">Runs of {text(campaign)}</a> ' if campaign else ""
    nav = f"""<nav class="jumps" aria-label="Contents">{back}<a href="#now">Now</a> <a href="#curves">Curves</a>
<a href="#completions">Completions</a></nav>
<div class="controls"><button id="theme" type="button">Theme: as the system</button></div>"""
    main = f"""<section id="now" aria-labelledby="now-h">
<h2 id="now-h">Now</h2>
<p class="lede"><span id="state" class="pill"></span> <span id="setup"></span></p>
<div class="track"><label for="run-bar" id="run-text">steps</label>
<progress id="run-bar" max="1" value="0"></progress><span id="run-left"></span></div>
<div class="track"><label for="phase-bar" id="phase-text">phase</label>
<progress id="phase-bar" max="1"></progress><span id="phase-left"></span></div>
<p class="note" id="phase-detail"></p>
<dl class="facts" id="facts"></dl>
</section>
<section id="curves" aria-labelledby="curves-h">
<h2 id="curves-h">Curves</h2>
<p class="note" id="no-curves">No step is finished yet.</p>
<div id="charts"></div>
</section>
<section id="completions" aria-labelledby="completions-h">
<h2 id="completions-h">Completions</h2>
<div class="browse">
<button id="earlier" type="button">Earlier</button>
<label>step <input id="step" type="number" min="0" inputmode="numeric"></label>
<button id="later" type="button">Later</button>
<label><input id="follow" type="checkbox" checked> follow the newest</label>
<label>show <select id="shown">{options}</select></label>
</div>
<p class="note" id="found">No completion is recorded yet.</p>
<div class="cards" id="cards"></div>
<button id="more" type="button" hidden>More of this step</button>
</section>"""
    return document(run.name or run, "the run", main, "watch.js", setup, nav)
