"""The devices of a run: settled before anything is loaded, recorded, kept when it is resumed; its watchers."""

import json
import tomllib
from pathlib import Path

import pytest

from retrain.api import PluginError, Watcher, hookimpl
from retrain.kernel.errors import HookError
from retrain.kernel.parts import Run
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.session import watching

LOADED = """
from pathlib import Path
from retrain.api import hookimpl

@hookimpl
def retrain_tasks_loaded(): Path("loaded").touch()
"""


@pytest.fixture
def run(command, toy_arguments, distribution, tmp_path):
    """`run("--devices", "cpu", gpus="gpu:0")`: a run of the toys to its end, or of `--resume`."""
    distribution("retrain-machine", {"machine": LOADED})
    base = [*toy_arguments, "--max-steps", "2", "--log-dir", "a"]

    def call(*arguments, gpus=""):
        (tmp_path / "machine.txt").write_text(f"cpu {gpus}")
        (tmp_path / "loaded").unlink(missing_ok=True)
        return command(*([] if "--resume" in arguments else base), *arguments)

    return call


def recorded(folder="a"):
    return json.loads(Path(folder, "run.json").read_text())


def written(folder="a"):
    return str(tomllib.loads(Path(folder, "config.toml").read_text())["backend"]["devices"])


@pytest.mark.parametrize(
    ("gpus", "used", "why"),
    [("", "cpu", "there is no GPU"), pytest.param("gpu:0", "gpu:0", "it is there", marks=pytest.mark.slow)],
)
def test_the_default_takes_what_is_there_and_says_so(run, gpus, used, why):
    outcome = run(gpus=gpus)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == f"Devices: {used} (not set, and {why})"
    assert lines[lines.index("Next:") - 1] == f"Trained on {used}: not set, and {why}"
    assert recorded()["devices"] == {"used": used, "why": f"not set, and {why}"}
    assert (recorded()["config"]["backend"]["devices"], written()) == (used, used)
    assert "backend.devices" not in recorded()["origins"]


def test_what_somebody_set_is_an_error_before_data_and_model(run, tmp_path):
    outcome = run("--devices", "gpu:0")
    assert outcome.code == 2
    assert "--devices [backend] devices: no gpu:0" in outcome.err
    assert not (tmp_path / "loaded").exists()
    assert not Path("a").exists()
    outcome = run("--devices", "gpu:0", gpus="gpu:0")
    assert (outcome.code, recorded()["devices"]) == (0, {"used": "gpu:0", "why": ""})
    assert "Trained on" not in outcome.out


@pytest.mark.slow
def test_a_resumed_run_keeps_its_devices(run):
    more = ("--max-steps", "3")
    assert run().code == 0
    outcome = run("--resume", "a", *more, gpus="gpu:0")  # a GPU has come since
    assert outcome.code == 0, outcome.err
    assert recorded()["devices"] == {"used": "cpu", "why": "not set, and there is no GPU"}
    without = Path("a/config.toml").read_text().replace('devices = "cpu"\n', "")
    Path("my.toml").write_text(without)
    outcome = run("my.toml", "--resume", "a", "--max-steps", "4", gpus="gpu:0")
    assert (outcome.code, written()) == (0, "cpu"), outcome.err
    outcome = run("--resume", "a", "--devices", "gpu:0", "--max-steps", "5", gpus="gpu:0")
    assert outcome.code == 2
    assert "backend.devices was 'cpu' and is now 'gpu:0'" in outcome.err


class Good:
    @hookimpl
    def retrain_run_end(self):
        """Any hook will do."""


class Faulty:
    @hookimpl
    def retrain_run_edn(self):
        """A misspelt hook."""


def test_a_refused_watcher_leaves_none_registered():
    plugins, good = load_plugins({}), Good()
    with pytest.raises(PluginError, match="Faulty cannot be used"), watching(plugins, [good, Faulty()]):
        pytest.fail("the block runs although a watcher was refused")
    assert not plugins.pluggy.is_registered(good)


class Methods(Watcher):
    """No hooks."""

    def phase(self, step, phase):
        raise ValueError(f"no {phase}")


def test_a_watcher_needs_no_hook_and_is_named_when_it_fails():
    absent = None
    run = Run(parts=absent, records=absent, stops=absent, progress=absent, view=absent, watchers=(Watcher(), Methods()))
    with (
        watching(load_plugins({}), run.watchers),
        pytest.raises(HookError, match=r"Methods\.phase raised ValueError: no sampling"),
    ):
        run.enter(0, "sampling")
    assert run.ask_watchers("step_line", {"step": 0}) == []
