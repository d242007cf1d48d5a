"""What squeezing costs, measured: the seam alone, and on a real run of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.squeeze import compress_adapter
from retrain.tools.squeeze.adapter import read_adapter
from retrain.tools.squeeze.command import measure

Make = Callable[..., Path]
Random = Callable[..., tuple[np.ndarray, np.ndarray]]
Command = Callable[..., Any]


def test_the_squeezed_policy_is_evaluated_at_the_source_rank(
    make_adapter: Make, random_factors: Random, tmp_path: Path
) -> None:
    layers = {"q": random_factors(0, rank=8), "v": random_factors(1, rank=2)}
    source = make_adapter(layers, lora_alpha=16, rank_pattern={"v": 2}, tensors={"head.weight": np.arange(4)})
    (source / "optimizer.safetensors").write_bytes(b"state")
    compress_adapter(source, tmp_path / "small", 3)
    seen: list[Path] = []

    def evaluate(folder: Path) -> Mapping[str, float]:
        seen.append(folder)
        return {"eval_correct_rate": 0.75 / len(seen), "eval_ci_low": 0.1, "eval_ci_high": 0.9}

    measured = measure(source, tmp_path / "small", evaluate, tmp_path / "scratch")
    assert seen == [source, tmp_path / "scratch"]
    assert {file.name for file in seen[1].iterdir()} == {file.name for file in source.iterdir()}
    assert (seen[1] / "optimizer.safetensors").read_bytes() == b"state"
    for pair, small in zip(read_adapter(seen[1]).pairs, read_adapter(tmp_path / "small").pairs, strict=True):
        a, b = read_adapter(seen[1]).factors(pair)
        small_a, small_b = read_adapter(tmp_path / "small").factors(small)
        assert a.shape == layers[pair.module][0].shape
        np.testing.assert_array_equal(pair.scale * b @ a, small.scale * small_b @ small_a)
    assert (measured.rank, measured.source_rank) == (3, 8)
    assert measured.lines()[1:] == ["  rank    8:  75.0%  [10.0, 90.0]", "  rank    3:  37.5%  [10.0, 90.0]"]
    assert json.loads(json.dumps(asdict(measured))) == asdict(measured)


@pytest.fixture
def tiny_run(command: Command, tmp_path: Path) -> Path:
    pytest.importorskip("torch")
    assert command("init", "--template", "tiny").code == 0
    small = ("--seed", "1", "--batch-size", "4", "--group-size", "4", "--save-every", "0", "--max-steps", "3")
    result = command(*small, "--eval-examples", "8", "--eval-samples", "2", "--log-dir", "logs/tiny")
    assert result.code == 0, result.err
    return tmp_path / "logs" / "tiny"


@pytest.mark.long
def test_a_run_of_the_embedded_model(tiny_run: Path, command: Command) -> None:
    metrics = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    before = {file: file.read_bytes() for file in tiny_run.rglob("*") if file.is_file()}
    result = command("squeeze", "logs/tiny", "--eval", "--json", "--squeeze-compress-to", "100")
    assert result.code == 0, result.err
    measured = json.loads(result.out)["eval"]
    for part in ("source", "squeezed"):  # at full rank it is the same policy, up to rounding
        assert measured[part]["eval_correct_rate"] == pytest.approx(metrics[-1]["eval_correct_rate"], abs=0.13)
    assert measured["source"]["eval_correct_rate"] == metrics[-1]["eval_correct_rate"]
    assert {file: file.read_bytes() for file in tiny_run.rglob("*") if file.is_file()} == before
    (again,) = json.loads(command("eval", "logs/tiny", "--out", "elsewhere", "--json").out)["results"]
    assert again["own"] == {"same_as_run": 16, "of": 16}  # `retrain eval` repeats the run's own, to the sample
    assert again["correct_rate"] == metrics[-1]["eval_correct_rate"]
    shown = command("squeeze", "logs/tiny", "--eval", "--squeeze-compress-to", "1")
    assert shown.code == 0, shown.err
    assert "Held-out correct rate, 95% interval:" in shown.out


@pytest.mark.long
def test_a_run_without_held_out_examples_is_refused(tiny_run: Path, command: Command) -> None:
    result = command("squeeze", "logs/tiny", "--eval", "--eval-examples", "0")
    assert result.code == 2
    assert "held out no examples" in result.err
