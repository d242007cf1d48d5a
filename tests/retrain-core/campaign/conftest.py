"""Campaigns of the toy policy, written to a file and run as a user runs them."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import retrain
from retrain.campaign import schedule, session
from retrain.campaign.load import load_campaign
from retrain.campaign.looks import PlannedLooks
from retrain.campaign.manifest import CampaignRecord, Manifest, new_content
from retrain.campaign.planned import plan_runs
from retrain.campaign.report_lines import Lines
from retrain.campaign.schedule import FollowUps, Schedule, Stops
from retrain.campaign.session import run_campaign
from retrain.kernel.plugins.discover import load_plugins
from tests.kit.campaigns import Finishes, conditions

SOURCES = Path(retrain.__file__).parents[1]
TWO = conditions("toy_raw+toy_flat", "grpo+toy_index")
PLAYED = conditions("grpo+toy_flat", "toy_raw+toy_flat")
BASE = Path(__file__).with_name("toys.toml").read_text(encoding="utf-8")


@pytest.fixture
def write(tmp_path, toys, tokenizer_folder, monkeypatch):
    """`write(campaign="seeds = [1]", conditions=TWO, more="")`: a file of toys, in the folder that is now current.

    `tables` are further keys of the base: `training="lr = 1.0"`.
    """
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(toys), str(SOURCES), *(p for p in sys.path if p.endswith("/src"))])
    monkeypatch.setenv("PYTHONPATH", path)

    def make(campaign="seeds = [1, 2]\nmax_steps = 4", conditions=TWO, more="", **tables):
        base = BASE
        for table, keys in tables.items():
            base = base.replace(f"[{table}]\n", f"[{table}]\n{keys}\n")
        text = f'[campaign]\n{campaign}\n{conditions}\n{base}\n[model]\nmodel = "{tokenizer_folder}"\n{more}'
        Path("c.toml").write_text(text, encoding="utf-8")
        return Path("c.toml")

    return make


@pytest.fixture
def toy_plugins(toys):
    """Everything installed, and the toys."""
    return load_plugins({})


@pytest.fixture
def load_text(write, toy_plugins):
    """`load_text(campaign, conditions, more, arguments=[...])`: the campaign, or its ConfigError."""

    return lambda *texts, arguments=(), **tables: load_campaign([str(write(*texts, **tables)), *arguments], toy_plugins)


@pytest.fixture
def scheduled(toy_plugins, monkeypatch):
    """`scheduled(campaign, launcher)`: the schedule of its runs in `out`, continued if they were begun.

    `judge` takes the looks of its plan.
    """
    monkeypatch.setattr(schedule, "POLL_S", 0.0)

    def build(campaign, launcher, *, workers=1, stops=None, judge=None):
        folder = Path("out")
        folder.mkdir(exist_ok=True)
        runs = plan_runs(campaign, folder)
        file = folder / "manifest.json"
        content = json.loads(file.read_text()) if file.exists() else new_content(campaign, runs, datetime.now(UTC))
        lines = Lines(len(runs), parallel=workers > 1)
        return Schedule(
            campaign,
            runs,
            workers=workers,
            throttle_dir=None,
            manifest=Manifest(folder, content),
            launcher=launcher,
            lines=lines,
            follow_ups=FollowUps(campaign, toy_plugins, folder, frozenset()),
            stops=stops or Stops(),
            record=CampaignRecord(folder, lines),
            looks=PlannedLooks(campaign, judge, content.get("looks", ())) if judge else None,
        )

    return build


@pytest.fixture
def start(write):
    """`start("c.toml", ...)`: `python -m retrain` in the current folder, in a session of its own."""

    def call(*arguments, **environ):
        return subprocess.Popen(
            [sys.executable, "-m", "retrain", *arguments],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return call


@pytest.fixture
def finish(start):
    """The same to its end: exit code, stdout, stderr."""

    def call(*arguments, **environ):
        process = start(*arguments, **environ)
        out, err = process.communicate(timeout=280)
        return process.returncode, out, err

    return call


@pytest.fixture
def play(write, monkeypatch):
    """`play(campaign, conditions, arguments=(), logs=False, devices='devices = "cpu"')`: the runs that were started.

    With `logs`, the campaign has no log_dir of its own. `launcher` starts them. Further options are those of
    `run_campaign`.
    """
    monkeypatch.setattr(schedule, "POLL_S", 0.0)
    loaded = []

    def call(
        campaign, conditions=PLAYED, *, arguments=(), logs=False, devices='devices = "cpu"', launcher=None, **options
    ):
        launcher = launcher or Finishes()
        plugins = loaded[0] if loaded else load_plugins({})  # at the first campaign: tests install distributions
        loaded[:] = [plugins]
        monkeypatch.setattr(session, "launcher_of", lambda campaign, plugins: launcher)
        file = write(f"max_steps = 4\n{campaign}\n", conditions)
        text = file.read_text().replace('devices = "cpu"', devices)
        file.write_text(text.replace('[logging]\nlog_dir = "out"\n', "") if logs else text)
        run_campaign(load_campaign([str(file), *arguments], plugins), plugins, **options)
        return launcher.started

    return call
