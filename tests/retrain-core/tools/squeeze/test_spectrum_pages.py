"""The page of the spectrum: complete, offline, and deaf to what stands in the names of modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from retrain.squeeze import analyze_adapter
from retrain.tools.squeeze.spectrum_pages import spectrum_plots, write_plot
from tests.kit.browser import dom_of, needs_chromium

Make = Callable[..., Path]
Random = Callable[..., tuple[np.ndarray, np.ndarray]]
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>.q_proj"


def test_the_figure_has_every_layer_and_the_means(make_adapter: Make, random_factors: Random) -> None:
    layers = {f"layers.{i}.{kind}_proj": random_factors(i, rank=16) for i in range(3) for kind in "qv"}
    analysis = analyze_adapter(make_adapter(layers))
    kept, needed = (plot.figure for plot in spectrum_plots(analysis))
    lines = {line["name"]: line["y"] for line in kept["lines"]}
    assert set(lines) == {"mean of layers", "weighted by energy", "least"}
    assert lines["mean of layers"] == [row.mean_variance for row in analysis.rows]
    assert len(kept["thin"]) == len(layers)
    assert needed["labels"] == [layer.module for layer in analysis.layers]
    assert needed["points"] == [layer.rank_needed for layer in analysis.layers]
    assert set(needed["kinds"]) == {"q_proj", "v_proj"}


def test_page_is_self_contained_and_names_are_text(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    analysis = analyze_adapter(make_adapter({EVIL: random_factors(0), "b\x1b": random_factors(1)}))
    write_plot(analysis, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "document.title='owned'</script>" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert len(page) < 8_000_000
    assert f"Rank {analysis.recommended_rank} of 4 keeps" in page


@pytest.mark.parametrize("targets", [[], [1]])
def test_without_a_recommendation(targets: list[int], make_adapter: Make, random_factors: Random, tmp_path: Path):
    layers = {"a": random_factors(0) if targets else (np.ones((4, 4)), np.zeros((4, 4)))}
    write_plot(analyze_adapter(make_adapter(layers), target_ranks=targets), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert ("No tested rank below 4 keeps 95 %" if targets else "learned no update") in page


@pytest.mark.long
@needs_chromium
def test_a_browser_draws_it(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    write_plot(analyze_adapter(make_adapter({EVIL: random_factors(0)})), tmp_path / "page.html")
    dom = dom_of((tmp_path / "page.html").read_text("utf-8"))
    assert "<title>Spectrum of adapter · retrain squeeze</title>" in dom
    assert 'data-plots="ready"' in dom
