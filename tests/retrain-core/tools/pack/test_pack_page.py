"""The page about a pack: everything in it is text, and the results over steps are drawn from the packed lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.tools.pack.pack_command import Curve, drawn_curves, page_of

FINITE = st.floats(-1e12, 1e12)
EVIL = "<b>evil"
RUN = {"name": "", "place": "run", "condition": EVIL, "seed": 1, "steps": 2, "digest": "0a1b2c3d"}
MANIFEST: dict[str, Any] = {
    "kind": "run", "name": EVIL, "retrain": "0.1.0", "python": "3.11.7", "hardware": {}, "runs": [RUN],
    "model": {"name": "builtin:tiny", "num_files": 1, "digest": "0a"}, "wheels": {}, "placed": [], "left_out": [],
    "packages": {"numpy": {"version": "2.0", "digest": ""}}, "equivalence": None, "verdict": None,
}  # fmt: skip


@pytest.mark.parametrize(("steps", "has_curves"), [(2, True), (1, False)])
def test_results_over_steps_are_drawn_and_names_are_text(steps: int, has_curves: bool) -> None:
    lines = [{"step": step, "loss": 0.5 * step, "mean_reward": None} for step in range(steps)]
    metrics = "".join(json.dumps(line) + "\n" for line in lines).encode()
    members = {"run/run.json": b"{}", "run/metrics.jsonl": metrics, "config.toml": b"[model]\n"}
    page = page_of(MANIFEST, members, "p.rtpack")
    assert EVIL not in page
    assert ("Too few steps to draw." not in page) == has_curves
    assert ("<polyline" in page) == has_curves
    assert "Mean reward" not in page


@given(st.lists(st.tuples(st.integers(0, 10**6), FINITE), min_size=1, max_size=20), st.text(max_size=20))
@settings(max_examples=50)
def test_any_curve_is_drawn_inside_its_figure_and_any_label_is_escaped(
    points: list[tuple[int, float]], label: str
) -> None:
    html = drawn_curves("t", [Curve(f"<b>{label}", points)]).__html__()
    assert "nan" not in html
    assert "<b>" not in html
