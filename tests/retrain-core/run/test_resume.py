"""Runs of the toy policy, stopped, broken or robbed of their folder at a hook, then resumed: the same run."""

import json
import shutil
from pathlib import Path

import pytest

from retrain.kernel.plugins.discover import load_plugins
from retrain.run.resume_plan import PATHS, interchangeable
from tests.kit.problems import codes_in
from tests.kit.shared import made_once, slow_or_long

LOG = "logs/train"
# Counts steps over a resume, and does what `act.json` says at the hook that it names.
COUNTING = """
import json, os, shutil, signal
from pathlib import Path
from retrain.api import Watcher, hookimpl

counted = {"steps": 0}
LOG, ADAPTERS = Path("logs/train"), Path("logs/train/adapter")

def delete(folder):
    folder.rename("gone")  # the heartbeat may write there meanwhile
    shutil.rmtree("gone")

ACTIONS = {
    "deleted": lambda: delete(LOG),
    "all deleted": lambda: delete(LOG.parent),
    "moved": lambda: LOG.rename("elsewhere"),
    "replaced": lambda: (LOG.rename("elsewhere"), shutil.copytree("elsewhere", LOG)),
    "one deleted": lambda: (LOG / "metrics.jsonl").unlink(),
    "cut": lambda: (LOG / "emergence/generations.jsonl").open("r+b").truncate(10),
    "adapter deleted": lambda: delete(ADAPTERS),
    "adapter replaced": lambda: (ADAPTERS.rename("elsewhere"), ADAPTERS.mkdir()),
}

def act(**now):
    file = Path("act.json")
    wanted = json.loads(file.read_text()) if file.exists() else {}
    if wanted and all(wanted[key] == value for key, value in now.items()):
        file.unlink()
        if wanted["action"] == "raise":
            raise RuntimeError("broken")
        elif wanted["action"] in ACTIONS:
            ACTIONS[wanted["action"]]()
        else:
            os.kill(os.getpid(), getattr(signal, wanted["action"]))

class Acting(Watcher):
    def phase(self, step, phase): act(hook=phase, step=step)

@hookimpl
def retrain_watch_run(context): return Acting()

@hookimpl
def retrain_groups_scored(run, groups): act(hook="groups_scored", step=groups.step)

@hookimpl
def retrain_step_end(run, metrics):
    counted["steps"] += 1
    act(hook="step_end", step=metrics["step"])

@hookimpl
def retrain_extra_metrics(groups):
    if groups is None:
        return None
    act(hook="extra_metrics", step=groups.step)
    return {"counted": counted["steps"]}

@hookimpl
def retrain_save_state(run): return {"counting": dict(counted)}

@hookimpl
def retrain_load_state(run, state): counted.update(state["counting"])

@hookimpl
def retrain_run_end(run, error): counted["steps"] = 0
"""
SWALLOWING = """
from dataclasses import replace
from toy_parts import Options, ToyBackend

class Swallowing(ToyBackend):
    def sample(self, requests, params):
        try:
            from counting import act
            act(hook="inside", step=0)
        except BaseException:
            pass
        return super().sample(requests, params)

def create(context): return Swallowing(replace(context, params=Options()))
"""


@pytest.fixture
def run(command, toy_arguments, distribution, tmp_path):
    """`run("--lr", "1")`: a short run of the toys; `run(act={...})` lets the plugin act once."""
    distribution("retrain-counting", {"counting": COUNTING, "swallowing": SWALLOWING}, entry="counting")
    base = [*toy_arguments, "--max-steps", "4", "--save-every", "2"]
    base += ["--eval-examples", "3", "--eval-every", "2", "--eval-samples", "2"]

    def call(*arguments, act=None):
        if act:
            (tmp_path / "act.json").write_text(json.dumps(act))
        return command(*([] if "--resume" in arguments else base), *arguments)

    return call


@pytest.fixture
def never(run, tmp_path, tmp_path_factory):
    """The uninterrupted run."""

    def make(folder):
        assert run("--log-dir", "never").code == 0
        (tmp_path / "never").rename(folder / "never")

    return made_once(tmp_path_factory, "toy-run", make) / "never"


def contents(folder):
    """Every file and its content, without the bytecode that Python caches when it imports a plugin."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def manifest(folder, log=LOG):
    return json.loads((folder / log / "run.json").read_text())


def untimed(file):
    lines = map(json.loads, file.read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.endswith("time_s")} for line in lines]


def check_same(ours, theirs):
    assert untimed(ours / "metrics.jsonl") == untimed(theirs / "metrics.jsonl")
    assert (ours / "eval.jsonl").read_bytes() == (theirs / "eval.jsonl").read_bytes()
    assert contents(ours / "emergence") == contents(theirs / "emergence")
    for name in ("logits.json", "trained.json"):
        assert (ours / "adapter/final" / name).read_bytes() == (theirs / "adapter/final" / name).read_bytes()


PLACES = [("eval", -1), ("step_end", -1), ("eval", 1), ("eval", 3)]
HOOKS = ("sampling", "scoring", "groups_scored", "extra_metrics", "training", "step_end")
PLACES += [(hook, step) for hook in HOOKS for step in (0, 1, 2, 3)]
ENDINGS = [(*place, action) for action in ("SIGTERM", "raise") for place in PLACES]
TRAINER_STATE = {"step", "example_idx", "total_correct", "total_completions", "checkpoint_name", "sepa"}
TRAINER_STATE |= {"current_batch_size", "current_group_size"}
QUICK = [("sampling", 3, "SIGTERM"), ("scoring", 1, "raise"), ("training", 2, "SIGTERM"), ("step_end", 3, "SIGTERM")]


@pytest.mark.parametrize(("hook", "step", "action"), slow_or_long(ENDINGS, *QUICK))
def test_stopped_or_broken_anywhere_it_continues_as_the_same_run(hook, step, action, run, never, tmp_path):
    result = run(act={"hook": hook, "step": step, "action": action})
    if (tmp_path / "act.json").exists():
        (tmp_path / "act.json").unlink()
        assert hook == "training"  # no group of that step could teach anything
        assert result.code == 0
        return
    assert result.code == (75 if action == "SIGTERM" else 1), result.err
    assert manifest(tmp_path)["status"] == ("stopped" if action == "SIGTERM" else "failed")
    if (hook, step, action) == ("sampling", 3, "SIGTERM"):
        state = json.loads((tmp_path / LOG / "trainer_state.json").read_text())
        assert set(state) == TRAINER_STATE
        assert (state["step"], state["example_idx"], state["checkpoint_name"]) == (2, 6, "checkpoint_step_3")
    again = run("--resume", LOG)
    assert again.code == 0, again.err
    check_same(tmp_path / LOG, never)
    ending = manifest(tmp_path)
    assert ending["status"] == "done"
    assert ending["started"] <= ending["ended"]
    assert "resumed_at_step" in ending


def test_a_swallowed_stop_is_raised_again(run, tmp_path):
    result = run("--backend", "swallowing.create", act={"hook": "inside", "step": 0, "action": "SIGTERM"})
    assert result.code == 75, result.err
    assert manifest(tmp_path)["status"] == "stopped"


def test_a_finished_run_is_left_as_it_is_and_can_be_extended(run, never, tmp_path):
    assert run("--max-steps", "2").code == 0
    before = contents(tmp_path / LOG)
    result = run("--resume", LOG)
    assert (result.code, result.err) == (0, "")
    assert "Already complete: 2 steps are done" in result.out
    assert contents(tmp_path / LOG) == before
    assert run("--resume", LOG, "--max-steps", "4").code == 0
    check_same(tmp_path / LOG, never)


@pytest.mark.long
def test_a_run_that_died_at_its_end_is_brought_to_it(run, never, tmp_path):
    assert run().code == 0
    (tmp_path / LOG / "run.json").write_text(json.dumps(manifest(tmp_path) | {"status": "running"}))
    (tmp_path / LOG / "trainer_state.json").unlink()
    assert run("--resume", LOG).code == 0
    check_same(tmp_path / LOG, never)
    assert manifest(tmp_path)["status"] == "done"
    assert (tmp_path / LOG / "trainer_state.json").exists()


def test_every_key_that_differs_is_named_and_nothing_is_touched(run, tmp_path):
    assert run("--max-steps", "2").code == 0
    before = contents(tmp_path / LOG)
    changed = ("--resume", LOG, "--lr", "1", "--group-size", "8", "--max-steps", "3", "--seed", "9")
    result = run(*changed)
    assert (result.code, codes_in(result.err)) == (2, ["resume.changed-key"] * 3)
    for key in ("training.lr was", "training.group_size was 4 and is now 8", "training.seed was 1 and is now 9"):
        assert key in result.err
    assert contents(tmp_path / LOG) == before
    result = run(*changed, "--resume-anyway")
    assert result.code == 0, result.err
    assert [line["step"] for line in untimed(tmp_path / LOG / "metrics.jsonl")] == [-1, 0, 1, 2]


@pytest.mark.long
def test_an_option_of_the_backend_may_change_where_the_backend_says_so(run, tmp_path):
    assert run("--max-steps", "2").code == 0
    free = ("--resume", LOG, "--max-steps", "3", "--set", "backend.options.patience_s=1.0")
    result = run(*free, "--set", "backend.options.step_size=2.0")
    assert result.code == 2
    assert "backend.options was {} and is now {'step_size': 2.0}" in result.err
    assert run(*free).code == 0
    assert manifest(tmp_path)["config"]["backend"]["options"] == {"patience_s": 1.0}


@pytest.mark.parametrize(
    ("before", "may_change"),
    [
        ({"backend": "local", "devices": "cpu", "options": {"parallel": "replicate"}}, True),
        ({"backend": "local", "devices": "gpu:0", "options": {}}, False),
        ({"backend": "local", "devices": "cpu", "options": {"of another version": 1}}, False),
        ({"backend": "toy", "devices": "cpu", "options": {}}, False),
    ],
)
def test_a_backend_says_which_devices_are_as_good(before, may_change, load):
    config, problems = load('[backend]\ndevices = "cpu,cpu"\n[backend.options]\nparallel = "replicate"')
    assert not problems
    free = interchangeable(config, {"config": {"backend": before}}, load_plugins({}))
    assert free == (PATHS if may_change else frozenset())


@pytest.mark.long
def test_a_drawn_seed_stays_the_seed_of_the_run(run, tmp_path):
    assert run("--seed", "-1", act={"hook": "sampling", "step": 2, "action": "SIGTERM"}).code == 75
    seed = manifest(tmp_path)["seed"]
    assert run("--resume", LOG).code == 0
    assert manifest(tmp_path)["seed"] == seed
    assert run("--seed", str(seed), "--log-dir", "again").code == 0
    check_same(tmp_path / LOG, tmp_path / "again")


def test_a_folder_that_is_not_a_run_is_refused_and_nothing_is_created(run, tmp_path):
    (tmp_path / "retrain.toml").write_text("")
    before = contents(tmp_path)
    for folder in ("nowhere", ".", "too-long" * 50):
        result = run("--resume", folder)
        assert result.code == 2
        assert "give the log_dir of a run that had started" in result.err
    assert contents(tmp_path) == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.long
def test_checkpoints_outside_of_the_run_folder_are_found_and_never_mixed_up(run, tmp_path):
    elsewhere = ("--adapter-path", "weights")
    assert run(*elsewhere, act={"hook": "sampling", "step": 3, "action": "SIGTERM"}).code == 75
    assert run("--resume", LOG).code == 0
    mine = contents(tmp_path / "weights")
    assert run(*elsewhere, "--log-dir", "logs/other", "--max-steps", "2").code == 0
    assert contents(tmp_path / "weights.1") == mine  # not overwritten, and out of the other run's way
    result = run("--resume", LOG, "--max-steps", "6", act=None)
    started = [manifest(tmp_path, log)["started"] for log in (LOG, "logs/other")]
    if started[0] != started[1]:
        assert result.code == 2
        assert "is a checkpoint of the run that started at" in result.err
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "weights.1").rename(tmp_path / "weights")
    assert run("--resume", LOG, "--max-steps", "6").code == 0


def test_only_the_last_and_the_best_checkpoints_stay(run, never, tmp_path):
    keep = ("--save-every", "1", "--keep-last", "1", "--keep-best", "1", "--keep-best-metric", "mean_reward")
    assert run(*keep).code == 0
    rewards = {line["step"] + 1: line["mean_reward"] for line in untimed(never / "metrics.jsonl") if line["step"] >= 0}
    del rewards[4]  # that one is `final`
    best = max(rewards, key=lambda step: (rewards[step], step))
    kept = {f"checkpoint_step_{best}", "checkpoint_step_3", "final"}
    assert {path.name for path in (tmp_path / LOG / "adapter").iterdir()} == kept
    check_same(tmp_path / LOG, never)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_continued(run, never, tmp_path):
    assert run("--save-every", "1", act={"hook": "sampling", "step": 3, "action": "raise"}).code == 1
    adapters = tmp_path / LOG / "adapter"
    (adapters / "checkpoint_step_3/logits.json").write_bytes(b"")
    assert run("--resume", LOG).code == 0
    check_same(tmp_path / LOG, never)
    assert (adapters / ".checkpoint_step_3.damaged/logits.json").read_bytes() == b""


SAVED = "logs/train.rescued"
LOSSES = [("deleted", "scoring", 2, 2), ("all deleted", "recording", 1, 1), ("moved", "checkpoint", 2, 2)]
LOSSES += [("replaced", "scoring", 0, 0), ("one deleted", "checkpoint", 4, 4)]


@pytest.mark.parametrize(("action", "phase", "step", "num_lines"), slow_or_long(LOSSES, LOSSES[0]))
def test_the_run_ends_and_continues_from_the_folder_next_to_it(action, phase, step, num_lines, never, run, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / SAVED).write_text("of somebody else")
    result = run(act={"hook": phase, "step": step, "action": action})
    assert result.code == 1
    assert "Metrics saved" not in result.out
    assert "was deleted, moved, replaced or cut during the run" in result.err
    saved = Path(f"{SAVED}.1" if action != "all deleted" else SAVED)
    assert f"the state of the run is saved in {saved}" in result.err
    assert f"`retrain --resume {saved}` continues there" in result.err
    assert len(untimed(tmp_path / saved / "metrics.jsonl")) >= num_lines
    assert json.loads((tmp_path / saved / "run.json").read_text())["status"] == "failed"
    assert (tmp_path / saved / "inputs/files.json").exists()
    again = run("--resume", str(saved))
    assert "no hashes" not in again.err
    assert again.code == 0, again.err
    for name in ("metrics.jsonl", "emergence/generations.jsonl", "emergence/steps.jsonl"):
        assert untimed(tmp_path / saved / name) == untimed(never / name)
    for name in ("logits.json", "trained.json"):
        there = (never / "adapter/final" / name).read_bytes()
        assert (tmp_path / saved / "adapter/final" / name).read_bytes() == there


def test_a_file_that_is_cut_is_told_too(run, tmp_path):
    result = run(act={"hook": "scoring", "step": 2, "action": "cut"})
    assert result.code == 1
    assert f"{LOG}/emergence/generations.jsonl: was deleted, moved, replaced or cut" in result.err
    assert len(untimed(tmp_path / SAVED / "metrics.jsonl")) == 3  # the first is of the evaluation


@pytest.mark.long
@pytest.mark.parametrize("action", ["adapter deleted", "adapter replaced"])
def test_a_checkpoint_folder_is_missed_at_the_next_checkpoint(action, run, tmp_path):
    result = run(act={"hook": "sampling", "step": 2, "action": action})
    assert result.code == 1
    assert f"{LOG}/adapter: was deleted, moved, replaced or cut during the run" in result.err
    assert f"fix: move it to {LOG}/adapter, then `retrain --resume {LOG}`" in result.err
    shutil.rmtree(tmp_path / LOG / "adapter", ignore_errors=True)
    (tmp_path / LOG / "adapter.rescued").rename(tmp_path / LOG / "adapter")
    assert run("--resume", LOG).code == 0
    assert [line["step"] for line in untimed(tmp_path / LOG / "metrics.jsonl")] == [-1, 0, 1, 2, 3]
