"""`retrain squeeze`, a file that is nothing but a squeeze, and `retrain explain` of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.plugins.missing import install_line
from retrain.tools.squeeze import retrain_campaign_run_done, retrain_claim_config
from tests.kit.problems import codes_in

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
