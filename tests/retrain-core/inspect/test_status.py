"""`retrain status`, with `--follow` in a pipe and on a pseudo-terminal; no command waits for a pipe or a device."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from retrain.inspect import status_command
from retrain.inspect.status_command import picture
from retrain.records.files import RunLock
from retrain.records.runs.campaign_status import scan
from tests.kit.shared import slow_or_long

Command = Callable[..., Any]
Make = Callable[..., Path]
Process = subprocess.Popen[bytes]
DAY_S = 24 * 3600.0


@pytest.fixture
def status(printed_json: Command) -> Command:
    """`status("--all")`: the JSON of `retrain status`."""
    return partial(printed_json, "status")


def test_a_real_run_has_every_field_and_its_held_out_rate(toy_run: Make, status: Command, command: Command) -> None:
    for arguments in (["status"], ["status", "--json"], ["top"]):
        result = command(*arguments)
        assert (result.code, result.out, "logs: no such folder" in result.err) == (1, "", True)
    folder = toy_run("logs/toy", "--eval-examples", "2")
    [run] = status()["runs"]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    expected = {name: last[name] for name in ("correct_rate", "loss", "mean_reward")}
    expected |= {"path": "logs/toy", "condition": "grpo+toy_flat", "step": 4, "max_steps": 4, "trainer": "retrain"}
    expected |= {"completed": True, "stale": False, "alive": False, "pid": os.getpid()}
    expected |= {"held_out_rate": last["eval_correct_rate"], "held_out_step": 4}
    assert {name: run[name] for name in expected} == expected
    shown = command("status").out
    assert "Campaigns: 0 | Runs: 1" in shown
    assert f"{100 * last['eval_correct_rate']:.1f}%" in shown
    [row] = [line.split() for line in shown.splitlines() if line.startswith("toy")]
    assert row[1:3] == ["done", "4/4"]


def test_a_run_is_live_stale_dead_or_ended(make_run: Make, status: Command, command: Command, sleeper: Process) -> None:
    folder = make_run("logs/live", status="running", pid=sleeper.pid)

    def seen() -> tuple[str, bool, bool, bool]:
        [run] = status()["runs"]
        return run["status"], run["alive"], run["stale"], run["completed"]

    assert seen() == ("running", True, False, False)
    for file in ("run.json", "metrics.jsonl"):
        os.utime(folder / file, (time.time() - 301,) * 2)
    assert seen() == ("stale", True, True, False)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
    assert seen() == ("dead", False, False, False)
    content = json.loads((folder / "run.json").read_text())
    for pid in (0, -1, None, "12", True, 10**30, 2**22 + 1):
        (folder / "run.json").write_text(json.dumps(content | {"pid": pid}))
        assert seen() == ("dead", False, False, False), pid
    for state in ("done", "failed", "stopped"):
        ended = {"status": state, "pid": os.getpid(), "ended": content["started"]}
        ended |= {"error": "RewardError: \x1b[31mdown"} if state == "failed" else {}
        (folder / "run.json").write_text(json.dumps(content | ended))
        assert seen() == (state, False, False, state == "done")
        assert ("live: RewardError: \ufffd[31mdown" in command("status").out) is (state == "failed")


def test_a_live_run_says_its_phase(make_run: Make, status: Command, command: Command, sleeper: Process) -> None:
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
    odd = {"phase": "\x1b[2J", "step": 10**30, "phase_elapsed_s": 1e300}
    _, line = shown(json.dumps(beat | odd | {"progress": {"unit": "\x07", "done": 1, "total": 2}}))
    assert line.startswith("live: �[2J, step 1000000000000, for ")
    assert line.endswith(": 1/2 �")


def test_the_lock_knows_better_than_the_process_id(make_run: Make, status: Command, sleeper: Process) -> None:
    held = make_run("logs/held", status="running")
    reused = make_run("logs/reused", status="running", pid=sleeper.pid)
    lock = RunLock(held)
    RunLock(reused).release()
    assert [run["status"] for run in status()["runs"]] == ["running", "dead"]
    lock.release()
    assert [run["status"] for run in status()["runs"]] == ["dead", "dead"]


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


def test_idle_runs_are_hidden(make_run: Make, status: Command, command: Command, sleeper: Process) -> None:
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


def test_findings_are_shown_and_no_name_steers_the_terminal(make_run: Make, status: Command, command: Command) -> None:
    example = "group 3, completion 5: \x1b[2JBy feel, 508."
    gamed = {"step": 8, "health": ["gaming", "truncation"], "gaming_example": example}
    lines = json.dumps({"step": 7, "health": ["other"]}) + "\n" + json.dumps(gamed) + "\n"
    make_run("logs/gamed", metrics=lines, condition="x\x1b]0;owned\x07[red]y")
    make_run("logs/a\x1b[2Jb\n[bold]c")
    make_run("logs/well", metrics='{"step": 8, "health": "odd"}\n')
    _, gaming, well = status()["runs"]
    assert (gaming["health"], gaming["gaming_example"]) == (["gaming", "truncation"], example)
    assert (well["health"], well["gaming_example"]) == ([], "")
    out = " ".join(command("status").out.split())
    assert "gamed: health at its last step: gaming, truncation; for example group 3, completion 5" in out
    assert "well: health" not in out
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
    for place, text in (("logs/x", '{"files": {}}'), ("logs", "{")):  # of other tools: no campaigns
        (tmp_path / place / "manifest.json").write_text(text)
    content = status()
    found = {run["path"][5:] for run in content["runs"]}
    assert found == {"run", "x/y/deep/run", "emergence/not/run", "link/linked/run", "outer", "outer/inner"}
    assert content["campaigns"] == []
    [run] = status("logs/outer/inner")["runs"]
    assert run["path"] == "logs/outer/inner"


def manifest(folder: Path, pid: int, runs: list[dict[str, Any]]) -> None:
    content: dict[str, Any] = {"timestamp": "20260301_120000", "campaign_toml": "campaign.toml", "max_steps": 10}
    content |= {name: list(dict.fromkeys(run[name[:-1]] for run in runs)) for name in ("conditions", "seeds")}
    content |= {"parallel": True, "num_runs": len(runs), "runner_pid": pid, "runs": runs}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_a_campaign_is_a_matrix(
    make_run: Make, status: Command, command: Command, tmp_path: Path, sleeper: Process
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
    console = Console(width=60, file=io.StringIO())
    console.print(picture(scan(tmp_path / "logs"), 60))
    narrow = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, narrow)) <= 60
    assert any(line.split()[:3] == ["alone", "done", "3/10"] for line in narrow)


@pytest.mark.parametrize(
    ("states", "expected"),
    [(("done", "done"), "done"), (("done", "failed"), "partial"), (("failed", None), "dead"), ((None, None), "dead")],
)
def test_a_campaign_without_its_runner_has_ended(
    make_run: Make, status: Command, tmp_path: Path, states: tuple[str | None, ...], expected: str
) -> None:
    home, entries = tmp_path / "logs/c", []
    for seed, state in enumerate(states):
        entries.append({"condition": "a", "seed": seed, "run_name": f"a_s{seed}", "returncode": None if state else 1})
        if state:
            make_run(f"{home}/runs/a_s{seed}", status=state)
    manifest(home, 2**22 + 1, entries)
    [campaign] = status()["campaigns"]
    assert (campaign["status"], campaign["failed"]) == (expected, sum(state != "done" for state in states))
    manifest(home, 2**22 + 1, [{"condition": "a", "seed": 1, "run_name": name} for name in ("a" * 5000, "a\0b")])
    assert [run["status"] for run in status()["campaigns"][0]["runs"]] == ["not started"] * 2


def test_a_campaign_says_its_looks(make_run: Make, status: Command, command: Command, tmp_path: Path) -> None:
    home = tmp_path / "logs/c"
    make_run(f"{home}/runs/grpo+none_s1", steps=10)
    cells = [{"condition": "grpo+none", "seed": seed, "run_name": f"grpo+none_s{seed}"} for seed in (1, 2)]
    manifest(home, 0, cells)

    def shown(**fields: Any) -> tuple[Any, str]:
        content = json.loads((home / "manifest.json").read_text())
        (home / "manifest.json").write_text(json.dumps(content | fields))
        return status("logs/c")["campaigns"][0]["looks"], command("status", "logs/c").out

    looks, out = shown(plan={"looks": [1, 2]})
    assert looks == {"planned": [1, 2], "taken": [], "saved": 0}
    assert "0 of 2 looks taken, the next after 1 seeds" in out
    looks, out = shown(looks=[{"seeds": 1}], runs=[cells[0], cells[1] | {"status": "not needed"}])
    assert looks == {"planned": [1, 2], "taken": [1], "saved": 1}
    assert "1/1 runs done, 1 of 2 looks taken, 1 runs saved" in out


SCRIPT = str(Path(sys.executable).with_name("retrain"))


def test_watching_as_json_is_a_line_each_time(make_run: Make, tmp_path: Path) -> None:
    make_run("logs/a")
    arguments = [SCRIPT, "status", "--json", "--follow", "--interval", "0.05"]
    watcher = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watcher.stdout
    snapshots = [json.loads(watcher.stdout.readline()) for _ in range(2)]
    watcher.send_signal(signal.SIGINT)
    _, err = watcher.communicate(timeout=60)
    assert [len(snapshot["runs"]) for snapshot in snapshots] == [1, 1]
    assert (watcher.returncode, err) == (0, "")


@pytest.mark.parametrize("words", [["status", "--follow"], ["top"]])
def test_a_terminal_refreshes_until_ctrl_c(make_run: Make, tmp_path: Path, sleeper: Process, words: list[str]) -> None:
    make_run("logs/first", status="running", pid=sleeper.pid, steps=2)
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    watcher = subprocess.Popen(
        [SCRIPT, *words, "--interval", "0.1"], cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        seen = read_until(ours, "first")
        assert "running" in seen + read_until(ours, "2/10", seen)
        make_run("logs/second", status="running", pid=sleeper.pid)
        read_until(ours, "second")
        watcher.send_signal(signal.SIGINT)
        assert watcher.wait(timeout=60) == 0
        assert "Traceback" not in read_until(ours, "\x1b[?1049l")  # the screen is given back
    finally:
        watcher.kill()
        watcher.wait()
        os.close(ours)


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_without_a_cursor_gets_one_table_after_the_other(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    make_run("logs/a")
    looks = iter([scan(tmp_path), scan(tmp_path)])  # then StopIteration, in place of Ctrl-C
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", term)
    with pytest.raises(StopIteration):
        status_command._follow(looks.__next__, 0.0, as_json=False)
    assert terminal.getvalue().count("Runs: 1") == 2
    assert "\x1b" not in terminal.getvalue()


def read_until(terminal: int, wanted: str, seen: str = "") -> str:
    """What the terminal shows up to and with `wanted`."""
    deadline = time.monotonic() + 60
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{wanted!r} never came; seen: {seen!r}"
        try:
            seen += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other end has closed
            break
    assert wanted in seen, seen
    return seen


LIMIT_S = 30
MANIFEST, CONFIG, METRICS, TEXTS = "run.json", "config.toml", "metrics.jsonl", "emergence/generations.jsonl"
SUMS = "adapter/final/checksums.json"
COMMANDS = {  # and the files that each reads
    ("status", "logs", "--json"): (MANIFEST, METRICS, ".lock"),
    ("report", "logs/a", "--output", "page.html"): (CONFIG, METRICS, TEXTS),
    ("diff", "logs/a", "logs/b"): (MANIFEST, CONFIG, METRICS, TEXTS),
    ("compare", "logs/a", "logs/b"): (MANIFEST, METRICS),
    ("status", "logs/a", "--resume"): (MANIFEST, CONFIG, ".lock", SUMS),
    ("credit", "logs/a"): (CONFIG, METRICS, TEXTS),
}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@pytest.fixture
def runs(toy_run: Callable[..., Path], tmp_path: Path) -> Path:
    """Two runs below `logs`."""
    toy_run("logs/a", "--max-steps", "2")
    shutil.copytree(tmp_path / "logs/a", tmp_path / "logs/b")
    return tmp_path / "logs/a"


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_or_long(["FIFO", "link to a device"], "FIFO"))
def test_every_command_says_that_it_is_no_file(kind: str, runs: Path, command: Command) -> None:
    for words, names in COMMANDS.items():
        told = ""
        for name in names:
            file, kept = runs / name, runs / f"{name}.kept"
            file.rename(kept)
            os.mkfifo(file) if kind == "FIFO" else file.symlink_to("/dev/zero")
            with at_most(LIMIT_S):
                result = command(*words)
            assert result.code in (0, 1, 2), (words, name, result.err)
            assert "Traceback" not in result.err
            told += result.out + result.err
            told += Path("page.html").read_text() if words[0] == "report" and result.code == 0 else ""
            file.unlink()
            kept.rename(file)
        assert "not a regular file" in told, words
    (runs / "failures").mkdir()
    os.mkfifo(runs / "failures/step_0_0.json")
    with at_most(LIMIT_S):
        result = command("audit", "--replay", str(runs / "failures"))
    assert result.code == 2
    assert "not a regular file" in result.err
