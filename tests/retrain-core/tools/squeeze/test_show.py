"""The table, to the letter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.squeeze import analyze_adapter, compress_adapter
from retrain.tools.squeeze.job import NO_PROMISE, analysis_lines, compressed_lines

Make = Callable[..., Path]
Factors = tuple[np.ndarray, np.ndarray]


def test_the_whole_table(make_adapter: Make, two_layers: dict[str, Factors]) -> None:
    folder = make_adapter(two_layers)
    lines = analysis_lines(analyze_adapter(folder, min_variance_retention=0.9))
    assert lines == [
        f"LoRA-Squeeze: {folder}",
        "Threshold: 90% variance retained",
        "Source rank: 4",
        "Layers analyzed: 2",
        "",
        "  Rank  Mean Var%  Min Var%  Max Var%  Energy Var%",
        "--------------------------------------------------",
        "     1      77.17     55.58     98.76        56.91",
        "     2      93.42     87.10     99.74        87.49  <--",
        "     4     100.00    100.00    100.00       100.00",
        "",
        "Recommended rank: 2 (>= 90% variance retained)",
        "Least variance is kept in a: 87.10%",
        NO_PROMISE,
    ]


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"min_variance_retention": 0.9995}, "Recommended rank: 4 (>= 99.95% variance retained)"),
        ({"target_ranks": [1, 2]}, "Recommended rank: none of the tested ones (>= 95% variance retained)"),
    ],
)
def test_the_recommendation_names_the_threshold_and_a_campaign_frames_it(
    settings: dict[str, Any], last: str, make_adapter: Make, documented_factors: Factors
) -> None:
    lines = analysis_lines(analyze_adapter(make_adapter({"a": documented_factors}), **settings), framed=True)
    assert (lines[0], lines[-1]) == ("=" * 60, "=" * 60)
    assert any(line.startswith(last) for line in lines)
    assert sum("<--" in line for line in lines) == ("target_ranks" not in settings)
    assert not any("Least variance" in line for line in lines)


def test_nothing_learned(make_adapter: Make, idle_layer: Factors) -> None:
    lines = analysis_lines(analyze_adapter(make_adapter({"a": idle_layer})))
    assert "Layers without an update, left out of every mean: 1" in lines
    assert (lines[-1].startswith("No update learned"), any("Rank " in line for line in lines)) == (True, False)


def test_names_cannot_steer_a_terminal(make_adapter: Make, two_layers: dict[str, Factors]) -> None:
    layers = {"a\x1b[2Jb": two_layers["a"], "b": two_layers["b"]}
    lines = analysis_lines(analyze_adapter(make_adapter(layers), target_ranks=[2], min_variance_retention=0.9))
    assert "Least variance is kept in a\ufffd[2Jb: 87.10%" in lines


def test_the_compressed_adapter(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    compressed = compress_adapter(make_adapter({"a": documented_factors}, lora_alpha=3), tmp_path / "out", 2)
    assert compressed_lines(compressed) == [f"Compressed to rank 2 (alpha 1.5, 0.0 -> 0.0 MiB): {tmp_path / 'out'}"]
