"""Benchmarks: every command runs and leaves JSON and a table, their figures are right, and a missed claim fails."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMANDS = {
    "step": ["step.py", "--quick", "--only", "retrain"],
    "account": ["step.py", "--account", "--quick"],
    "startup": ["startup.py", "--quick", "--alone"],
    "sample": ["sample.py", "--quick"],
    "train": ["train.py", "--quick"],
    "vocabulary": ["train.py", "--quick", "--vocabulary", "1", "2"],
    "scale": ["scale.py", "--quick"],
    "steps": ["scale.py", "--quick", "--only", "steps"],
    "gpu": ["gpu.py", "--device", "cpu", "--parts", "rates", "decode", "train tiny", "step", "generate", "16 GB"],
}
LARGE = [
    ["campaign_scale.py", "--runs", "16", "--planned", "16", "--json"],
    ["report_scale.py", "--runs", "16", "--steps", "20", "--completions", "12800", "--json"],
]
PEER = "RETRAIN_TRL_PYTHON"  # an interpreter that has TRL


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a module of `benchmarks` as its command sees it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def harness(benchmarks: Any) -> Any:
    return lambda name: benchmarks(f"harness.{name}")


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("arguments", LARGE, ids=lambda arguments: arguments[0])
def test_figures_of_many_records_are_json(arguments: list[str]) -> None:
    assert all(json.loads(run(*arguments)).values())


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_leaves_json_and_a_table(name: str, tmp_path: Path) -> None:
    document, page = tmp_path / "figures.json", tmp_path / "page.md"
    page.write_text(f"# Page\n\n<!-- benchmark: {name} -->\nold\n<!-- end of benchmark -->\n\nAfter.\n")
    folder = ["--folder", str(tmp_path / "models")] if name == "gpu" else []
    printed = run(*COMMANDS[name], *folder, "--json", str(document), "--markdown", str(page))
    figures = json.loads(document.read_text())
    assert figures["benchmark"] == name
    assert figures["versions"]["torch"]
    text = page.read_text()
    assert text.startswith("# Page\n")
    assert text.endswith("<!-- end of benchmark -->\n\nAfter.\n")
    assert "old" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) >= 3
    assert len({line.count("|") for line in table}) == 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_recipes_are_measured_at_their_own_rates_and_put_into_their_pages(tmp_path: Path) -> None:
    page = tmp_path / "group-advantages.md"
    page.write_text("# Page\n\n<!-- benchmark: recipes gdpo -->\n<!-- end of benchmark -->\n", encoding="utf-8")
    command = ["recipes.py", str(tmp_path / "book"), "--task", "rewards", "--quick", "--pages", str(tmp_path)]
    printed = run(*command).splitlines()
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert [row.split(" | ")[0] for row in rows] == ["| `grpo`", "| `gdpo`"]
    assert rows == [line for line in printed if line.startswith("| `")]
    assert "cannot tell" in rows[1]  # two seeds can never give a verdict
    chosen = {file.name for file in (tmp_path / "book/rewards/seeds/runs").iterdir()}
    assert len(chosen) == 4
    assert [line for line in run(*command).splitlines() if line.startswith("| `")] == rows  # nothing is run again


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(PEER not in os.environ, reason=f"{PEER} names no interpreter with TRL")
@pytest.mark.parametrize("name", ["step", "startup"])
def test_side_by_side_with_trl(name: str, tmp_path: Path) -> None:
    document = tmp_path / "figures.json"
    run(f"{name}.py", "--quick", "--peer-python", os.environ[PEER], "--json", str(document))
    found = json.loads(document.read_text())["contenders"]
    assert {"retrain", "TRL"} <= set(found)
    assert found["TRL"]["ratio"]["median"] > 0
    if name == "step":  # completions without an end have the same length on both sides
        assert found["TRL"]["tokens_per_completion"] == found["retrain"]["tokens_per_completion"] == 8


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(PEER not in os.environ, reason=f"{PEER} names no interpreter with TRL")
def test_a_tier_next_to_trl_and_generate(tmp_path: Path) -> None:
    document = tmp_path / "figures.json"
    run("tiers.py", "--quick", "--only", "qwen3", "--peer-python", os.environ[PEER], "--json", str(document))
    (found,) = json.loads(document.read_text())["types"].values()
    assert found["of_peer"]["median"] > 0
    assert found["of_generate"]["median"] > 0


def test_exponents_ratios_and_the_choice_of_contenders(harness: Any) -> None:
    growth, ratios, chosen = harness("figures").growth, harness("figures").ratios, harness("rounds").chosen
    xs = [1.0, 10.0, 100.0, 1000.0]
    exact = growth(xs, [3 * x**1.5 for x in xs])
    assert exact.exponent == pytest.approx(1.5)
    assert exact.high - exact.low == pytest.approx(0, abs=1e-6)
    assert growth(xs, [2.0, 23.0, 170.0, 2200.0]).low < 1 < growth(xs, [2.0, 23.0, 170.0, 2200.0]).high
    found = ratios([[1.0, 1.0, 9.0], [2.0, 2.0]], [[2.0, 2.0, 2.0], [4.0, 5.0]])
    assert (found.median, found.count) == (pytest.approx((2.0 + 2.25) / 2), 2)
    assert ratios(None, [[1.0]]) is None
    names = ("retrain", "retrain, 1 thread", "TRL", "TRL, 1 thread")
    assert chosen(["retrain", "1 thr"], names) == ["retrain", "retrain, 1 thread", "TRL, 1 thread"]


def test_watching_sees_lines_memory_and_failure_and_threads_are_not_inherited(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import time; f = open('lines.jsonl', 'w', buffering=1)\n"
        "f.write('{\"a\": 1}\\n'); time.sleep(0.3)\n"
        "b = bytearray(200_000_000); b[::4096] = b'x' * len(b[::4096])\n"
        "f.write('{\"a\": 2}\\n{\"a\"'); f.write(': 3}\\n')\n"
    )
    watch, failed = harness("processes").watch, harness("processes").Failed
    seen = watch([sys.executable, "-c", script], folder=tmp_path / "good", lines="lines.jsonl")
    assert [record["a"] for record in seen.records] == [1, 2, 3]
    assert 0 < seen.seen_s[0] < seen.seen_s[1] <= seen.seen_s[2] <= seen.wall_s
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 200_000_000 < seen.peak_bytes < max(400_000_000, 1.2 * ours)  # a child begins as a copy of its parent
    assert seen.tree_bytes is None or seen.tree_bytes >= seen.peak_bytes
    with pytest.raises(failed, match="exit code 3"):
        watch([sys.executable, "-c", "import sys; sys.exit(3)"], folder=tmp_path / "bad", lines="lines.jsonl")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    tell = "import json, os; print(json.dumps({'n': os.environ.get('OMP_NUM_THREADS')}), file=open('l.jsonl', 'w'))"
    for given in (None, "1"):
        more = {"environ": {"OMP_NUM_THREADS": given}} if given else {}
        command = [sys.executable, "-c", tell]
        assert watch(command, folder=tmp_path / str(given), lines="l.jsonl", **more).records[0]["n"] == given


def test_one_that_fails_does_not_end_the_others(
    harness: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its row says why, it is not started again, and the exit code is 1 after everything has been written."""
    rounds, report = harness("rounds"), harness("report")
    programs = {
        "good": "open('l.jsonl', 'w').write('{}\\n')",
        "bad": "import sys; open('../starts', 'a').write('x'); sys.exit('no | room')",
        "short": "open('l.jsonl', 'w')",
    }
    contenders = [
        rounds.Contender(name=name, command=[sys.executable, "-c", text], lines="l.jsonl", count=1)
        for name, text in programs.items()
    ]
    done = rounds.run_rounds(contenders, 2, tmp_path, "cpu")
    assert {name: len(runs) for name, runs in done.runs.items()} == {"good": 2}
    assert (tmp_path / "starts").read_text() == "x"
    assert done.failures["bad"] == "exit code 1: no | room"
    assert "0 of 1 records" in done.failures["short"]
    machine = {"versions": {}, "card": "a", "date": "d", "commit": "c", "load_at_start": 0.0}
    made = report.Report(
        name="n", columns=("", "x", "y"), rows=[("good", "1", "2")], notes=("", "end"), figures={}, machine=machine,
        failures=done.failures,
    )  # fmt: skip
    options = argparse.Namespace(json=tmp_path / "figures.json", markdown=tmp_path / "page.md")
    with pytest.raises(SystemExit, match="bad, short"):
        made.publish(options)
    assert "| bad | failed: exit code 1: no / room | - |" in capsys.readouterr().out
    assert set(json.loads(options.json.read_text())["failures"]) == {"bad", "short"}
    assert "good" in options.markdown.read_text()


def test_a_place_on_this_machine_is_not_published(harness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/home/somebody/benchmarks/step.py", "--model", "/home/somebody/Small", "--peer-python", "/home/python"]
    monkeypatch.setattr(sys, "argv", [*command, "--new", "4"])
    assert harness("report").command_line() == "python benchmarks/step.py --model Small --new 4"
    options = argparse.Namespace(model="/home/somebody/Small", peer_python="/home/python", new=4)
    assert harness("report").settings(options) == {"model": "Small", "new": 4}


def test_the_limits_of_qwen3_4b(harness: Any) -> None:
    """The sizes that its authors give (3.6 billion outside the embedding), and bytes counted by hand."""
    limits, models = harness("limits"), harness("models")
    shape = limits.Shape.of(models.SHAPES["qwen3-4b"])
    assert shape.projections == pytest.approx(3.6e9, rel=0.02)
    assert shape.projections + shape.head == pytest.approx(4.02e9, rel=0.01)
    assert shape.adapter(32) == 66_060_288
    assert shape.kv_bytes(2) == 147_456
    one = limits.decode(shape, limits.Work(rows=1, group=1, prompt=10, new=1), 2)
    assert one.moved_bytes == 2 * (shape.projections + shape.head) + 11 * 147_456
    two = limits.decode(shape, limits.Work(rows=2, group=1, prompt=10, new=1), 2)
    assert two.moved_bytes - one.moved_bytes == 11 * 147_456  # weights are read once
    own = limits.training(shape, [(256, 1024)] * 16, 32, 2)
    shared = limits.training(shape, [(256, 1024)] * 16, 32, 2, groups=1)
    saved = 15 * (256 * (4 * shape.projections + 6 * shape.adapter(32)) + 3 * shape.attention * 256 * 257 / 2)
    assert own.operations - shared.operations == pytest.approx(saved)
    assert shape.layers * sum(inner * outer for inner, outer in shape.fused) == shape.projections  # fused or not
    work = (limits.Work(rows=4, group=group, prompt=10, new=2) for group in (1, 2, 4))
    moved = [limits.decode(shape, each, 2).moved_bytes for each in work]  # a shared prompt is read once per group
    assert moved[0] - moved[1] == 2 * (moved[1] - moved[2]) == 2 * 10 * 2 * shape.kv_bytes(2)


def test_a_model_without_an_end_keeps_weights_and_words_and_questions_have_their_length(
    harness: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    models = harness("models")
    base = models.builtin_folder()
    folder = models.endless_model(tmp_path / "model", model=str(base))
    assert (folder / "model.safetensors").samefile(base / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None
    mine, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(base)
    assert mine.eos_token_id == len(theirs) == 512  # no logit belongs to it
    assert mine.encode("What is 23 + 45?") == theirs.encode("What is 23 + 45?")
    assert models.prompt_tokens(folder) == 25
    for length in (25, 27, 200):
        asked = [task["prompt"] for task in harness("runs").questions(20, length)]
        assert len(set(asked)) == 20
        for question in asked:
            chat = [{"role": "user", "content": question}]
            ids = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
            assert len(ids["input_ids"]) == length


@pytest.mark.long
@pytest.mark.timeout(900)
def test_samplers_are_held_against_each_other_at_equal_tokens(tmp_path: Path) -> None:
    command = ["samplers.py", str(tmp_path / "book"), "--seeds", "1", "--steps", "6", "--each", "30"]
    printed = run(*command)
    rows = {row.split("`")[1]: row.split(" | ") for row in printed.splitlines() if row.startswith("| `")}
    assert list(rows) == ["uniform", "thompson"]
    assert rows["uniform"][1] == rows["thompson"][1]  # the tokens up to which they are compared
    assert float(printed.split("recomputed: ")[1].split()[0]) < 1e-12
    assert printed.count("eval_arithmetic_correct_rate") >= 2


@pytest.mark.parametrize(
    ("hits", "bounds", "is_met"),
    [
        (950, {"at_least": 0.95}, True),
        (938, {"at_least": 0.95}, True),  # two standard errors are 1.5 points
        (934, {"at_least": 0.95}, False),
        (985, {"at_least": 0.94, "at_most": 0.975}, False),
        (60, {"at_most": 0.055}, True),
        (75, {"at_most": 0.055}, False),
        (75, {}, True),
    ],
)
def test_a_share_may_be_two_standard_errors_off(
    benchmarks: Any, hits: int, bounds: dict[str, float], is_met: bool
) -> None:
    claim = benchmarks("claims.claim")
    measured = claim.share("x", np.arange(1000) < hits, **bounds)
    assert measured.is_met is is_met
    assert measured.error == pytest.approx(2 * math.sqrt(hits / 1000 * (1 - hits / 1000) / 1000))


def test_means_have_the_error_of_a_mean_and_nan_is_a_miss(benchmarks: Any) -> None:
    claim = benchmarks("claims.claim")
    measured = claim.mean("x", np.array([10.0, 12.0, 11.0, 13.0]), at_most=11.0)
    assert (measured.figure, measured.is_met) == (11.5, True)
    assert measured.error == pytest.approx(2 * math.sqrt(5 / 3) / 2)
    assert not claim.mean("x", np.array([math.nan, 1.0])).is_met


def test_every_claim_is_found_and_a_miss_is_the_exit_code(
    benchmarks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence, claim = benchmarks("evidence"), benchmarks("claims.claim")
    known = evidence.all_claims()
    assert {"flip-coverage", "binomial-coverage", "false-verdicts", "disagreements"} <= set(known)
    assert evidence.main(["--only", "disagreements", "--simulations", "5"]) == 0
    assert "| 0.00 % | 0.00 % | at most 0.00 % | yes |" in capsys.readouterr().out

    def missing(simulations: int, seeds: Any) -> Iterator[Any]:
        yield claim.share("never", np.zeros(simulations, dtype=bool), at_least=0.5)

    monkeypatch.setattr(evidence, "all_claims", lambda: {"missing": missing})
    assert evidence.main(["--simulations", "10"]) == 1
    assert "| never | 0.00 % | 0.00 % | at least 50.00 % | NO |" in capsys.readouterr().out
