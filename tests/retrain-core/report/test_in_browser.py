"""Pages in a real browser: hostile texts stay texts, nothing is fetched, keys lead everywhere, a run is followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from retrain.report.watch_server import WatchServer
from tests.kit import made_runs
from tests.kit.browser import needs_chromium
from tests.kit.devtools import browser
from tests.kit.shared import first_or_long

pytestmark = needs_chromium
EVIL = "document.title='owned'; window.owned=1; fetch('https://example.org/x')"
HOSTILE = (
    f"<script>{EVIL}</script>",
    f'</pre></script><img src=x onerror="{EVIL}"><svg onload="{EVIL}">',
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred",
    "\u202e\u2066gnp.exe\u2069\u202c",
    "<iframe srcdoc='x'></iframe><link rel=stylesheet href=https://example.org/a.css>",
    "<!-- --><style>*{display:none}</style><base href=https://example.org>",
    "%{y}<a href='https://example.org'>link</a><b>bold</b>&lt;" + "x" * 3000,
)
NAMES = {f"maxrl+<script>{EVIL}</script>": 0.0, "grpo+<b>bold</b>%{x}</script><img src=x onerror=alert(1)>": 0.05}


@pytest.fixture
def hostile_page(campaign: Callable[..., Path], report: Callable[..., Any]) -> Path:
    """A campaign whose every text is hostile."""
    folder = campaign(
        NAMES,
        seeds=range(4),
        texts=HOSTILE,
        error=HOSTILE[1],
        states={(next(iter(NAMES)), 0): "failed"},
        config={"data": {"source": HOSTILE[0]}, "model": {"model": HOSTILE[3]}, "reward": {"type": HOSTILE[6]}},
    )
    run = next((folder / "runs").glob("grpo*_s0"))
    file = run / "emergence" / "generations.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    changed = json.loads(lines[1]) | {"completion": HOSTILE[1] + "<" * 1_000_000, "reward": 9.0}
    changed |= {"reference": HOSTILE[0], "prompt": [{"role": HOSTILE[0], "content": HOSTILE[1]}], "detail": HOSTILE[2]}
    changed |= {"reward_parts": {HOSTILE[1]: 1.0}, "stop_reason": HOSTILE[1], "example_id": HOSTILE[0]}
    changed |= {"group": f'\x01" onfocus={HOSTILE[0]}'}
    changed |= {"top_surprisal_tokens": [{"token": HOSTILE[1], "surprisal": 1.0}, {"token": "\ud800", "surprisal": 2}]}
    lines[1] = json.dumps(changed)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"step": 3,', f'"step": 3, "health": {json.dumps([HOSTILE[0]])},'))
    result = report(folder)
    assert result.code == 0, result.err
    return folder / "report.html"


def opened(tab: Any, page: Path, **options: Any) -> Any:
    """The page in the browser, with its plots drawn as far as they are in sight."""
    tab.logged.clear()
    tab.requested.clear()
    tab.open(page, **options)
    tab.wait_for("document.documentElement.dataset.plots === 'ready'")
    return tab


def test_hostile_texts_are_shown_and_nothing_runs(tab: Any, hostile_page: Path) -> None:
    opened(tab, hostile_page)
    tab.value("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    tab.value("window.dispatchEvent(new Event('beforeprint')); 1")  # draws every plot
    tab.wait_for("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg.main-svg'))")
    assert tab.logged == []
    assert tab.requested == [hostile_page.as_uri()]
    assert tab.value("window.owned === undefined && document.title.endsWith('retrain report')")
    acting = "[onfocus], [onerror], [onload], main script, main style, main [style]:not(.plot, .plot *)"
    assert tab.value(f"document.querySelectorAll('{acting}').length") == 0
    kinds = "[...new Set([...document.body.querySelectorAll('*')].map((e) => e.tagName.toLowerCase()))]"
    assert not {"img", "iframe", "link", "base", "object", "embed", "form"} & set(tab.value(kinds))
    assert tab.value("[...document.querySelectorAll('a')].every((a) => a.protocol === 'file:')")
    text = tab.value("document.body.innerText")
    escaped = ("[U+001B]]0;owned[U+0007]", "[U+202E][U+2066]gnp.exe")
    for part in (f"<script>{EVIL}</script>", *escaped, "characters left out"):
        assert part in text
    assert not {"\x1b", "\x07", "\u202e", "\u2066"} & set(text)
    drawn = tab.value("[...document.querySelectorAll('.plot svg')].map((svg) => svg.textContent).join(' ')")
    assert "<b>bold</b>" in drawn  # as text, not as bold type
    assert tab.value("document.querySelectorAll('.plot svg a, .plot svg script').length") == 0


EVERY = (
    "[...document.querySelectorAll('table')].every((t) => t.caption && t.querySelector('th[scope=col]'))",
    "[...document.querySelectorAll('tbody tr')].every((r) => r.querySelector('th[scope=row]'))",
    "[...document.querySelectorAll('.plot')].every((p) => p.getAttribute('role') === 'img')",
    "[...document.querySelectorAll('nav a')].every((a) => document.querySelector(a.hash))",
    "new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size"
    " === document.querySelectorAll('[id]').length",
    "document.querySelectorAll('section > h2').length >= 8",
)


@pytest.mark.long
def test_everything_can_be_found_by_headings_and_keys_in_light_dark_and_narrow(tab: Any, hostile_page: Path) -> None:
    def paper() -> Any:
        return tab.value("getComputedStyle(document.body).backgroundColor")

    opened(tab, hostile_page, dark=True)
    dark = paper()
    opened(tab, hostile_page)
    light = paper()
    assert light != dark
    for expected in (light, dark, light):  # light, dark, and as the system again
        tab.value("document.getElementById('theme').click()")
        assert paper() == expected
    levels = tab.value("[...document.querySelectorAll('h1, h2, h3, h4')].map((h) => Number(h.tagName[1]))")
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for promise in EVERY:
        assert tab.value(promise), promise
    opened(tab, hostile_page)
    tab.press("Tab")
    assert tab.value("document.activeElement.className") == "skip"
    tab.press("Enter")
    tab.wait_for("document.activeElement.id === 'main'")
    reached = set()
    for _ in range(120):
        tab.press("Tab")
        reached.add(tab.value("document.activeElement.tagName + '.' + document.activeElement.className"))
    assert {"SUMMARY.", "A.", "DIV.scroll", "PRE.completion", "BUTTON."} <= reached
    tab.value("document.querySelector('.legend button').focus()")
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    before = tab.value("document.querySelector('.legend button').getAttribute('aria-pressed')")
    tab.press(" ")
    assert tab.value("document.querySelector('.legend button').getAttribute('aria-pressed')") != before
    opened(tab, hostile_page, width=360, height=800)
    assert tab.value("document.documentElement.scrollWidth") <= 360
    assert tab.logged == []


@pytest.mark.parametrize("width", first_or_long([320, 390]))
def test_a_phone_shows_tables(tab: Any, campaign: Callable[..., Path], report: Callable[..., Any], width: int) -> None:
    folder = campaign(seeds=range(3), steps=30)
    assert report(folder).code == 0
    opened(tab, folder / "report.html", width=width, height=800)
    tab.value("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
    assert tab.value("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)"
    assert tab.value(f"{wide}.map((each) => each.ariaLabel)") == []
    first = "document.querySelector('table.stacked td')"
    assert tab.value(f"getComputedStyle({first}, '::before').content") not in ("none", '""')


@pytest.mark.long
def test_choosing_conditions_draws_them(tab: Any, made: Any, report: Callable[..., Any], tmp_path: Path) -> None:
    effects = {f"maxrl+none~lr={i}": 0.01 * i for i in range(14)}
    folder = made.write_campaign(tmp_path / "campaign", effects, seeds=[1, 2], steps=60)
    assert report(folder).code == 0
    opened(tab, folder / "report.html")
    plot = "document.querySelector('#curves .plot')"
    tab.value(f"{plot}.scrollIntoView(); 1")
    tab.wait_for(f"{plot}.querySelectorAll('.scatterlayer .trace').length > 0")
    lines = f"{plot}.data.filter((trace) => trace.name).map((trace) => trace.name)"
    assert len(tab.value(lines)) == 8
    tab.value("document.querySelector('.legend button[aria-pressed=false]').click()")
    assert len(tab.value(lines)) == 9
    search = "document.querySelector('.legend input[type=search]')"
    tab.value(f"{search}.value = 'lr=13'; {search}.dispatchEvent(new Event('input')); 1")
    assert tab.value("[...document.querySelectorAll('.legend button')].filter((chip) => !chip.hidden).length") == 1
    colours = f"{plot}.data.filter((t) => t.name).map((t) => t.line.color + t.line.dash)"
    assert len(set(tab.value(colours))) == 9
    assert tab.logged == []


CONTRAST = """(() => {
  const lightness = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => { v /= 255;
    return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = (one) => getComputedStyle(one).backgroundColor;
  const behind = (one) => { while (one && paper(one) === 'rgba(0, 0, 0, 0)') one = one.parentElement;
    return paper(one || document.body); };
  return Math.min(...[...document.querySelectorAll('p, dd, dt, h1, h2, h3, h4, span, button, pre, li, label')]
    .filter((one) => one.textContent.trim() && one.checkVisibility() && !one.disabled).map((one) => {
      const ends = [lightness(getComputedStyle(one).color), lightness(behind(one))].sort((a, b) => b - a);
      return (ends[0] + 0.05) / (ends[1] + 0.05); }));
})()"""


def test_the_page_follows_a_hostile_run(watched_run: Callable[..., Path], watch: Callable[[Path], WatchServer]) -> None:
    folder = watched_run(condition=HOSTILE[0], texts=HOSTILE, error=HOSTILE[1], config={"model": {"model": HOSTILE[5]}})
    server = watch(folder)
    with browser() as tab:
        for width, dark in ((390, True), (390, False), (1440, True), (1440, False)):
            tab.open(server.url, width=width, dark=dark)
            tab.wait_for("document.querySelectorAll('.card').length === 12")
            tab.value("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
            drawn = "[...document.querySelectorAll('figure:not([hidden]) svg')].every((one) => one.dataset.points > 0)"
            tab.wait_for(f"document.documentElement.dataset.looks > 0 && {drawn}")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value(CONTRAST) >= 4.5
        assert tab.value("document.querySelectorAll('svg.chart').length") >= 6
        pooling = "!!document.querySelector('figure:not([hidden]) svg[aria-label^=\"SEPA lambda\"]')"
        assert not tab.value(pooling), "lambda is 0 at every step"
        held_out = "document.querySelector('svg[aria-label^=\"Held-out correct rate\"]').dataset.points"
        before = tab.value(held_out)
        with (folder / "metrics.jsonl").open("a") as stream:
            added = {"step": 6, "eval_correct_rate": 0.75, "eval_ci_low": 0.5, "eval_ci_high": 0.9, "sepa_lambda": 0.5}
            stream.write(json.dumps(added) + "\n")
        tab.wait_for(f"{held_out} === String(1 + {before})")
        assert tab.value(pooling)
        assert "→ 75.0% [50.0%, 90.0%]" in tab.value("document.getElementById('facts').textContent")
        tab.value("document.getElementById('earlier').click()")
        tab.wait_for("document.getElementById('found').textContent.startsWith('30 of step 4;')")
        tab.value("document.getElementById('more').click()")
        tab.wait_for("document.querySelectorAll('.card').length === 24")
        choose = "const s = document.getElementById('shown'); s.value = 'wrong'; s.dispatchEvent(new Event('change'));"
        tab.value(f"(() => {{ {choose} }})()")
        tab.wait_for("document.querySelector('.card.wrong') && !document.querySelector('.card.right')")
        text = tab.value("document.body.textContent")
        assert "window.owned=1" in text, "as text"
        assert tab.value("document.title") == "run · retrain watch"
        acting = "document.querySelector('.card img, .card script, #setup script')"
        assert tab.value(f"window.owned === undefined && !{acting}")
        shutil.rmtree(folder)
        tab.wait_for("!document.getElementById('trouble').hidden")
        assert "folder is gone" in tab.value("document.getElementById('trouble').textContent")
        assert tab.value("document.querySelectorAll('svg.chart').length") >= 6, "what was read stays"
        assert all(url.startswith(server.url) for url in tab.requested), tab.requested
        assert tab.logged == []


def test_a_campaigns_page_follows_and_links_its_runs(tmp_path: Path, watch: Callable[[Path], WatchServer]) -> None:
    effects = {f"{HOSTILE[1]}+none": 0.0, "grpo+a-transform-with-a-name-that-is-as-long-as-they-get": 0.1}
    folder = made_runs.write_campaign(tmp_path / HOSTILE[0].replace("/", "∕"), effects, seeds=[1, 2], steps=6)
    shutil.move(folder / "runs", folder / "later")
    server = watch(folder)
    with browser() as tab:
        tab.open(server.url, width=390)
        assert tab.value("document.querySelectorAll('tbody tr').length") == 4
        assert tab.value("document.querySelectorAll('tbody a').length") == 0
        shutil.move(folder / "later", folder / "runs")
        tab.wait_for("document.querySelectorAll('tbody a').length === 4")
        for width, dark in ((1440, True), (390, True), (390, False)):
            tab.open(server.url, width=width, dark=dark)
            tab.wait_for("document.documentElement.dataset.looks > 0")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value(CONTRAST) >= 4.5
        table = "document.querySelector('.scroll')"
        assert tab.value(f"{table}.scrollWidth <= {table}.clientWidth"), "without sideways scroll"
        assert "4/4 runs done" in tab.value("document.getElementById('runs').textContent")
        tab.value("document.querySelector('tbody a').click()")
        tab.wait_for("document.querySelectorAll('svg.chart').length >= 6")
        assert tab.value("document.getElementById('setup').textContent").startswith("</pre>")
        tab.value("document.querySelector('.jumps a').click()")
        tab.wait_for("document.querySelectorAll('tbody a').length === 4")
        shutil.rmtree(folder)
        tab.wait_for("document.getElementById('runs').textContent.startsWith('manifest.json is gone')")
        assert tab.value("window.owned === undefined")
        assert all(url.startswith(server.url) for url in tab.requested), tab.requested
        assert tab.logged == []
