"""A whole job: report, wandb, compression, and what a campaign gets."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.squeeze import auto_squeeze
from retrain.tools.squeeze.job import run_job
from retrain.tools.squeeze.table import SqueezeTable
from tests.kit.problems import codes_in

pytest.importorskip("plotly")
Make = Callable[..., Path]
Factors = tuple[np.ndarray, np.ndarray]


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
        with pytest.raises(ConfigError) as caught:
            run_job(make_adapter({"q": layer}, f"{code}{report}{layer[1].any()}"), settings, tmp_path / report)
        assert codes_in(caught) == [code]
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
