"""Engine `mlx` through the whole command, against the real server of MLX-LM on a CPU."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.running import records, retrain
from tests.kit import engine_record
from tests.kit.mlx_server import mlx_serving

pytestmark = pytest.mark.long  # starting the server takes as long as ten other tests

TINY = BUILTIN_MODELS["tiny"]
EXACT = 1e-4  # nats, both sides in float32
BFLOAT16 = 0.05  # and on average with the server in bfloat16
FEW = ("--batch-size", "2", "--group-size", "4", "--max-tokens", "8", "--eval-examples", "0", "--save-every", "0")
STEPS = ("--max-steps", "5", "--batch-size", "4", "--group-size", "8", "--eval-examples", "0", "--save-every", "0")
CURVES = ("loss", "mean_reward", "correct_rate", "grad_norm", "exec_surprisal_mean", "ratio_mean", "trained_tokens")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    shutil.copy(engine_record.__file__, tmp_path)
    return tmp_path


def test_five_steps_are_exact_and_their_curves_are_those_of_the_training_model(
    folder: Path, exact_model: Path, mlx_url: str
) -> None:
    through = ("--inference-engine", "engine_record.recording", "--inference-url", mlx_url, "--model", str(exact_model))
    environ = {"RECORDED_ENGINE": "retrain.engines.mlx.create_engine"}
    done = retrain(*through, *STEPS, "--log-dir", "logs/mlx", cwd=folder, environ=environ)
    assert done.code == 0, done.err
    lines = records(folder / "logs/mlx/metrics.jsonl")
    gaps = records(folder / "gaps.jsonl")
    assert [gap["version"] for gap in gaps] == list(range(1, len(gaps) + 1))  # one per step that trained
    assert all(0.0 < gap["gap"] < EXACT and gap["tokens"] > 64 for gap in gaps)
    assert len(lines) == len(records(folder / "samples.jsonl")) == 5
    trained = [line for line in lines if line["loss"] is not None]
    assert len(trained) == len(gaps) >= 3
    assert all(line["logprob_gap_max"] < EXACT for line in trained)
    replay = ("--inference-engine", "engine_record.replaying", "--model", str(exact_model), "--log-dir", "logs/again")
    again = retrain(*replay, *STEPS, cwd=folder)
    assert again.code == 0, again.err
    for ours, theirs in zip(records(folder / "logs/again/metrics.jsonl"), lines, strict=True):
        for name in CURVES:
            assert ours.get(name) == pytest.approx(theirs.get(name), rel=1e-3, abs=1e-5), name


def test_a_model_stored_in_bfloat16_is_as_near_as_that_allows(folder: Path, tmp_path: Path) -> None:
    with mlx_serving(TINY, tmp_path) as url:
        done = retrain("--inference-engine", "mlx", "--inference-url", url, *FEW, "--max-steps", "1", cwd=folder)
    assert done.code == 0, done.err
    told = re.search(r"(\S+) nats from the trainer's \(max (\S+)\)", " ".join((done.out + done.err).split()))
    assert told is not None, done.err
    assert 1e-3 < float(told[1]) < BFLOAT16


def test_below_temperature_one_its_numbers_are_refused_or_recomputed(
    folder: Path, exact_model: Path, mlx_url: str
) -> None:
    through = ("--inference-engine", "mlx", "--inference-url", mlx_url, "--model", str(exact_model), *FEW)
    refused = retrain(*through, "--temperature", "0.7", cwd=folder)
    assert refused.code == 2
    assert "mlx reports log-probabilities before temperature, and [training] temperature = 0.7" in refused.err
    assert 'logprobs = "trainer"' in refused.err
    assert "Traceback" not in refused.err
    keys = ("--temperature", "0.7", "--inference-logprobs", "trainer", "--max-steps", "2")
    done = retrain(*through, *keys, cwd=folder)
    assert done.code == 0, done.err
    for line in records(folder / "logs/tiny/metrics.jsonl"):
        assert 0.0 < line["engine_gap_max"] < EXACT
        assert line.get("logprob_gap_max", 0.0) < EXACT
