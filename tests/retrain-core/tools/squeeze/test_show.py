"""The table, to the letter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from retrain.squeeze import analyze_adapter, compress_adapter
from retrain.tools.squeeze.job import NO_PROMISE, analysis_lines, compressed_lines

Make = Callable[..., Path]
Factors = tuple[np.ndarray, np.ndarray]
FALLING = [1.0, 0.1, 0.05, 0.01]


def test_the_whole_table(make_adapter: Make, documented_factors: Factors, factors_of: Callable[..., Factors]) -> None:
    folder = make_adapter({"a": documented_factors, "b": factors_of(FALLING)})
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


def test_a_campaign_frames_it(make_adapter: Make, documented_factors: Factors) -> None:
    lines = analysis_lines(analyze_adapter(make_adapter({"a": documented_factors})), framed=True)
    assert (lines[0], lines[-1]) == ("=" * 60, "=" * 60)
    assert "Recommended rank: 4 (>= 95% variance retained)" in lines
    assert not any(line.startswith("Least is kept") for line in lines)


def test_a_threshold_with_decimals(make_adapter: Make, documented_factors: Factors) -> None:
    analysis = analyze_adapter(make_adapter({"a": documented_factors}), min_variance_retention=0.9995)
    assert "Recommended rank: 4 (>= 99.95% variance retained)" in analysis_lines(analysis)


def test_nothing_learned(make_adapter: Make) -> None:
    lines = analysis_lines(analyze_adapter(make_adapter({"a": (np.ones((4, 4)), np.zeros((4, 4)))})))
    assert "Layers without an update, left out of every mean: 1" in lines
    assert lines[-1].startswith("No update learned")
    assert not any("Rank " in line for line in lines)


def test_no_tested_rank_is_enough(make_adapter: Make, documented_factors: Factors) -> None:
    lines = analysis_lines(analyze_adapter(make_adapter({"a": documented_factors}), target_ranks=[1, 2]))
    assert lines[-1].startswith("Recommended rank: none of the tested ones (>= 95% variance retained); source rank 4")
    assert not any("<--" in line for line in lines)


def test_names_cannot_steer_a_terminal(make_adapter: Make, documented_factors: Factors, factors_of) -> None:
    layers = {"a\x1b[2Jb": documented_factors, "b": factors_of(FALLING)}
    lines = analysis_lines(analyze_adapter(make_adapter(layers), target_ranks=[2], min_variance_retention=0.9))
    assert "Least variance is kept in a�[2Jb: 87.10%" in lines


def test_the_compressed_adapter(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    compressed = compress_adapter(make_adapter({"a": documented_factors}, lora_alpha=3), tmp_path / "out", 2)
    assert compressed_lines(compressed) == [f"Compressed to rank 2 (alpha 1.5, 0.0 -> 0.0 MiB): {tmp_path / 'out'}"]
