"""The page in a real browser: it follows the run, hostile texts stay texts, and no row is wider than a telephone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from retrain.report.watch_server import WatchServer
from tests.kit import made_runs
from tests.kit.browser import needs_chromium
from tests.kit.devtools import browser

pytestmark = needs_chromium
EVIL = "document.title='owned'; window.owned=1; fetch('https://example.org/x')"
HOSTILE = (
    f"<script>{EVIL}</script>",
    f'</pre></script><img src=x onerror="{EVIL}"><svg onload="{EVIL}">',
    "\x1b]0;owned\x07\x1b[2J\u202egnp.exe" + "x" * 3000,
    "</script><style>*{display:none}</style><base href=https://example.org>",
)
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


def test_the_page_follows_a_run_with_hostile_texts(
    watched_run: Callable[..., Path], watch: Callable[[Path], WatchServer]
) -> None:
    folder = watched_run(condition=HOSTILE[0], texts=HOSTILE, error=HOSTILE[1], config={"model": {"model": HOSTILE[3]}})
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


def test_a_campaigns_page_follows_its_runs_and_leads_to_the_page_of_each(
    tmp_path: Path, watch: Callable[[Path], WatchServer]
) -> None:
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
