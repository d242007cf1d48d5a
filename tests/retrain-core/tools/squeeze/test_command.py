"""`retrain squeeze`, a file that is nothing but a squeeze, the cost of squeezing, and a job with its report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.plugins.missing import install_line
from retrain.squeeze import auto_squeeze, compress_adapter
from retrain.tools.squeeze import retrain_campaign_run_done, retrain_claim_config
from retrain.tools.squeeze.adapter import read_adapter
from retrain.tools.squeeze.command import measure
from retrain.tools.squeeze.job import run_job
from retrain.tools.squeeze.table import SqueezeTable
from tests.kit.problems import codes_in, refused

Make = Callable[..., Path]
Command = Callable[..., Any]
Factors = tuple[np.ndarray, np.ndarray]
pytest.importorskip("plotly")


@pytest.fixture
def adapter(make_adapter: Make, documented_factors: Factors) -> Path:
    return make_adapter({"q": documented_factors}, lora_alpha=8)


def test_a_folder(adapter: Path, command: Command, tmp_path: Path) -> None:
    result = command("squeeze", "adapter", "--squeeze-target-ranks", "2,3")
    assert result.code == 0, result.err
    assert "Source rank: 4\nLayers analyzed: 1\n" in result.out
    assert "     3     100.00    100.00    100.00       100.00  <--" in result.out
    assert "Recommended rank: 3 (>= 95% variance retained)" in result.out
    assert (tmp_path / "logs" / "squeeze" / "spectrum.html").is_file()
    assert not (tmp_path / "logs" / "train").exists()


def test_as_json_with_every_layer_and_compressed(adapter: Path, command: Command, tmp_path: Path) -> None:
    arguments = ("--json", "--report", "there", "--squeeze-output-path=out", "--squeeze-compress-to", "2")
    result = command("squeeze", str(adapter), *arguments)
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert data["recommended_rank"] == 4
    assert data["compressed"]["rank"] == 2
    assert len(data["layers"][0]["variance"]) == 4
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4.0
    assert (tmp_path / "there" / "spectrum.json").is_file()


def test_a_file_with_nothing_to_train_is_squeezed(adapter: Path, command: Command, tmp_path: Path) -> None:
    text = "[squeeze]\nadapter_path = 'adapter'\ntarget_ranks = [1, 3]\noutput_path = 'small'\n"
    (tmp_path / "squeeze.toml").write_text(text)
    result = command("squeeze.toml", "--squeeze-compress-to", "1")
    assert result.code == 0, result.err
    assert "Recommended rank: 3" in result.out
    assert "Compressed to rank 1 (alpha 2, " in result.out
    assert command("squeeze", "squeeze.toml", "--squeeze-compress-to", "2").code == 0
    explained = command("explain", "squeeze.toml", "--json")
    assert explained.code == 0, explained.err
    assert json.loads(explained.out) == {
        "mode": "squeeze",
        "config": "squeeze.toml",
        "adapter_path": "adapter",
        "source_rank": 4,
        "num_layers": 1,
        "tested_ranks": [1, 3],
        "min_variance_retention": 0.95,
        "device": "cpu",
        "output_path": "small",
        "compress_to": "(recommended rank)",
    }
    assert "mode " in command("explain", "squeeze.toml").out


def test_retrain_toml_without_a_name(adapter: Path, command: Command, tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text("[squeeze]\nadapter_path = 'adapter'\n")
    for arguments in ((), ("squeeze",), ("--squeeze-min-variance-retention", "0.8")):
        result = command(*arguments)
        assert result.code == 0, result.err
        assert "Recommended rank: " in result.out


def test_a_training_file_means_the_adapter_of_its_run(
    make_adapter: Make, documented_factors: Factors, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "train.toml").write_text("[logging]\nlog_dir = 'logs/mine'\n[training]\nlr = 1e-4\n")
    folder = make_adapter({"q": documented_factors}, "logs/mine/adapter/final")
    (folder / "checkpoint.json").write_text('{"next_step": 3, "progress": {"unfinished": null}}')
    result = command("squeeze", "train.toml")
    assert result.code == 0, result.err
    assert "LoRA-Squeeze: logs/mine/adapter/final" in result.out


@pytest.mark.parametrize(
    ("document", "is_claimed"),
    [
        ({"squeeze": {"adapter_path": "a"}, "logging": {}, "model": {}}, True),
        *(({"squeeze": {"adapter_path": "a"}, other: {}}, False) for other in ("training", "algorithm", "campaign")),
        ({"squeeze": {"min_variance_retention": 0.9}}, False),
        ({"squeeze": {"adapter_path": ""}}, False),
        ({"squeeze": 3}, False),
        ({}, False),
    ],
)
def test_which_files_are_claimed(document: dict[str, Any], is_claimed: bool) -> None:
    assert (retrain_claim_config(document) is not None) is is_claimed


ADAPTER = ("squeeze", "adapter")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("squeeze", "nowhere"), "", "nowhere: "),
        (("squeeze", "missing.toml"), "", "missing.toml: "),
        ((*ADAPTER, "--squeeze-target-ranks", "0"), "", "target_ranks"),
        ((*ADAPTER, "--squeeze-target-ranks", "two"), "", "target_ranks"),
        ((*ADAPTER, "--squeeze-device", "tpu"), "", "[squeeze] device"),
        ((*ADAPTER, "--squeeze-source-rank", "8"), "squeeze.source-rank", "adapter: "),
        ((*ADAPTER, "--squeeze-min-variance-retention", "95"), "", "min_variance_retention"),
        ((*ADAPTER, "--squeeze-compres-to", "2"), "", "--squeeze-compress-to"),
        ((*ADAPTER, "second"), "", "'second'"),
        (("squeeze",), "", "retrain.toml: "),
        (("squeeze", "--lr", "1e-4"), "squeeze.no-adapter", ""),
        ((*ADAPTER, "--eval"), "squeeze.no-run", "adapter: "),
        ((*ADAPTER, "--squeeze-output-path", "adapter"), "squeeze.output-taken", "adapter: "),
        (("squeeze", "tinker://run/weights"), "squeeze.remote-adapter", install_line("retrain-tinker")),
    ],
)
def test_what_cannot_be_done_is_a_usage_error(
    arguments: tuple[str, ...],
    code: str,
    named: str,
    adapter: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-tinker")
    result = command(*arguments)
    assert (result.code, named in result.err, code in ["", *codes_in(result.err)]) == (2, True, True), result.err


def test_in_a_campaign_the_first_run_is_squeezed(
    make_adapter: Make, documented_factors: Factors, tmp_path: Path, load: Callable[..., Any]
) -> None:
    run = tmp_path / "campaign" / "runs" / "grpo+none_s1"
    folder = make_adapter({"q": documented_factors}, "campaign/runs/grpo+none_s1/adapter/final")
    (folder / "checkpoint.json").write_text('{"next_step": 3, "progress": {"unfinished": null}}')
    (run / "run.json").write_text(json.dumps({"seed": 1, "started": "now", "config": {"backend": {}}}))
    config, problems = load("[squeeze]\nmin_variance_retention = 0.8\n")
    assert not problems
    asked = {"config": config, "run": run, "campaign": tmp_path / "campaign"}
    with_table, without = frozenset({"squeeze", "campaign"}), frozenset({"campaign"})
    assert retrain_campaign_run_done(**asked, tables=without, is_first=True) is None
    assert retrain_campaign_run_done(**asked, tables=with_table, is_first=False) is None
    found = retrain_campaign_run_done(**asked, tables=with_table, is_first=True)
    assert found is not None
    assert found["squeeze"]["recommended_rank"] == 2
    assert (tmp_path / "campaign" / "squeeze" / "spectrum.json").is_file()


Random = Callable[..., tuple[np.ndarray, np.ndarray]]


def test_a_squeezed_policy_is_evaluated_at_source_rank(
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


def test_a_campaign_gets_the_recommendation_and_the_console_the_framed_table(
    make_adapter: Make, documented_factors: Factors, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_adapter({"q": documented_factors})
    with caplog.at_level(logging.INFO, "retrain"):
        data = auto_squeeze(folder, SqueezeTable(target_ranks=[2, 3]), tmp_path / "campaign")
    assert data["recommended_rank"] == 3
    assert (data["source_rank"], data["num_layers"], data["adapter"]) == (4, 1, str(folder))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    lines = [record.getMessage() for record in caplog.records]
    assert (lines[0], lines.count("=" * 60)) == ("=" * 60, 2)
    assert "Recommended rank: 3 (>= 95% variance retained)" in lines
    report = tmp_path / "campaign" / "squeeze"
    assert data["report"] == str(report)
    assert lines[-1] == f"Spectrum: {report / 'spectrum.html'}"
    spectrum = json.loads((report / "spectrum.json").read_text())
    assert [layer["module"] for layer in spectrum["layers"]] == ["q"]
    assert spectrum["layers"][0]["singular_values"] == pytest.approx([4.215848, 3.174673, 2.031152, 0], abs=5e-7)


@pytest.mark.parametrize(("compress_to", "rank"), [(0, 4), (2, 2), (100, 4)])
def test_an_output_path_compresses(
    compress_to: int, rank: int, make_adapter: Make, documented_factors: Factors, tmp_path: Path
) -> None:
    settings = SqueezeTable(output_path=str(tmp_path / "out"), compress_to=compress_to)
    result = run_job(make_adapter({"q": documented_factors}), settings, tmp_path / "report")
    assert result.compressed is not None
    assert result.compressed.rank == rank
    assert result.as_data()["compressed"]["path"] == str(tmp_path / "out")
    assert any(line.startswith(f"Compressed to rank {rank} ") for line in result.lines())


def test_a_job_that_cannot_be_done_is_refused_and_writes_no_adapter(
    make_adapter: Make, documented_factors: Factors, idle_layer: Factors, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    settings = SqueezeTable(output_path=str(tmp_path / "out"), target_ranks=[1])
    for layer, report, code in (
        (documented_factors, "report", "squeeze.no-rank"),
        (idle_layer, "report", "squeeze.no-rank"),
        (documented_factors, "file/report", "squeeze.unwritable"),
    ):
        folder = make_adapter({"q": layer}, f"{code}{report}{layer[1].any()}")
        assert refused(run_job, folder, settings, tmp_path / report) == [code]
    assert not (tmp_path / "out").exists()


def test_a_fault_of_wandb_is_told_and_the_analysis_stands(
    make_adapter: Make,
    documented_factors: Factors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text("raise OSError('the disk is on fire')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(__import__("sys").modules, "wandb", raising=False)
    table = {"wandb_project": "demo"}
    result = run_job(make_adapter({"q": documented_factors}), SqueezeTable(), tmp_path / "report", wandb=table)
    assert result.analysis.recommended_rank == 4
    assert "The squeeze analysis is not in wandb: OSError: the disk is on fire" in caplog.text
