"""`retrain status`, through the command line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from retrain.inspect.status_command import picture
from retrain.records.files import RunLock
from retrain.records.runs.campaign_status import scan
from tests.kit.made_runs import write_campaign

Command = Callable[..., Any]
Make = Callable[..., Path]
DAY_S = 24 * 3600.0
RUN_FIELDS = (
    *("path", "condition", "step", "max_steps", "correct_rate", "loss", "mean_reward", "wall_time_s", "completed"),
    *("stale", "pid", "alive", "trainer"),
)


@pytest.fixture
def status(command: Command) -> Callable[..., dict[str, Any]]:
    """`status("--all")`: the JSON of `retrain status`, which must be all that is printed."""

    def call(*arguments: str) -> dict[str, Any]:
        result = command("status", "--json", *arguments)
        assert (result.code, result.err) == (0, "")
        content: dict[str, Any] = json.loads(result.out, parse_constant=pytest.fail)
        return content

    return call


def test_a_missing_folder_is_exit_code_1(command: Command) -> None:
    for arguments in (["status"], ["status", "--json"], ["top"]):
        result = command(*arguments)
        assert (result.code, result.out) == (1, "")
        assert "logs: no such folder" in result.err


def test_an_empty_folder_has_nothing(command: Command, status: Command, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert status() == {"root": "logs", "runs": [], "campaigns": [], "hidden": 0}
    assert command("status").out == "Campaigns: 0 | Runs: 0\n"


def test_a_real_run_has_every_field(toy_run: Make, status: Command, command: Command) -> None:
    folder = toy_run("logs/toy", "--eval-examples", "2")
    [run] = status()["runs"]
    assert set(RUN_FIELDS) <= set(run)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert (run["path"], run["condition"], run["step"], run["max_steps"]) == ("logs/toy", "grpo+toy_flat", 4, 4)
    assert {name: run[name] for name in ("correct_rate", "loss", "mean_reward")} == {
        name: last[name] for name in ("correct_rate", "loss", "mean_reward")
    }
    assert (run["completed"], run["stale"], run["alive"], run["trainer"]) == (True, False, False, "retrain")
    assert run["pid"] == os.getpid()
    shown = command("status")
    assert shown.code == 0
    assert "Campaigns: 0 | Runs: 1" in shown.out
    [row] = [line.split() for line in shown.out.splitlines() if line.startswith("toy")]
    assert row[1:3] == ["done", "4/4"]


def test_the_held_out_rate_is_of_the_last_evaluation(make_run: Make, status: Command, command: Command) -> None:
    folder = make_run("logs/one")
    lines = [
        {"step": -1, "eval_correct_rate": 0.125},
        {"step": 0, "correct_rate": 0.5, "eval_correct_rate": 0.375},
        {"step": 1, "correct_rate": 0.5, "condition": "eval_correct_rate"},
    ]
    written = "".join(json.dumps(line) + "\n" for line in lines)
    for text, rate, after in ((written, 0.375, 1), ("", None, None)):
        (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
        [run] = status()["runs"]
        assert (run["held_out_rate"], run["held_out_step"]) == (rate, after)
        assert ("37.5%" in command("status").out) == (rate is not None)


def test_a_campaign_shows_the_held_out_rate_of_each_run(status: Command, tmp_path: Path) -> None:
    write_campaign(tmp_path / "logs" / "c", {"maxrl+none": 0.1, "grpo+none": 0.0}, seeds=(1, 2), steps=30)
    runs = status("--all")["campaigns"][0]["runs"]
    assert len(runs) == 4
    assert all(0 <= run["held_out_rate"] <= 1 and run["held_out_step"] for run in runs)
    console = Console(file=io.StringIO(), width=200)
    console.print(picture(scan(tmp_path / "logs"), 200))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"✓ {100 * run['held_out_rate']:.1f}%" in text for run in runs)


def test_a_live_run_is_running_then_stale_then_dead(
    make_run: Make, status: Command, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = make_run("logs/live", status="running", pid=sleeper.pid)

    def seen() -> tuple[str, bool, bool, bool]:
        [run] = status()["runs"]
        return run["status"], run["alive"], run["stale"], run["completed"]

    assert seen() == ("running", True, False, False)
    for file in ("run.json", "metrics.jsonl"):
        os.utime(folder / file, (time.time() - 301,) * 2)
    assert seen() == ("stale", True, True, False)
    sleeper.kill()
    while sleeper.returncode is None and Path(f"/proc/{sleeper.pid}").exists():
        if Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # ended, but nobody has collected it
    else:
        sleeper.wait()
    assert seen() == ("dead", False, False, False)


def test_a_live_run_says_what_it_is_doing(
    make_run: Make, status: Command, command: Command, sleeper: subprocess.Popen[bytes]
) -> None:
    folder = make_run("logs/live", status="running", pid=sleeper.pid)
    progress = {"unit": "packs", "done": 3, "total": 12, "tokens": 4000, "tokens_per_s": 500.0, "time_left_s": 24.0}
    beat = {"pid": sleeper.pid, "step": 3, "phase": "training", "phase_elapsed_s": 8.0, "progress": progress}

    def shown(text: str) -> tuple[dict[str, Any], str]:
        (folder / "heartbeat.json").write_text(text, encoding="utf-8")
        [run] = status()["runs"]
        lines = command("status").out.splitlines()
        return run, next((line for line in lines if line.startswith("live: ")), "")

    run, line = shown(json.dumps(beat))
    assert (run["phase"], run["phase_step"], run["phase_elapsed_s"]) == ("training", 3, 8.0)
    assert run["progress"] == progress
    assert line == "live: training, step 3, for 8.0 s: 3/12 packs, 4,000 tokens, 500 tokens/s, about 24 s left"
    _, line = shown(json.dumps(beat | {"step": -1, "phase": "eval", "progress": {}}))
    assert line == "live: eval, before training, for 8.0 s"
    for text in ("", "[]", '{"phase": 3}', json.dumps(beat | {"pid": 1}), json.dumps(beat)[:-1]):
        run, line = shown(text)
        assert (run["status"], run["phase"], run["progress"], line) == ("running", "", {}, "")
    odd = {
        "phase": "\x1b[2J",
        "step": 10**30,
        "phase_elapsed_s": 1e300,
        "progress": {"unit": "\x07", "done": 1, "total": 2},
    }
    _, line = shown(json.dumps(beat | odd))
    assert line.startswith("live: �[2J, step 1000000000000, for ")
    assert line.endswith(": 1/2 �")


def test_the_lock_of_the_folder_knows_better_than_the_process_id(
    make_run: Make, status: Command, sleeper: subprocess.Popen[bytes]
) -> None:
    held = make_run("logs/held", status="running")
    reused = make_run("logs/reused", status="running", pid=sleeper.pid)
    lock = RunLock(held)
    RunLock(reused).release()
    assert [run["status"] for run in status()["runs"]] == ["running", "dead"]
    lock.release()
    assert [run["status"] for run in status()["runs"]] == ["dead", "dead"]


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_run_that_ended_says_how(make_run: Make, status: Command, command: Command, state: str) -> None:
    make_run(
        "logs/a", status=state, pid=os.getpid(), **({"error": "RewardError: \x1b[31mdown"} if state == "failed" else {})
    )
    [run] = status()["runs"]
    assert (run["status"], run["completed"], run["alive"]) == (state, state == "done", False)
    assert run["wall_time_s"] == 100.0
    out = command("status").out
    assert state in out
    assert ("a: RewardError: \ufffd[31mdown" in out) is (state == "failed")


@pytest.mark.parametrize("pid", [0, -1, None, "12", True, 10**30, 2**22 + 1])
def test_an_impossible_process_is_dead(make_run: Make, status: Command, pid: Any) -> None:
    make_run("logs/a", status="running", pid=pid)
    assert [(run["status"], run["alive"]) for run in status()["runs"]] == [("dead", False)]


def test_numbers_that_are_absent_are_dashes_never_zero(make_run: Make, status: Command, command: Command) -> None:
    make_run("logs/before", metrics="", status="running")
    make_run("logs/evaluated", metrics='{"step": -1, "eval_correct_rate": 0.5}\n')
    make_run("logs/skipped", metrics='{"step": 0, "loss": null, "correct_rate": 0.0}\n')
    before, evaluated, skipped = status()["runs"]
    for run in (before, evaluated):
        assert (run["step"], run["loss"], run["correct_rate"], run["mean_reward"]) == (0, None, None, None)
    assert (skipped["step"], skipped["loss"], skipped["correct_rate"]) == (1, None, 0.0)
    [row] = [line.split() for line in command("status").out.splitlines() if line.startswith("skipped")]
    assert row[1:6] == ["done", "1/10", "0.0%", "—", "—"]


def test_damage_of_one_run_does_not_hide_the_others(make_run: Make, status: Command, command: Command) -> None:
    make_run("logs/cut", metrics='{"step": 0, "loss": 0.5}\n{"step": 1, "lo')
    make_run("logs/damaged", metrics='{"step": 0}\n{"step": NaN}\n')
    (make_run("logs/manifest") / "run.json").write_text("{")
    (make_run("logs/other") / "run.json").write_text("[]")
    cut, damaged, manifest, other = status()["runs"]
    assert (cut["status"], cut["step"], cut["loss"]) == ("done", 1, 0.5)
    assert [run["status"] for run in (damaged, manifest, other)] == ["unreadable"] * 3
    out = command("status").out
    assert "damaged: metrics.jsonl (last line): cannot be read: NaN is not JSON" in out
    assert "other: run.json: cannot be read: not a JSON object" in out


def test_many_runs_are_all_there_and_right(make_run: Make, status: Command) -> None:
    for i in range(60):
        make_run(f"logs/sweep{i % 7}/r{i:03d}", steps=i % 10, metrics=None)
    runs = status()["runs"]
    assert len(runs) == 60
    assert [run["path"] for run in runs] == sorted(run["path"] for run in runs)
    for run in runs:
        steps = int(run["path"][-3:]) % 10
        assert (run["step"], run["correct_rate"]) == (steps, (steps - 1) / 10 if steps else None)


def test_idle_runs_are_hidden_unless_asked_for(
    make_run: Make, status: Command, command: Command, sleeper: subprocess.Popen[bytes]
) -> None:
    make_run("logs/old_dead", status="running", idle_s=DAY_S + 60)
    make_run("logs/old_done", idle_s=DAY_S + 60)
    make_run("logs/old_stale", status="running", pid=sleeper.pid, idle_s=DAY_S + 60)
    make_run("logs/new_done", idle_s=DAY_S - 60)
    make_run("logs/now", status="running", pid=sleeper.pid)

    def names(*arguments: str) -> list[str]:
        return [run["path"][5:] for run in status(*arguments)["runs"]]

    assert names() == ["new_done", "now", "old_stale"]
    assert names("--all") == ["new_done", "now", "old_dead", "old_done", "old_stale"]
    assert names("--active") == ["now", "old_stale"]
    assert status()["hidden"] == 2
    assert "2 not shown (--all shows every run and campaign)" in command("status").out


def test_the_findings_of_the_last_step_are_shown(make_run: Make, status: Command, command: Command) -> None:
    example = "group 3, completion 5: \x1b[2JBy feel, 508."
    gamed = {"step": 8, "health": ["gaming", "truncation"], "gaming_example": example}
    make_run("logs/gamed", metrics=json.dumps({"step": 7, "health": ["other"]}) + "\n" + json.dumps(gamed) + "\n")
    make_run("logs/well", metrics='{"step": 8, "health": "odd"}\n')
    gaming, well = status()["runs"]
    assert (gaming["health"], gaming["gaming_example"]) == (["gaming", "truncation"], example)
    assert (well["health"], well["gaming_example"]) == ([], "")
    out = " ".join(command("status").out.split())
    assert "gamed: health at its last step: gaming, truncation; for example group 3, completion 5" in out
    assert "well: health" not in out
    assert "\x1b" not in out


def test_what_a_name_holds_cannot_steer_the_terminal(make_run: Make, command: Command) -> None:
    make_run("logs/a\x1b[2Jb\n[bold]c", condition="x\x1b]0;owned\x07[red]y")
    out = command("status").out
    assert not {"\x1b", "\x07"} & set(out)
    assert "a\ufffd[2Jb\ufffd[bold]c" in out
    assert "x\ufffd]0;owned\ufffd[red]y" in out


def test_runs_are_found_at_every_depth_but_not_among_records(make_run: Make, status: Command, tmp_path: Path) -> None:
    for name in ("logs", "logs/x/y/deep", "logs/emergence/not", "logs/.hidden/not", "elsewhere/linked"):
        make_run(f"{name}/run")
    make_run("logs/outer")
    make_run("logs/outer/inner")
    make_run("logs/outer/emergence/tokens")
    (tmp_path / "logs/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "logs/x/loop").symlink_to(tmp_path / "logs")
    found = {run["path"][5:] for run in status()["runs"]}
    assert found == {"run", "x/y/deep/run", "emergence/not/run", "link/linked/run", "outer", "outer/inner"}
    [run] = status("logs/outer/inner")["runs"]
    assert run["path"] == "logs/outer/inner"


def manifest(folder: Path, pid: int, runs: list[dict[str, Any]]) -> None:
    conditions = list(dict.fromkeys(run["condition"] for run in runs))
    seeds = list(dict.fromkeys(run["seed"] for run in runs))
    content = {
        "timestamp": "20260301_120000",
        "campaign_toml": "campaign.toml",
        "conditions": conditions,
        "seeds": seeds,
        "max_steps": 10,
        "parallel": True,
        "num_runs": len(runs),
        "runner_pid": pid,
        "runs": runs,
    }
    (folder / "manifest.json").write_text(json.dumps(content))


def test_a_campaign_is_a_matrix_of_its_runs(
    make_run: Make, status: Command, command: Command, tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    home = tmp_path / "logs/campaign_20260301_120000"
    make_run(f"{home}/runs/grpo+none_s1", steps=10)
    make_run(f"{home}/runs/grpo+none_s2", status="running", pid=sleeper.pid, steps=4)
    make_run(f"{home}/runs/maxrl+none_s1", status="running", steps=3)
    make_run("logs/alone")
    entries = [
        {"condition": condition, "seed": seed, "run_name": f"{condition}_s{seed}", "log_dir": f"moved/{seed}"}
        for condition in ("grpo+none", "maxrl+none")
        for seed in (1, 2)
    ]
    manifest(home, sleeper.pid, entries)
    content = status()
    assert [run["path"] for run in content["runs"]] == ["logs/alone"]
    [campaign] = content["campaigns"]
    assert campaign["path"] == "logs/campaign_20260301_120000"
    assert (campaign["conditions"], campaign["seeds"]) == (["grpo+none", "maxrl+none"], [1, 2])
    assert (campaign["max_steps"], campaign["num_runs"], campaign["completed"], campaign["failed"]) == (10, 4, 1, 1)
    assert campaign["matrix"] == {"grpo+none": {"1": 0.9, "2": 0.3}, "maxrl+none": {"1": 0.2, "2": None}}
    assert (campaign["status"], campaign["runner_pid"], campaign["runner_alive"]) == ("running", sleeper.pid, True)
    assert (campaign["campaign_toml"], campaign["timestamp"]) == ("campaign.toml", "20260301_120000")
    assert [run["status"] for run in campaign["runs"]] == ["done", "running", "dead", "not started"]
    assert campaign["last_activity"]
    rows = {line.split("  ")[0]: line.split()[1:] for line in command("status").out.splitlines()}
    assert rows["grpo+none"] == ["10", "✓", "4/10"]
    assert rows["maxrl+none"] == ["3", "✗", "—"]


@pytest.mark.parametrize(
    ("states", "expected"),
    [(("done", "done"), "done"), (("done", "failed"), "partial"), (("failed", None), "dead"), ((None, None), "dead")],
)
def test_a_campaign_without_its_runner_has_ended(
    make_run: Make, status: Command, tmp_path: Path, states: tuple[str | None, ...], expected: str
) -> None:
    home = tmp_path / "logs/c"
    home.mkdir(parents=True)
    entries = []
    for seed, state in enumerate(states):
        entries.append({"condition": "a", "seed": seed, "run_name": f"a_s{seed}", "returncode": None if state else 1})
        if state:
            make_run(f"{home}/runs/a_s{seed}", status=state)
    manifest(home, 2**22 + 1, entries)
    [campaign] = status()["campaigns"]
    assert (campaign["status"], campaign["failed"]) == (expected, sum(state != "done" for state in states))


def test_a_run_of_an_impossible_name_is_not_started(status: Command, tmp_path: Path) -> None:
    home = tmp_path / "logs/c"
    home.mkdir(parents=True)
    manifest(home, 2**22 + 1, [{"condition": "a", "seed": 1, "run_name": name} for name in ("a" * 5000, "a\0b")])
    [campaign] = status()["campaigns"]
    assert [run["status"] for run in campaign["runs"]] == ["not started"] * 2


def test_another_tools_manifest_is_no_campaign(make_run: Make, status: Command, tmp_path: Path) -> None:
    make_run("logs/a/run")
    (tmp_path / "logs/a/manifest.json").write_text('{"files": {}}')
    (tmp_path / "logs/manifest.json").write_text("{")
    content = status()
    assert (len(content["runs"]), content["campaigns"]) == (1, [])


@pytest.mark.parametrize("columns", [40, 60, 79])
def test_beside_an_editor_each_run_has_a_row_and_a_live_one_a_bar(make_run: Make, tmp_path: Path, columns: int) -> None:
    for name, fields in (("busy", {"status": "running"}), ("over", {}), ("loading", {"status": "running"})):
        folder = make_run(f"logs/{name}", **fields)
        pid = os.getpid() if fields else 1
        manifest = json.loads((folder / "run.json").read_text()) | {"pid": pid}
        (folder / "run.json").write_text(json.dumps(manifest))
        progress = {"unit": "completions", "done": 8, "total": 32, "tokens": 100, "tokens_per_s": 10, "time_left_s": 30}
        beat = {"pid": pid, "step": 3, "phase": "sampling", "phase_elapsed_s": 10, "progress": progress}
        beat |= {"phase": "checkpoint", "progress": {}} if name == "loading" else {}
        (folder / "heartbeat.json").write_text(json.dumps(beat))
    console = Console(width=columns, file=io.StringIO())
    console.print(picture(scan(tmp_path / "logs"), columns))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    if columns < 60:
        return
    head, *rows = (line.split() for line in lines[2:6])
    assert head == ["run", "state", "step", "correct", "held-out", "left"]
    assert [row[0] for row in rows] == ["busy", "loading", "over"]
    bars = [line for line in lines if "sampling" in line or "checkpoint" in line]
    assert len(bars) == 2
    assert re.fullmatch(r"busy: sampling +━+.* +25% 30 s left *", bars[0])
    assert re.fullmatch(r"loading: checkpoint +for 10 s *", bars[1])


def test_a_campaign_says_how_far_its_planned_looks_are(
    make_run: Make, status: Command, command: Command, tmp_path: Path
) -> None:
    home = tmp_path / "logs/c"
    make_run(f"{home}/runs/grpo+none_s1", steps=10)
    cells = [{"condition": "grpo+none", "seed": seed, "run_name": f"grpo+none_s{seed}"} for seed in (1, 2)]
    manifest(home, 0, cells)

    def shown(**fields: Any) -> tuple[Any, str]:
        content = json.loads((home / "manifest.json").read_text())
        (home / "manifest.json").write_text(json.dumps(content | fields))
        return status("logs/c")["campaigns"][0]["looks"], command("status", "logs/c").out

    plan = {"looks": [1, 2]}
    looks, out = shown(plan=plan)
    assert (looks, "0 of 2 looks taken, the next after 1 seeds" in out) == (
        {"planned": [1, 2], "taken": [], "saved": 0},
        True,
    )
    looks, out = shown(looks=[{"seeds": 1}], runs=[cells[0], cells[1] | {"status": "not needed"}])
    assert looks == {"planned": [1, 2], "taken": [1], "saved": 1}
    assert "1/1 runs done, 1 of 2 looks taken, 1 runs saved" in out
