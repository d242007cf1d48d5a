"""A campaign to which seeds and conditions are added runs only these; anything else that changed is told first."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from retrain.campaign.load import load_campaign
from retrain.campaign.session import run_campaign
from retrain.kernel.errors import ConfigError, ResumeError, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.records.files import RunLock
from retrain.records.identity.copies import write_inputs
from retrain.run.check import identity_of
from retrain.run.configure import load_checked
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions, record
from tests.kit.problems import codes_in, refused

ONE = conditions("grpo+toy_flat")
TWO = ONE + conditions("toy_raw+toy_flat")
THREE = TWO + conditions("grpo+toy_index")
PLAN = '[campaign.plan]\nhypothesis = "better"\n'


def test_without_a_log_dir_a_campaign_has_a_folder_under_logs(play):
    def folders():
        return set(Path("logs").glob("campaign_*"))

    play("seeds = [1, 2]", ONE, logs=True)
    (first,) = folders()
    assert play("seeds = [1, 2]\nretries = 3\nparallel = true\nmax_workers = 2", ONE, logs=True) == []  # run otherwise
    assert len(play("seeds = [1, 2]", ONE, logs=True, is_new=True)) == 2
    (second,) = folders() - {first}
    before = (first / "manifest.json").read_bytes()
    assert play("seeds = [1, 2, 3]", ONE, logs=True) == ["grpo+toy_flat_s3"]  # the latest grows
    assert (manifest(second)["seeds"], (first / "manifest.json").read_bytes()) == ([1, 2, 3], before)


def test_a_given_folder_is_the_campaigns(play):
    Path("out").mkdir()
    Path("out/notes.txt").write_text("mine")
    play("seeds = [1, 2]", ONE)
    assert Path("out/notes.txt").read_text() == "mine"
    with pytest.raises(ResumeError, match=r"seeds was \[1, 2\] and is now \[3\]") as caught:
        play("seeds = [3]", ONE)
    assert codes_in(caught) == ["campaign.different"]
    with pytest.raises(ResumeError, match=r"(?s)training\.lr was 4e-05 and is now 0\.5.*nothing was changed"):
        play("seeds = [1, 3]", ONE, arguments=("--resume", "out", "--lr", "0.5"))
    assert not Path("out.1").exists()
    assert refused(play, "seeds = [1]", ONE, arguments=("--resume", "out"), is_new=True) == ["campaign.resume-and-new"]
    play("seeds = [3]", ONE, is_new=True)
    assert (manifest()["seeds"], manifest("out.1")["seeds"]) == ([3], [1, 2])
    lock = RunLock(Path("out"))
    with pytest.raises(ConfigError, match="in progress"):
        play("seeds = [3]", ONE)
    lock.release()


def test_resume_of_what_is_no_campaign(play):
    Path("other").mkdir()
    for content in ("", "[]", "{}", '{"sha256": "x", "runs": [1]}', "\x00"):
        Path("other/manifest.json").write_text(content)
        assert refused(play, "seeds = [1]", ONE, arguments=("--resume", "other")) == ["campaign.not-a-campaign"]


@pytest.mark.parametrize("logs", [pytest.param(False, marks=pytest.mark.slow), True])
def test_only_added_seeds_and_conditions_run(play, capsys, logs):
    first = play("seeds = [1, 2]", logs=logs)
    assert len(first) == 4
    assert play("seeds = [1, 2]", logs=logs) == []
    assert play("seeds = [3, 2, 1]", logs=logs) == ["grpo+toy_flat_s3", "toy_raw+toy_flat_s3"]
    assert "  added: seeds 3; existing runs are not repeated\n" in capsys.readouterr().out
    assert play("seeds = [3, 2, 1]", THREE, logs=logs) == [f"grpo+toy_index_s{seed}" for seed in (3, 2, 1)]
    [folder] = Path("logs").glob("campaign_*") if logs else [Path("out")]
    content = manifest(folder)
    assert (content["num_runs"], content["status"], len(content["runs"])) == (9, "done", 9)
    assert (content["seeds"], content["conditions"][2]) == ([3, 2, 1], "grpo+toy_index")
    assert [(each["seeds"], each["conditions"]) for each in content["grown"]] == [([3], []), ([], ["grpo+toy_index"])]
    assert {entry["attempts"] for entry in content["runs"]} == {1}
    assert not Path("out.1").exists()
    assert play("seeds = [3, 2, 1]", THREE, logs=logs) == []
    assert play("seeds = [1, 2, 3, 4]", THREE, arguments=("--resume", str(folder)), logs=logs) == [
        f"{label}_s4" for label in ("grpo+toy_flat", "toy_raw+toy_flat", "grpo+toy_index")
    ]


@pytest.mark.long
def test_what_else_changed_is_told_before_anything_runs_or_moves(play):
    play("seeds = [1, 2]")
    before = manifest()
    for campaign, given, told in (
        ("seeds = [1, 2, 3]", TWO + "lr = 0.5\n", "condition toy_raw+toy_flat was set and is now absent"),
        ("seeds = [1]", TWO, "seeds was [1, 2] and is now [1]"),
        ("seeds = [1, 2]", ONE, "condition toy_raw+toy_flat was set and is now absent"),
        ("seeds = [1, 2]\ndevices_per_run = 2", TWO, "devices_per_run was 1 and is now 2"),
        ("seeds = [1, 2]", TWO + PLAN, "plan was absent and is now set"),
    ):
        with pytest.raises(ResumeError) as caught:
            play(campaign, given)
        assert codes_in(caught) == ["campaign.different"]
        assert told in str(caught.value)
        assert "runs from their first step; 4 of the 4 earlier ones are done" in str(caught.value)
    assert manifest() == before
    assert not Path("out.1").exists()
    assert len(play("seeds = [1]", is_new=True)) == 2
    assert manifest("out.1") == before


def test_under_logs_another_campaign_of_the_file_says_so(play, capsys):
    play("seeds = [1]", ONE, logs=True)
    capsys.readouterr()
    assert play("seeds = [1]", ONE, logs=True, arguments=("--lr", "0.5")) == ["grpo+toy_flat_s1"]
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith("note: another campaign than logs/campaign_")
    assert "training.lr was 4e-05 and is now 0.5; a new campaign runs all 1 runs" in told
    assert len(list(Path("logs").glob("campaign_*"))) == 2


def test_a_sealed_plan_does_not_grow_silently(play):
    play("seeds = [1, 2]", TWO + PLAN)
    sealed = manifest()["plan"]
    with pytest.raises(ResumeError, match="seeds 3 would be added") as caught:
        play("seeds = [1, 2, 3]", TWO + PLAN)
    assert codes_in(caught) == ["campaign.plan-sealed"]
    assert manifest()["seeds"] == [1, 2]
    assert len(play("seeds = [1, 2, 3]", TWO + PLAN, is_beyond_plan=True)) == 2
    content = manifest()
    assert content["plan"] == sealed
    assert (content["seeds"], content["grown"][0]["seeds"]) == ([1, 2, 3], [3])


@pytest.mark.long
def test_folders_of_an_earlier_version_continue_and_grow(play):
    """Its manifest has no `grown`, and its content lacks keys that have been added since."""
    play("seeds = [1]")
    content = json.loads(Path("out/campaign.json").read_text())
    for values in content["conditions"].values():
        del values["training.lr"], values["data.instruction"]
    Path("out/campaign.json").write_text(json.dumps(content))
    Path("out/manifest.json").write_text(json.dumps(manifest() | {"sha256": "of another version"}))
    assert play("seeds = [1]") == []
    assert play("seeds = [1, 2]") == ["grpo+toy_flat_s2", "toy_raw+toy_flat_s2"]
    Path("out/manifest.json").write_text(json.dumps(manifest() | {"sha256": "of another version"}))
    with pytest.raises(ResumeError, match=r"training\.lr was 4e-05 and is now 0\.5"):
        play("seeds = [1, 2]", arguments=("--lr", "0.5"))


@pytest.mark.long
def test_a_run_keeps_its_name_beside_one_that_differs_in_case(play):
    lower = ONE + "wandb_group = 'a'\n"
    assert play("seeds = [1]", lower) == ["grpo+toy_flat~wandb_group=a_s1"]
    [name] = play("seeds = [1]", lower + ONE + "wandb_group = 'A'\n")
    assert name.startswith("grpo+toy_flat~wandb_group=A-")


@pytest.mark.long
def test_a_damaged_content_starts_nothing(play):
    play("seeds = [1]", ONE)
    for content in ("", "[]", '{"seeds": [1]}', '{"seeds": 1, "conditions": {"a": 1}}'):
        Path("out/campaign.json").write_text(content)
        with pytest.raises(ResumeError, match=r"campaign\.json: cannot be read"):
            play("seeds = [1, 2]", ONE)
    assert not Path("out.1").exists()


GPU, CPU, UNSET = 'devices = "gpu:0"', 'devices = "cpu"', ""
WHY = "not set, and there is no GPU"


@pytest.fixture
def on(play):
    """`on("gpu:0", conditions, ...)`: play a campaign on a machine with a CPU and these GPUs."""

    def call(gpus, conditions=ONE, *, seeds="[1]", **options):
        Path("machine.txt").write_text(f"cpu {gpus}")
        return play(f"seeds = {seeds}", conditions, **options)

    return call


def written():
    """`[backend] devices` in each run's configuration file."""
    files = sorted(Path("out/configs").iterdir())
    return {file.stem: tomllib.loads(file.read_text())["backend"].get("devices") for file in files}


@pytest.mark.parametrize(("gpus", "used", "why"), [("", "cpu", WHY), ("gpu:0", "gpu:0", "not set, and it is there")])
def test_what_is_there_is_said_and_written(on, capsys, gpus, used, why):
    on(gpus, devices=UNSET)
    assert written() == {"grpo+toy_flat_s1": used}
    assert manifest()["devices"] == {"grpo+toy_flat": {"used": used, "why": why}}
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"  devices: {used} ({why})") == 2  # at the start and at the end


@pytest.mark.long
def test_devices_that_are_set_and_missing_are_an_error_before_anything_runs_or_moves(on):
    on("", devices=CPU)
    for arguments, given, devices in (((), ONE, GPU), (("--devices", "gpu:0"), ONE, CPU), ((), ONE + GPU + "\n", CPU)):
        with pytest.raises(ConfigError, match="no gpu:0"):
            on("", given, devices=devices, arguments=arguments, is_new=True)
    assert not Path("out.1").exists()
    with pytest.raises(ConfigError, match="no gpu:0"):
        on("", devices=GPU, logs=True)
    assert not Path("logs").exists()


@pytest.mark.long
def test_it_keeps_its_devices_when_it_grows_on_another_machine(on):
    on("", devices=UNSET)
    plugins = load_plugins({})
    assert tomllib.loads(Path("out/config.toml").read_text())["backend"]["devices"] == "cpu"
    run_campaign(load_campaign(["--resume", "out"], plugins), plugins)  # as `retrain --resume out` does
    assert on("", devices=UNSET) == []
    on("gpu:0", TWO, devices=UNSET, seeds="[1, 2]")
    assert set(written().values()) == {"cpu"}
    assert set(map(str, manifest()["devices"].values())) == {str({"used": "cpu", "why": WHY})}
    assert on("gpu:0", TWO, devices=CPU, seeds="[1, 2]") == []  # says what was used
    with pytest.raises(ResumeError, match=r"backend\.devices was 'cpu' and is now 'gpu:0'"):
        on("gpu:0", TWO, devices=GPU, seeds="[1, 2]")


def test_with_another_launcher_each_run_settles_its_own(on):
    ray = ("--campaign-launcher", "ray")
    on("", devices=UNSET, arguments=ray)
    assert written() == {"grpo+toy_flat_s1": None}
    assert "devices" not in manifest()
    on("", devices=GPU, arguments=ray, is_new=True)  # the cluster may have it
    assert written() == {"grpo+toy_flat_s1": "gpu:0"}


OWN = "own_advantage.signed+toy_flat"
OWN_CONDITIONS = conditions(OWN, "toy_raw+toy_flat")
ADVANTAGE = "from own_sign import SIGN\n\ndef signed(rewards_G):\n    return SIGN * rewards_G\n"
SIGN = '"""The side on which credit falls."""\n\nSIGN = 1\n'


class Recording:
    """A launcher whose runs record what they are made of, as a real one does, and end with `code`.

    `before(job)` is called before a run starts.
    """

    pid = None
    plugins: Plugins | None = None

    def __init__(self, code=0, before=lambda job: None):
        self.code, self.before = code, before
        self.started = []
        self.argv = []

    def start(self, job):
        self.before(job)
        self.started.append(job.name)
        self.argv.append(job.argv)
        plugins = self.plugins = self.plugins or load_plugins({})
        checked = load_checked([next(word for word in job.argv if word.endswith(".toml"))], plugins)
        identity = identity_of(checked.config, plugins, checked.tables)
        write_inputs(job.folder, identity)
        record(job, "done" if self.code == 0 else "stopped", identity=identity.summary())
        (job.folder / "adapter/final").mkdir(parents=True, exist_ok=True)
        return self

    def poll(self):
        return self.code

    def close(self): ...


@pytest.fixture
def run_own(play, tmp_path, monkeypatch):
    """`run_own("seeds = [1]", Recording(), *arguments)`: a campaign, one of whose conditions is code of the project."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("own_advantage", "own_sign"):  # of an earlier test
        monkeypatch.delitem(sys.modules, module, raising=False)
    Path("own_advantage.py").write_text(ADVANTAGE)
    Path("own_sign.py").write_text(SIGN)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "what is {i}?", "answer": "{i}"}}\n' for i in range(9)))
    base = ("--data-source", "files", "--data-path", "rows.jsonl")

    def call(seeds="[1, 2]", launcher=None, *, arguments=(), **options):
        chosen = launcher or Recording()
        play(f"seeds = {seeds}", OWN_CONDITIONS, arguments=(*base, *arguments), launcher=chosen, **options)
        return chosen

    return call


@pytest.mark.long
def test_the_sign_of_an_advantage_flipped_after_the_campaign(run_own, capsys):
    assert len(run_own().started) == 4
    assert run_own().started == []
    assert "Already complete: all 4 runs are done" in capsys.readouterr().out
    before = manifest()
    Path("own_sign.py").write_text(SIGN.replace("SIGN = 1", "SIGN = -1"))  # a module that the part imports
    for seeds in ("[1, 2]", "[1, 2, 3]"):
        with pytest.raises(ResumeError) as caught:
            run_own(seeds)
        told = str(caught.value)
        assert "2 of its" in told
        assert "own_sign.py:3 changed: 'SIGN = 1' is now 'SIGN = -1'" in told
        assert f"(2 runs: {OWN}_s1, done; {OWN}_s2, done)" in told
        assert "toy_raw" not in told
        assert codes_in(caught) == ["campaign.changed-inputs"]
    assert "Already complete" not in capsys.readouterr().out
    assert manifest() == before
    assert not Path("out.1").exists()
    assert run_own(arguments=("--resume-anyway",)).started == []
    told = capsys.readouterr().out
    assert "Already complete: all 4 runs are done" in told
    assert "own_sign.py:3 changed: 'SIGN = 1' is now 'SIGN = -1'" in told
    assert sorted(run_own("[1, 2, 3]", arguments=("--resume-anyway",)).started) == [f"{OWN}_s3", "toy_raw+toy_flat_s3"]
    [accepted] = manifest()["accepted"]
    assert "own_sign.py:3 changed" in accepted["changes"][0]
    assert len(run_own(is_new=True).started) == 4
    assert manifest().get("accepted") is None


def test_runs_that_were_stopped_do_not_begin_anew_with_other_code(run_own):
    with pytest.raises(RetrainError, match="4 of 4 runs failed") as failed:
        run_own("[1, 2]", Recording(75), arguments=("--campaign-retries", "0"))
    assert codes_in(failed) == ["campaign.failed-runs"]
    Path("own_advantage.py").write_text(ADVANTAGE.replace("SIGN *", "0 *"))
    with pytest.raises(ResumeError) as caught:
        run_own()
    assert "own_advantage.py:4 changed: 'return SIGN * rewards_G' is now 'return 0 * rewards_G'" in str(caught.value)
    assert f"(2 runs: {OWN}_s1; {OWN}_s2)" in str(caught.value)
    insisted = run_own(arguments=("--resume-anyway",))
    assert {argv[-2:] for argv in insisted.argv} == {("--resume-anyway", "true")}


@pytest.mark.long
def test_code_edited_while_the_campaign_goes_on_is_told(run_own, capsys):
    def edit(job):
        if job.name.endswith("_s2"):
            Path("own_sign.py").write_text(SIGN.replace("SIGN = 1", "SIGN = -1"))

    run_own("[1, 2]", Recording(before=edit))
    told = [line for line in capsys.readouterr().out.splitlines() if "changed during the campaign" in line]
    assert told == [f"note: changed during the campaign: own_sign.py  (1 run: {OWN}_s2, done)"]


def test_runs_of_an_earlier_version_are_counted_not_refused(play, capsys):
    play("seeds = [1]")
    assert play("seeds = [1, 2]") == ["grpo+toy_flat_s2", "toy_raw+toy_flat_s2"]
    told = capsys.readouterr().out
    assert "made by an earlier version that recorded no code and data: 2 runs: grpo+toy_flat_s1, done;" in told
