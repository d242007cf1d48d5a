"""`retrain squeeze`, a file that is nothing but a squeeze, the cost of squeezing; the report, its page and wandb."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.plugins.missing import install_line
from retrain.squeeze import analyze_adapter, compress_adapter
from retrain.tools.squeeze import retrain_campaign_run_done, retrain_claim_config
from retrain.tools.squeeze.adapter import read_adapter
from retrain.tools.squeeze.command import measure
from retrain.tools.squeeze.job import run_job
from retrain.tools.squeeze.spectrum_pages import spectrum_plots, write_plot
from retrain.tools.squeeze.table import SqueezeTable
from tests.kit.browser import dom_of, needs_chromium
from tests.kit.problems import codes_in, refused
from tests.kit.wandb_log import read_runs

Make = Callable[..., Path]
Command = Callable[..., Any]
Factors = tuple[np.ndarray, np.ndarray]
Random = Callable[..., Factors]
pytest.importorskip("plotly")


@pytest.fixture
def adapter(make_adapter: Make, documented_factors: Factors) -> Path:
    return make_adapter({"q": documented_factors}, lora_alpha=8)


def test_a_folder_is_told_and_given_as_json_with_every_layer(adapter: Path, command: Command, tmp_path: Path) -> None:
    result = command("squeeze", "adapter", "--squeeze-target-ranks", "2,3")
    assert (result.code, "Recommended rank: 3 (>= 95% variance retained)" in result.out) == (0, True), result.err
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["squeeze"]
    assert (tmp_path / "logs/squeeze/spectrum.html").is_file()
    arguments = ("--json", "--report", "there", "--squeeze-output-path=out", "--squeeze-compress-to", "2")
    result = command("squeeze", str(adapter), *arguments)
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert (data["recommended_rank"], data["compressed"]["rank"]) == (4, 2)
    assert [row["recommended"] for row in data["ranks"]] == [False, False, True]
    assert data["layers"][0]["variance"] == pytest.approx([0.555809, 0.870985, 1, 1], abs=5e-7)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 4.0
    assert (tmp_path / "there" / "spectrum.json").is_file()


def test_a_file_with_nothing_to_train_is_squeezed(adapter: Path, command: Command, tmp_path: Path) -> None:
    text = "[squeeze]\nadapter_path = 'adapter'\ntarget_ranks = [1, 3]\noutput_path = 'small'\n"
    (tmp_path / "squeeze.toml").write_text(text)
    result = command("squeeze.toml", "--squeeze-compress-to", "1")
    assert result.code == 0, result.err
    assert [part for part in ("Recommended rank: 3", "Compressed to rank 1 (alpha 2, ") if part not in result.out] == []
    assert command("squeeze", "squeeze.toml", "--squeeze-compress-to", "2").code == 0
    explained = command("explain", "squeeze.toml", "--json")
    found = {"source_rank": 4, "num_layers": 1, "tested_ranks": [1, 3], "min_variance_retention": 0.95}
    chosen = {"device": "cpu", "output_path": "small", "compress_to": "(recommended rank)"}
    place = {"mode": "squeeze", "config": "squeeze.toml", "adapter_path": "adapter"}
    assert json.loads(explained.out) == place | found | chosen
    (tmp_path / "squeeze.toml").rename(tmp_path / "retrain.toml")
    largest = ("squeeze", "--squeeze-compress-to", "100")
    for rank, arguments in ((3, ()), (4, largest), (3, ("--squeeze-min-variance-retention", "0.9"))):
        result = command(*arguments)
        assert (result.code, f"Compressed to rank {rank} " in result.out) == (0, True), result.err


def test_a_training_file_means_its_newest_adapter(make_adapter: Make, random_factors: Random, command: Command) -> None:
    for step in (5, 20):
        folder = make_adapter({"q": random_factors(step)}, f"logs/mine/adapter/checkpoint_step_{step}")
        checkpoint = {"next_step": step, "progress": {"unfinished": None}}
        (folder / "checkpoint.json").write_text(json.dumps(checkpoint))
    Path("train.toml").write_text("[logging]\nlog_dir = 'logs/mine'\n[training]\nlr = 1e-4\n")
    for place in ("train.toml", "logs/mine", "logs/mine/adapter"):
        assert "LoRA-Squeeze: logs/mine/adapter/checkpoint_step_20" in command("squeeze", place).out


def test_which_files_are_claimed() -> None:
    own = {"squeeze": {"adapter_path": "a"}}
    assert retrain_claim_config({**own, "logging": {}, "model": {}}) is not None
    others = [{**own, other: {}} for other in ("training", "algorithm", "campaign")]
    values = [{"squeeze": value} for value in ({"min_variance_retention": 0.9}, {"adapter_path": ""}, 3)]
    assert [retrain_claim_config(document) for document in (*others, *values, {})] == [None] * 7


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
    arguments: tuple[str, ...], code: str, named: str, adapter: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-tinker")
    result = command(*arguments)
    assert (result.code, named in result.err, code in ["", *codes_in(result.err)]) == (2, True, True), result.err


def test_a_campaign_squeezes_its_first_run(
    make_adapter: Make, documented_factors: Factors, tmp_path: Path, load: Command, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "retrain")
    run, report = tmp_path / "campaign" / "runs" / "grpo+none_s1", tmp_path / "campaign" / "squeeze"
    folder = make_adapter({"q": documented_factors}, "campaign/runs/grpo+none_s1/adapter/final")
    (folder / "checkpoint.json").write_text('{"next_step": 3, "progress": {"unfinished": null}}')
    (run / "run.json").write_text(json.dumps({"seed": 1, "started": "now", "config": {"backend": {}}}))
    config, _ = load("[squeeze]\ntarget_ranks = [2, 3]\n")
    asked = {"config": config, "run": run, "campaign": tmp_path / "campaign"}
    with_table, without = frozenset({"squeeze", "campaign"}), frozenset({"campaign"})
    assert retrain_campaign_run_done(**asked, tables=without, is_first=True) is None
    assert retrain_campaign_run_done(**asked, tables=with_table, is_first=False) is None
    found = retrain_campaign_run_done(**asked, tables=with_table, is_first=True)
    assert found is not None
    place = {"adapter": str(folder), "report": str(report)}
    assert found["squeeze"].items() >= {**place, "recommended_rank": 3, "source_rank": 4, "num_layers": 1}.items()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    lines = caplog.messages
    assert (lines[0], lines.count("=" * 60), lines[-1]) == ("=" * 60, 2, f"Spectrum: {report / 'spectrum.html'}")
    assert "Recommended rank: 3 (>= 95% variance retained)" in lines
    (layer,) = json.loads((report / "spectrum.json").read_text())["layers"]
    assert layer["module"] == "q"
    assert layer["singular_values"] == pytest.approx([4.215848, 3.174673, 2.031152, 0], abs=5e-7)


def test_a_squeezed_policy_is_evaluated_at_its_rank(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
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


@pytest.mark.long
def test_a_run_of_the_embedded_model(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert command("init", "--template", "tiny").code == 0
    small = ("--seed", "1", "--batch-size", "4", "--group-size", "4", "--save-every", "0", "--max-steps", "3")
    result = command(*small, "--eval-examples", "8", "--eval-samples", "2", "--log-dir", "logs/tiny")
    assert result.code == 0, result.err
    tiny_run = tmp_path / "logs" / "tiny"
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
    none = command("squeeze", "logs/tiny", "--eval", "--eval-examples", "0")
    assert (none.code, "held out no examples" in none.err) == (2, True)


def test_a_refused_job(make_adapter: Make, documented_factors: Factors, idle_layer: Factors, tmp_path: Path) -> None:
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
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "site" / "wandb").mkdir(parents=True)
    (tmp_path / "site" / "wandb" / "__init__.py").write_text("raise OSError('the disk is on fire')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    result = run_job(adapter, SqueezeTable(), tmp_path / "report", wandb={"wandb_project": "demo"})
    assert result.analysis.recommended_rank == 4
    assert "The squeeze analysis is not in wandb: OSError: the disk is on fire" in caplog.text


EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>.q_proj"


def test_the_figure_has_every_layer_and_the_means(make_adapter: Make, random_factors: Random) -> None:
    layers = {f"layers.{i}.{kind}_proj": random_factors(i, rank=16) for i in range(3) for kind in "qv"}
    analysis = analyze_adapter(make_adapter(layers))
    kept, needed = (plot.figure for plot in spectrum_plots(analysis))
    lines = {line["name"]: line["y"] for line in kept["lines"]}
    assert set(lines) == {"mean of layers", "weighted by energy", "least"}
    assert lines["mean of layers"] == [row.mean_variance for row in analysis.rows]
    assert len(kept["thin"]) == len(layers)
    assert needed["labels"] == [layer.module for layer in analysis.layers]
    assert needed["points"] == [layer.rank_needed for layer in analysis.layers]
    assert set(needed["kinds"]) == {"q_proj", "v_proj"}


def test_page_is_self_contained_and_names_are_text(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    analysis = analyze_adapter(make_adapter({EVIL: random_factors(0), "b\x1b": random_factors(1)}))
    write_plot(analysis, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert [acting for acting in ("document.title='owned'</script>", "<img src=x", "\x1b") if acting in page] == []
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert len(page) < 8_000_000
    assert f"Rank {analysis.recommended_rank} of 4 keeps" in page


@pytest.mark.parametrize("targets", [[], [1]])
def test_without_a_recommendation(targets: list[int], make_adapter: Make, random_factors: Random, tmp_path: Path):
    layers = {"a": random_factors(0) if targets else (np.ones((4, 4)), np.zeros((4, 4)))}
    write_plot(analyze_adapter(make_adapter(layers), target_ranks=targets), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert ("No tested rank below 4 keeps 95 %" if targets else "learned no update") in page


@pytest.mark.long
@needs_chromium
def test_a_browser_draws_it(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    write_plot(analyze_adapter(make_adapter({EVIL: random_factors(0)})), tmp_path / "page.html")
    dom = dom_of((tmp_path / "page.html").read_text("utf-8"))
    assert "<title>Spectrum of adapter · retrain squeeze</title>" in dom
    assert 'data-plots="ready"' in dom


SECRET = "planted-secret-4711"
PROGRAM = """
import sys
from pathlib import Path
from retrain.squeeze import analyze_adapter
from retrain.tools.squeeze.job import record_analysis

table = {"wandb_project": sys.argv[3], "wandb_group": "mine", "wandb_tags": "first, second"}
print("id:", record_analysis(analyze_adapter(sys.argv[1]), table, Path(sys.argv[2])))
"""


def record(adapter: Path, folder: Path, project: str, **environ: str) -> str:
    """Record in a process of its own: wandb reads its settings once per process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-c", PROGRAM, str(adapter), str(folder), project]
    environ = {**clean, "WANDB_MODE": "offline", **environ}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.rpartition("id:")[2].strip()


@pytest.mark.slow
def test_the_run_its_table_and_its_summary(make_adapter: Make, documented_factors: Factors, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_id = record(make_adapter({"q": documented_factors}), tmp_path, "demo", MY_API_KEY=SECRET)
    (found,) = read_runs(tmp_path)
    run, rows, summary = found.proto, list(found.rows.values()), found.summary
    assert (run.run_id, run.display_name, run.project, run.job_type) == (run_id, "squeeze-analysis", "demo", "squeeze")
    assert (run.run_group, list(run.tags)) == ("mine", ["first", "second", "squeeze", "rank-4"])
    steps = [row for row in rows if "squeeze/mean_variance" in row]
    assert [row["squeeze/rank"] for row in steps] == [1, 2, 4]
    for name in ("mean", "min", "max"):
        values = [row[f"squeeze/{name}_variance"] for row in steps]
        assert values == pytest.approx([0.555809, 0.870985, 1.0], abs=5e-7)
    wanted = {"recommended_rank": 4, "source_rank": 4, "min_variance_retention": 0.95, "num_layers": 1}
    assert {name: summary[f"squeeze/{name}"] for name in wanted} == wanted
    (table,) = tmp_path.glob("wandb/*run-*/files/media/table/squeeze/variance_table_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["rank", "mean_variance", "min_variance", "max_variance", "recommended"]
    assert [(row[0], row[-1]) for row in content["data"]] == [(1, False), (2, False), (4, True)]
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.mark.slow
@pytest.mark.long
def test_no_project_records_nothing_and_no_key_keeps_it_offline(adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert record(adapter, tmp_path, "") == ""
    assert not (tmp_path / "wandb").exists()
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    assert record(adapter, tmp_path, "demo", WANDB_MODE="online", **home)
    (run,) = read_runs(tmp_path)
    assert (run.proto.display_name, bool(run.rows)) == ("squeeze-analysis", True)
