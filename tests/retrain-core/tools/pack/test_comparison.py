"""A rerun is compared by lines and the test of equivalence; the page about a pack draws them and escapes names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.tools.pack.comparison import (
    EVALUATED,
    RunLines,
    divergence,
    encoded,
    equivalence,
    expected_half_width,
    final_rates,
)
from retrain.tools.pack.pack_command import Curve, drawn_curves, page_of
from retrain.tools.pack.rerunning import LOOKED_AT, Difference, cause_lines, ranked
from retrain.tools.pack.wheels import extras_of, installed_digests, pinned, required, wheel_of
from tests.kit.problems import refused


def test_lines_come_as_they_are_written_without_times_and_with_their_evaluation(tmp_path: Path) -> None:
    reader, metrics = RunLines(tmp_path), tmp_path / "metrics.jsonl"
    assert list(reader.new()) == []
    (tmp_path / "eval.jsonl").write_text('{"step": -1, "example": "a"}\n{"step": 5, "example": "a"}\n')
    metrics.write_text('{"step": -1, "x": 1, "eval_time_s": 0.3}\n{"step": 0, "x"')
    (first,) = reader.new()
    assert set(first) == {"step", "x", EVALUATED}
    with metrics.open("a") as stream:
        stream.write(': 2}\n{"step": 5, "x": 3}\n')
    second, third = reader.new()
    assert (second, third["x"]) == ({"step": 0, "x": 2}, 3)
    assert third[EVALUATED] != first[EVALUATED]
    assert [json.loads(encoded(line)) for line in RunLines(tmp_path).new()] == [first, second, third]
    with metrics.open("a") as stream:
        stream.write("[]\n")
    with pytest.raises(ConfigError, match=re.escape(str(metrics))):
        list(reader.new())


def test_the_first_divergence_names_step_field_and_both_values() -> None:
    assert divergence("", {"step": 1, "a": 1.5}, {"step": 1, "a": 1.5}) is None
    found = divergence("r", {"step": 1, "a": 1.5, "b": 1}, {"step": 1, "a": 2.5, "c": 1})
    assert found is not None
    assert found.fields == {"a": (1.5, 2.5), "b": (1, None), "c": (None, 1)}
    assert found.lines()[:2] == ["first divergence: step 1 of r, 3 fields", "  a: 1.5 in the pack, 2.5 here"]
    ended = divergence("", {"step": 3}, None)
    assert ended is not None
    assert ended.lines() == ["first divergence: step 3: the rerun has no such line"]


def test_the_most_likely_cause_depends_on_whether_the_numbers_only_round_otherwise() -> None:
    seed, package = Difference(kind="seed", what="was 1 and is now 2"), Difference(kind="package", what="numpy")
    far = divergence("", {"step": 0, "a": 1.0}, {"step": 0, "a": 2.0})
    near = divergence("", {"step": 0, "a": 1.0}, {"step": 0, "a": 1.0 + 1e-7})
    assert ranked([package, seed], far) == [seed, package]
    assert ranked([seed, package], near) == [package, seed]
    assert cause_lines([seed, package])[0] == "most likely cause: seed: was 1 and is now 2"
    assert cause_lines([package]) == ["cause: package: numpy"]
    assert LOOKED_AT in cause_lines([])[0]


def _rates(values: np.ndarray) -> dict[str, tuple[str, float]]:
    return {str(number): (str(number), float(value)) for number, value in enumerate(values)}


def test_equivalence_needs_the_same_examples_and_an_interval_inside_the_margin() -> None:
    half = _rates(np.full(50, 0.5))
    assert equivalence(half, half, 0.01).is_equivalent
    assert "not shown" in str(equivalence(half, _rates(np.full(50, 0.6)), 0.05))
    assert "could not be tested" in str(equivalence(half, {}, 0.5))
    assert "no spread" in str(equivalence(_rates(np.ones(1)), _rates(np.ones(1)), 0.5))
    records = [
        {"step": step, "set": "held_out", "example": "a", "cluster": "c", "correct": correct}
        for step, correct in ((-1, [True, True]), (9, [True, False]))
    ]
    assert final_rates(records) == {"a": ("c", 0.5)}


def test_a_true_difference_of_the_margin_is_called_equivalent_in_at_most_one_in_forty() -> None:
    rng, margin, called, trials = np.random.default_rng(1), 0.1, 0, 1000
    width = expected_half_width(_rates(np.full(100, 0.5)), 4)
    for _ in range(trials):
        packed, here = rng.binomial(4, 0.5, 100) / 4, rng.binomial(4, 0.5 - margin, 100) / 4
        called += equivalence(_rates(packed), _rates(here), margin).is_equivalent
    assert called / trials <= 0.025 + 0.015  # three standard errors of 1,000 trials
    spread = [float((rng.binomial(4, 0.5, (2, 100)).mean(axis=1) / 4) @ [1, -1]) for _ in range(2000)]
    assert width == pytest.approx(1.96 * np.std(spread), rel=0.1)


def test_a_wheel_is_made_of_what_is_installed_and_names_its_files() -> None:
    wheel = wheel_of("retrain-sepa", "0.1.0", {"retrain_sepa"})
    assert wheel.file == "retrain_sepa-0.1.0-py3-none-any.whl"
    assert "retrain_sepa/plugin.py" in wheel.sources
    assert wheel.content == wheel_of("retrain-sepa", "0.1.0", {"retrain_sepa"}).content
    assert wheel_of("pluggy", "1", {"pluggy"}).sources.keys() >= {"pluggy/__init__.py", "pluggy/_hooks.py"}
    assert refused(wheel_of, "no-such-distribution", "1", {"x"}) == ["pack.no-install-record"]


def test_required_packages_are_pinned_without_the_label_of_a_build() -> None:
    found = required({"retrain-core": ()})
    assert {"numpy", "pluggy", "transformers"} <= set(found)
    assert found.keys() < required({"retrain-core": ["wandb"]}).keys() | {"x"}
    assert extras_of("retrain-core", ["Wandb", "nothing"]) == ["wandb"]
    assert [pinned("torch", "2.13.0+cpu"), pinned("numpy", "2.4.6")] == ["torch==2.13.0", "numpy==2.4.6"]
    digest = installed_digests(["numpy"])["numpy"]["digest"]
    assert len(digest) == 32
    assert digest == installed_digests(["numpy"])["numpy"]["digest"]


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
def test_any_curve_drawn_inside_its_figure_and_any_label_escaped(points: list[tuple[int, float]], label: str) -> None:
    html = drawn_curves("t", [Curve(f"<b>{label}", points)]).__html__()
    assert "nan" not in html
    assert "<b>" not in html
