"""The recommended rank and the numbers beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.squeeze import analyze_adapter
from retrain.tools.squeeze.spectrum import ranks_to_test
from tests.kit.problems import codes_in

Make = Callable[..., Path]
Factors = tuple[np.ndarray, np.ndarray]
FALLING = [1.0, 0.1, 0.05, 0.01]


def test_the_documented_layer(make_adapter: Make, documented_factors: Factors) -> None:
    analysis = analyze_adapter(make_adapter({"q": documented_factors}))
    assert analysis.source_rank == 4
    assert [row.rank for row in analysis.rows] == [1, 2, 4]
    np.testing.assert_allclose([row.mean_variance for row in analysis.rows], [0.555809, 0.870985, 1.0], atol=5e-7)
    assert analysis.recommended_rank == 4
    assert analysis.layers[0].rank_needed == 3
    assert analyze_adapter(make_adapter({"q": documented_factors}, "b"), target_ranks=[3, 2]).recommended_rank == 3


def test_the_mean_hides_the_worst_layer_and_both_are_told(make_adapter: Make, two_layers: dict[str, Factors]) -> None:
    analysis = analyze_adapter(make_adapter(two_layers), min_variance_retention=0.9)
    one, two, four = analysis.rows
    assert [one.mean_variance, two.mean_variance] == pytest.approx([0.771683, 0.934209], abs=5e-7)
    assert [one.energy_variance, two.energy_variance] == pytest.approx([0.569061, 0.874866], abs=5e-7)
    assert (two.min_variance, two.worst_module) == (pytest.approx(0.870985, abs=5e-7), "a")
    assert two.max_variance == pytest.approx(0.997432, abs=5e-7)
    assert (four.mean_variance, four.min_variance, four.max_variance, four.energy_variance) == (1.0, 1.0, 1.0, 1.0)
    assert analysis.recommended_rank == 2


def test_energy_counts_the_scale_of_each_layer(make_adapter: Make, factors_of: Callable[..., Factors]) -> None:
    layers = {"a": factors_of([4.0, 3.0, 2.0, 1.0]), "b": factors_of(FALLING)}
    row = analyze_adapter(make_adapter(layers, lora_alpha=4, alpha_pattern={"b": 400})).rows[0]
    energy = 1e4 * sum(s * s for s in FALLING)
    assert row.energy_variance == pytest.approx((16 + 1e4) / (30 + energy))
    assert row.mean_variance == pytest.approx((16 / 30 + 1e4 / energy) / 2)


def test_where_ranks_differ_a_layer_keeps_all_from_its_own_on(
    make_adapter: Make, factors_of: Callable[..., Factors]
) -> None:
    layers = {"a": factors_of([1.0] * 8), "b": factors_of([1.0, 1.0])}
    analysis = analyze_adapter(make_adapter(layers, rank_pattern={"b": 2}))
    assert analysis.source_rank == 8
    assert [row.mean_variance for row in analysis.rows] == pytest.approx([0.3125, 0.625, 0.75, 1.0])


def test_a_layer_without_an_update_counts_in_no_mean(
    make_adapter: Make, factors_of: Callable[..., Factors], idle_layer: Factors
) -> None:
    analysis = analyze_adapter(make_adapter({"a": factors_of([4.0, 3.0, 2.0, 1.0]), "b": idle_layer}))
    assert (analysis.num_without_update, analysis.learned_nothing) == (1, False)
    assert [row.mean_variance for row in analysis.rows] == pytest.approx([16 / 30, 25 / 30, 1.0])
    assert analysis.layers[1].as_data()["rank_needed"] is None
    idle = analyze_adapter(make_adapter({"a": idle_layer, "b": idle_layer}, "idle"))
    assert (idle.learned_nothing, idle.recommended_rank, idle.rows) == (True, None, ())


@pytest.mark.parametrize(
    ("source", "wanted", "ranks"),
    [
        (1, [], [1]),
        (4, [], [1, 2, 4]),
        (6, [], [1, 2, 4, 6]),
        (128, [], [1, 2, 4, 8, 16, 32, 64, 128]),
        (8, [100, 3, 3, 1], [1, 3, 8]),
    ],
)
def test_tested_ranks(source: int, wanted: list[int], ranks: list[int]) -> None:
    assert ranks_to_test(source, wanted) == ranks


def test_no_tested_rank_may_be_enough_and_all_of_the_variance_may_be_wanted(
    make_adapter: Make, factors_of: Callable[..., Factors], documented_factors: Factors
) -> None:
    analysis = analyze_adapter(make_adapter({"a": factors_of([1.0] * 4)}), target_ranks=[1, 2])
    assert (analysis.recommended_rank, analysis.learned_nothing) == (None, False)
    whole = analyze_adapter(
        make_adapter({"a": documented_factors}, "b"), target_ranks=[2, 3, 4], min_variance_retention=1.0, source_rank=4
    )
    assert (whole.recommended_rank, whole.source_rank) == (3, 4)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *(("squeeze.bad-share", {"min_variance_retention": value}) for value in (0.0, 95.0, float("nan"))),
        ("squeeze.bad-rank", {"target_ranks": [4, 0]}),
        ("squeeze.source-rank", {"source_rank": 8}),
    ],
)
def test_arguments_that_make_no_sense(
    code: str, arguments: dict[str, Any], make_adapter: Make, documented_factors: Factors
) -> None:
    with pytest.raises(ConfigError) as caught:
        analyze_adapter(make_adapter({"a": documented_factors}), **arguments)
    assert codes_in(caught) == [code]


@pytest.mark.parametrize(
    ("code", "size", "bad", "alpha"),
    [
        ("squeeze.weights-not-finite", 1.0, np.nan, 4.0),
        ("squeeze.weights-not-finite", 1.0, np.inf, 4.0),
        ("squeeze.factors-too-large", 1e160, 0.0, 4.0),
        ("squeeze.factors-too-large", 1e80, 0.0, 4.0),
        ("squeeze.update-too-large", 1e69, 0.0, 1e30),
    ],
)
def test_numbers_that_cannot_be_measured_are_errors(
    code: str, size: float, bad: float, alpha: float, make_adapter: Make, documented_factors: Factors
) -> None:
    a, b = (size * factor for factor in documented_factors)
    b[0, 0] = bad or b[0, 0]
    with pytest.raises(ConfigError) as caught:
        analyze_adapter(make_adapter({"q": (a, b)}, lora_alpha=alpha))
    assert codes_in(caught) == [code]


def test_a_large_update_is_measured_like_a_small_one(make_adapter: Make, documented_factors: Factors) -> None:
    a, b = documented_factors
    for name, size in (("large", 1e60), ("small", 1e-100)):
        row = analyze_adapter(make_adapter({"q": (size * a, size * b)}, name)).rows[0]
        assert (row.mean_variance, row.energy_variance) == pytest.approx((0.555809, 0.555809), abs=5e-7)


def test_the_data_is_json(make_adapter: Make, documented_factors: Factors) -> None:
    data = analyze_adapter(make_adapter({"q": documented_factors})).as_data(layers=True)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert [row["recommended"] for row in data["ranks"]] == [False, False, True]
    assert data["layers"][0]["variance"] == pytest.approx([0.555809, 0.870985, 1, 1], abs=5e-7)


def test_nothing_heavy_is_imported_for_it(make_adapter: Make, documented_factors: Factors) -> None:
    folder = make_adapter({"q": documented_factors})
    program = (
        "import sys, retrain.squeeze\n"
        "assert not {'numpy', 'safetensors'} & set(sys.modules)\n"
        f"assert retrain.squeeze.analyze_adapter({str(folder)!r}).recommended_rank == 4\n"
        "assert not {'torch', 'transformers', 'plotly', 'wandb'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
