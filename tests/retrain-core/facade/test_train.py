"""`retrain.train` does what the command does, with functions, interruptions and a process that has other work."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrain
from retrain.facade.hosting import held_interrupts
from retrain.facade.training import Tables, Watcher
from retrain.kernel.errors import ConfigError, HookError, ResumeError, StopRequested
from retrain.run.interrupts import SIGNALS, Interrupts
from tests.kit.problems import codes_in

BONUS = 2.0


def wordy(response, reference):
    return BONUS * len(response.split()) + float(response.startswith(reference))


def centred(rewards):
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


@pytest.fixture
def keywords(toy_arguments: list[str], command: Callable[..., Any]) -> dict[str, Any]:
    """A short run of the toys as keywords, in a folder of its own."""
    values = dict(zip(toy_arguments[::2], toy_arguments[1::2], strict=True))
    found = {name.removeprefix("--").replace("-", "_"): value for name, value in values.items()}
    return found | {"max_steps": 4, "save_every": 2, "scoring_audit": "off", "quiet": True}


def untimed(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.endswith("time_s")} for line in lines]


def state_of_process() -> dict[str, Any]:
    return {
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "logging": [list(logging.getLogger("retrain").handlers), logging.getLogger("retrain").level],
        "path": list(sys.path),
        "threads": threading.active_count(),
        "copies": [name for name in sys.modules if name.startswith(("wordy_", "centred_"))],
    }


def test_a_run_stopped_in_python_goes_on_elsewhere_as_the_run_of_the_command(
    keywords: dict[str, Any], command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    before = state_of_process()
    given = {name: value for name, value in keywords.items() if name not in ("reward_type", "advantage_mode")}
    tables = {"logging": {"log_dir": Path("logs/mine")}}
    told = r"the state is saved. To continue: run = retrain.load\('logs/mine'\)"
    with pytest.raises(retrain.RunStopped, match=told) as e:
        retrain.train(tables, reward=wordy, advantage=centred, on_step=stop, **given)
    assert state_of_process() == before
    assert e.value.__context__ is None, "it keeps no frame of the run alive"
    assert e.value._render_traceback_() == [f"retrain: {e.value}"]
    stopped = e.value.run
    assert (stopped.status, len(stopped.rows), stopped.adapter.name) == ("stopped", 2, "checkpoint_step_2")
    copies = sorted((stopped / "inputs/code").iterdir())
    assert [copy.name.rpartition("_")[0] for copy in copies] == ["centred", "wordy"]
    assert "BONUS = 2.0" in copies[1].read_text()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stopped.folder.rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)
    seen: list[int] = []
    moved = retrain.load("moved").resume(quiet=True, on_step=lambda line: seen.append(line["step"]))
    assert seen == [2, 3]
    with monkeypatch.context() as path:
        path.setattr(sys, "path", list(sys.path))
        assert command("moved/config.toml", "--log-dir", "never").code == 0
    assert untimed(moved.folder) == untimed(Path("never"))
    assert (moved / "adapter/final/logits.json").read_bytes() == Path("never/adapter/final/logits.json").read_bytes()
    assert moved.status == "done"
    assert moved.folder == Path("moved") == Path(os.fspath(moved))
    assert "status='done'" in repr(moved)
    assert moved.config["training"]["max_steps"] == 4
    with monkeypatch.context() as without:
        without.setattr("retrain.facade.run.find_spec", {"pandas": None}.get)
        assert moved.metrics == moved.rows
    completions = list(moved.completions)
    assert len(completions) == 4 * 2 * 4
    assert all(each["reward"] == wordy(each["completion"], each["reference"]) for each in completions)
    with pytest.raises(ConfigError) as refused:
        retrain.load("nowhere")
    assert codes_in(refused) == ["run.not-a-run"]
    Path("run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"run\.json: cannot be read: it holds no configuration"):
        assert retrain.load(".").config


def test_an_error_in_on_step_fails_the_run_and_leaves_checkpoints(keywords: dict[str, Any]) -> None:
    def broken(metrics: Mapping[str, Any]) -> None:
        if metrics["step"] == 2:
            raise ValueError("no such column")

    before = state_of_process()
    with pytest.raises(HookError, match=r"on_step raised ValueError: no such column .*test_train.py:\d+") as failed:
        retrain.train({}, on_step=broken, **keywords)
    places = [frame for frame, _ in traceback.walk_tb(failed.value.__traceback__)]
    frames = [frame for frame in places if "retrain/run/" in frame.f_code.co_filename]
    assert frames
    assert not any(frame.f_locals for frame in frames), "the error keeps no model alive"
    assert state_of_process() == before
    run = retrain.load("logs/train")
    assert (run.status, run.adapter.name, len(run.rows)) == ("failed", "checkpoint_step_2", 3)


def test_an_interrupt_in_on_step_requests_a_stop() -> None:
    def interrupted(metrics: Mapping[str, Any]) -> None:
        raise KeyboardInterrupt

    interrupts = Interrupts(grace_s=60.0, is_guest=True)
    with interrupts.installed(), pytest.raises(StopRequested, match="on_step"), interrupts.shield():
        Watcher(interrupted, interrupts).retrain_step_end({"step": 0})


def test_a_second_interrupt_ends_the_run_and_not_the_process() -> None:
    def insist() -> None:
        with interrupts.shield():
            interrupts.request("first")
            with pytest.raises(KeyboardInterrupt, match="second request"):
                signal.raise_signal(signal.SIGINT)

    def ignore() -> None:
        with interrupts.shield():
            interrupts.request("first")
            threading.Event().wait(30)

    interrupts = Interrupts(grace_s=60.0, is_guest=True)
    with interrupts.installed(), pytest.raises(StopRequested):
        insist()
    interrupts = Interrupts(grace_s=0.01, is_guest=True)
    with interrupts.installed(), pytest.raises(KeyboardInterrupt, match="second request"):
        ignore()


def test_an_interrupt_waits_until_libraries_are_imported_whole() -> None:
    done: list[str] = []

    def imported() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("whole")
        done.append("too far")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        imported()
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is before
    with held_interrupts():
        done.append("quiet")


def test_problems_are_those_of_the_command(
    keywords: dict[str, Any], command: Callable[..., Any], tmp_path: Path
) -> None:
    tables = {"training": {"lr": -1.0, "max_stepps": 3}, "trainning": {}, "algorithm": {"advantage_mode": "grppo"}}
    text = '[training]\nlr = -1.0\nmax_stepps = 3\n[trainning]\n[algorithm]\nadvantage_mode = "grppo"\n'
    (tmp_path / "my.toml").write_text(text)
    told = command("my.toml").err.replace("\n", "")
    with pytest.raises(ConfigError) as refused:
        retrain.train(tables)
    assert len(codes_in(refused)) == 4
    for problem in refused.value.problems:
        assert problem.where.startswith("config [")
        assert problem.what in told
        assert not problem.fix or problem.fix in told
    (tmp_path / "many.toml").write_text("[campaign]\nseeds = [1]\n")
    calls = {
        "config.unknown-flag": lambda: retrain.train({}, max_stepps=3),
        "plugin.missing": lambda: retrain.train({}, **keywords | {"transform_mode": "nowhere.part"}),
        "run.not-single": lambda: retrain.train("many.toml"),
    }
    for code, call in calls.items():
        with pytest.raises(ConfigError) as again:
            call()
        assert codes_in(again) == [code]
    assert not (tmp_path / "logs").exists()
    told = refused.value._render_traceback_()  # type: ignore[attr-defined]
    assert "\n".join(told) == f"retrain: config error\n{refused.value}"
    with pytest.raises((ConfigError, ResumeError), match="nowhere"):
        retrain.train({}, resume="nowhere", **keywords)


def test_values_may_be_paths_tuples_and_numbers_of_numpy() -> None:
    tables = Tables({"training": {"max_steps": np.int64(1), "lr": np.float32(0.5)}, "a": {"b": (Path("c"), None)}})
    assert tables == {"training": {"max_steps": 1, "lr": 0.5}, "a": {"b": ["c", None]}}
    assert type(tables["training"]["max_steps"]) is int
    assert str(tables) == "config"


def test_the_public_names_are_loaded_when_they_are_used() -> None:
    assert retrain.__all__ == ["Comparison", "Run", "RunStopped", "compare", "load", "train"]
    assert set(retrain.__all__) <= set(dir(retrain))
    with pytest.raises(AttributeError, match="trane"):
        retrain.trane  # type: ignore[attr-defined] # noqa: B018
