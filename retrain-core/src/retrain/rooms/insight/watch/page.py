"""The page: the report's style, one script of our own, no data; the script asks for it while the run goes on."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from retrain.rooms.insight.report.bundle import source_hash
from retrain.rooms.insight.report.chart_specs import CHARTS, ChartSpec
from retrain.rooms.insight.report.lines import PASS_PREFIX
from retrain.rooms.insight.report.text import plain, text
from retrain.rooms.insight.watch.browse import AT_A_TIME, SHOWN


@cache
def style() -> str:
    """The report's style sheet and what this page adds to it."""
    return _file("report", "page.css") + _file("watch", "watch.css")


@cache
def script() -> str:
    """The page's script."""
    return _file("watch", "watch.js")


def _file(folder: str, name: str) -> str:
    return files(f"retrain.rooms.insight.{folder}").joinpath(name).read_text(encoding="utf-8")


@cache
def policy() -> str:
    """The page runs and shows nothing but its own, asks this server alone, and stands in no other page."""
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
        f"script-src {source_hash(script())}; style-src {source_hash(style())}"
    )


def chart_data(spec: ChartSpec, group: str) -> dict[str, Any]:
    """A chart as the script draws it; names of parts and sets are a plugin's."""
    texts = {"group": group, "title": plain(spec.title), "note": spec.note, "unit": spec.unit.value}
    return texts | {"fields": spec.fields, "is_graded": spec.is_graded}


def render(run: Path, every_s: float) -> str:
    """The page about a run folder, of which it knows the name alone; it asks for news every few seconds."""
    charts = [chart_data(spec, group) for group, specs in CHARTS.items() for spec in specs]
    setup = {"charts": charts, "pass_prefix": PASS_PREFIX, "at_a_time": AT_A_TIME, "every_ms": 1000 * every_s}
    written = json.dumps(setup).replace("<", "\\u003c")
    options = "".join(f"<option>{name}</option>" for name in SHOWN)
    name = text(run.name or run)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{name} · retrain watch</title>
<style>{style()}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the run</a>
<header class="top">
<div><p class="kicker">retrain watch</p><h1>{name}</h1></div>
<nav class="jumps" aria-label="Contents"><a href="#now">Now</a> <a href="#curves">Curves</a>
<a href="#completions">Completions</a></nav>
<div class="controls"><button id="theme" type="button">Theme: as the system</button></div>
</header>
<main id="main" class="watch" tabindex="-1">
<noscript><p class="alert">This page needs JavaScript; `retrain status` and `retrain report` do not.</p></noscript>
<p id="trouble" class="alert" role="alert" hidden></p>
<section id="now" aria-labelledby="now-h">
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
</section>
</main>
<script type="application/json" id="page-setup">{written}</script>
<script>{script()}</script>
</body>
</html>
"""
