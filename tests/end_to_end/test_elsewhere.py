"""A run is opened from any folder: its record says where its inputs are, also after it was renamed, copied or moved."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.records.identity.inputs import declared_sorts, named_inputs
from retrain.records.manifest import public_values
from retrain.records.run import Run
from retrain.run.check import identity_of
from retrain.run.configure import Checked, load_checked
from retrain.run.opened import subject_config
from retrain.run.resume_plan import plan_resume
from retrain.run.subject import find_subject
from retrain.run.tables import registered_tables
from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.running import retrain
from tests.kit.shared import first_or_long, made_once

SMELL = re.compile(r"path|folder|file|_dir|module|adapter|model", re.IGNORECASE)
TEXTS = re.compile(r"\bstr\b|dict\[str, typing.Any")
NAMED_SETS = ("countdown", "dapo-math", "deepscaler", "files", "gsm8k", "hub")
PROJECT, RUN = "pröject one", "logs/first run"
TOML = """
[model]
model = "models/tiny"
lora_rank = 2
[data]
source = "files"
path = "data/*.jsonl"
[reward]
type = "custom"
custom_module = "rewards/score.py"
[algorithm]
advantage_mode = "my_credit.centred"
transform_mode = "none"
[eval]
examples = 2
samples = 1
[eval.sets.hard]
path = "held/hard.jsonl"
[training]
max_steps = 1
batch_size = 2
group_size = 4
max_tokens = 8
temperature = 1.0
seed = 3
[scoring]
audit = "off"
workers = 1
[backend]
devices = "cpu"
adapter_path = "logs/first run/ckpt"
[logging]
log_dir = "logs/first run"
"""
CREDIT = """
def centred(rewards, params):
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
"""


def write_project(folder: Path) -> None:
    """A project whose every input is named by a relative path, or by dots."""
    shutil.copytree(BUILTIN_MODELS["tiny"], folder / "models" / "tiny")
    for name, number in (("data/a", 8), ("data/b", 9), ("held/hard", 3)):
        rows = [{"prompt": f"What is {n} + {number}?", "answer": str(n + number)} for n in range(number)]
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "rewards").mkdir()
    (folder / "rewards" / "score.py").write_text(
        "from lengths import length\n\ndef score(response, reference):\n    return float(length(response) % 2)\n"
    )
    (folder / "rewards" / "lengths.py").write_text("def length(text):\n    return len(text)\n")
    (folder / "my_credit.py").write_text(CREDIT)
    (folder / "my.toml").write_text(TOML, encoding="utf-8")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        write_project(folder)
        shutil.copyfile(folder / "my.toml", folder / "retrain.toml")
        outcome = retrain("--set", "logging.log_dir=logs/first run", cwd=folder)
        assert outcome.code == 0, outcome.err

    return made_once(tmp_path_factory, PROJECT, make)


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change. The original is out of reach, as on another machine."""
    folder = tmp_path / "cöpy of it"
    shutil.copytree(finished, folder)
    for file in (folder / RUN / "run.json", folder / RUN / "inputs" / "files.json"):
        text = file.read_text(encoding="utf-8")
        for spelling in (str(finished), json.dumps(str(finished))[1:-1]):
            text = text.replace(spelling, "/another machine")
        file.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder: one with files and modules of the same names, and other content."""
    folder = tmp_path / "elsewhere"
    (folder / "data").mkdir(parents=True)
    (folder / "rewards").mkdir()
    (folder / "data" / "a.jsonl").write_text('{"prompt": "no", "answer": "no"}\n')
    (folder / "rewards" / "score.py").write_text("def score(response, reference):\n    return 9.0\n")
    (folder / "my_credit.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name in ("my_credit", "lengths") or name.startswith("retrain_custom_reward"):
            del sys.modules[name]


def resumable(run: Path, *flags: str) -> Checked:
    """The configuration of a resume, whose code, data and model must be those of the run."""
    plugins = load_plugins()
    checked = load_checked(["--resume", str(run), *flags], plugins)
    identity = identity_of(checked.config, plugins, checked.tables)
    plan = plan_resume(run, checked.config, checked.keys, identity, plugins)
    assert not plan.accepted, plan.accepted
    assert not plan.changes, plan.changes
    assert plan.checkpoint is not None
    return checked


def refusal(run: Path, *flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_checked(["--resume", str(run), *flags], load_plugins())
    return "\n".join(map(str, raised.value.problems))


def inputs_of(config: Config) -> dict[str, str]:
    sets: dict[str, Any] = config.value("eval.sets", {})
    return {
        "model": config.model.model,
        "data": config.data.path,
        "reward": config.value("reward.custom_module", ""),
        "set": sets["hard"]["path"],
        "log_dir": str(Path(config.logging.log_dir).resolve()),
        "adapters": config.backend.adapter_path,
    }


def placed_in(folder: Path, run: str = RUN) -> dict[str, str]:
    places = {"model": "models/tiny", "data": "data/*.jsonl", "reward": "rewards/score.py", "set": "held/hard.jsonl"}
    return {name: str(folder / place) for name, place in (places | {"log_dir": run, "adapters": f"{run}/ckpt"}).items()}


def test_a_run_records_each_path_as_written_absolute_and_relative(finished: Path) -> None:
    manifest = Run(finished / RUN).started_manifest()
    places = {".".join(each["keys"]): each for each in manifest["paths"]["keys"]}
    assert set(places) == {
        *("model.model", "data.path", "reward.custom_module", "eval.sets.hard.path"),
        *("backend.adapter_path", "logging.log_dir"),
    }
    for path, place in places.items():
        assert place["absolute"] == str(finished / place["written"]), path
        assert (finished / RUN / place["relative"]).resolve() == Path(place["absolute"]).resolve()
    assert manifest["paths"]["folder"] == {"absolute": str(finished), "relative": "../.."}
    assert manifest["config"]["data"]["path"] == "data/*.jsonl"


def test_a_resume_from_another_folder_uses_the_record_and_nothing_of_that_folder(
    finished: Path, elsewhere: Path
) -> None:
    checked = resumable(finished / RUN)
    assert inputs_of(checked.config) == placed_in(finished)
    named = load_checked([str(finished / "my.toml"), "--resume", str(finished / RUN)], load_plugins())
    assert inputs_of(named.config) == placed_in(finished)  # its file may be named as well
    assert Path(sys.modules["my_credit"].__file__ or "").parent == finished
    manifest = Run(finished / RUN).started_manifest()
    recorded = {name: table for name, table in manifest["config"].items() if name != "training"}
    assert {name: each for name, each in public_values(checked.config).items() if name != "training"} == recorded


def test_a_run_that_was_copied_with_its_inputs_and_renamed_uses_the_copies(
    finished: Path, elsewhere: Path, tmp_path: Path
) -> None:
    """The originals are still there: those next to the run are the same files, and count."""
    copied = tmp_path / "copy"
    shutil.copytree(finished, copied)
    (copied / RUN).rename(copied / "logs" / "renamed")
    assert inputs_of(resumable(copied / "logs" / "renamed").config) == placed_in(copied, "logs/renamed")


def test_of_two_candidates_the_one_that_the_run_read_counts(finished: Path, elsewhere: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(finished, copied)
    (copied / "data" / "a.jsonl").write_text('{"prompt": "another", "answer": "1"}\n')
    (copied / "my_credit.py").write_text("raise RuntimeError('not this one')\n")
    config = resumable(copied / RUN).config
    assert config.data.path == str(finished / "data" / "*.jsonl")
    assert config.model.model == str(copied / "models" / "tiny")
    assert config.folder == str(finished)


def test_another_machine_and_a_link(project: Path, elsewhere: Path) -> None:
    (elsewhere / "link").symlink_to(project / RUN)
    assert inputs_of(resumable(Path("link")).config)["model"] == str(project / "models" / "tiny")
    assert inputs_of(resumable(project / RUN).config) == placed_in(project)
    assert Run(project / RUN).adapters == project / RUN / "ckpt"


def test_a_run_that_was_taken_away_from_its_inputs_goes_on_in_their_folder(
    project: Path, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "far" / "away" / "archive"
    run.parent.mkdir(parents=True)
    (project / RUN).rename(run)
    assert "--set model.model=" in refusal(run)
    monkeypatch.chdir(project)
    assert inputs_of(resumable(run).config) == {**placed_in(project), "log_dir": str(run), "adapters": f"{run}/ckpt"}


@pytest.mark.parametrize(
    ("moved", "flag", "entry"),
    first_or_long(
        [
            ("models/tiny", "--set model.model=", "model"),
            ("data", "--set data.path=", "data"),
            ("rewards/score.py", "--set reward.custom_module=", "reward"),
        ]
    ),
)
def test_an_input_that_moved_is_named_on_the_command_line(
    project: Path, elsewhere: Path, moved: str, flag: str, entry: str
) -> None:
    (elsewhere / "new place").mkdir()
    target = elsewhere / "new place" / Path(moved).name
    shutil.move(project / moved, target)
    if entry == "reward":
        shutil.move(project / "rewards" / "lengths.py", target.parent)
    told = refusal(project / RUN)
    assert flag in told
    assert "run.json" in told
    place = f"new place/{target.name}" + "/*.jsonl" * (entry == "data")
    words = ["--set", f"{flag[6:]}{place}"]
    assert inputs_of(resumable(project / RUN, *words).config)[entry] == str(elsewhere / place)
    file = next(iter(target.glob("[a-c]*.json*"))) if target.is_dir() else target
    file.write_text(file.read_text() + "\n ")
    told = refusal(project / RUN, *words)
    assert "recorded" in told
    assert place in told


def test_only_what_is_needed_must_be_there(project: Path, elsewhere: Path) -> None:
    """Sampling reads no data; evaluation does, and is not given another file in its place."""
    shutil.rmtree(project / "data")
    config = subject_config(find_subject(project / RUN), load_plugins()).config
    config.refuse_lost("model.model")
    with pytest.raises(ConfigError, match=r"--set data\.path="):
        config.refuse_lost("data")
    (project / "data").mkdir()
    (project / "data" / "a.jsonl").write_text('{"prompt": "another", "answer": "1"}\n')
    with pytest.raises(ConfigError, match="is another"):
        subject_config(find_subject(project / RUN), load_plugins()).config.refuse_lost("data.path")


def test_a_path_on_the_command_line_means_the_current_folder(finished: Path, elsewhere: Path) -> None:
    found = subject_config(find_subject(finished / RUN), load_plugins(), ["--data-path", "data/a.jsonl"]).config
    assert Path(found.data.path).resolve() == elsewhere / "data" / "a.jsonl"
    told = refusal(finished / RUN, "--data-path", "data/a.jsonl")
    assert "data/a.jsonl" in told
    assert "recorded" in told


def test_code_inside_a_run_folder_is_not_imported_by_its_record(project: Path, elsewhere: Path) -> None:
    """A run starts outside its own folder: a record that says otherwise was made by somebody else."""
    file = project / RUN / "run.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    manifest["paths"]["folder"] = {"absolute": "/nowhere", "relative": "."}
    file.write_text(json.dumps(manifest), encoding="utf-8")
    (project / RUN / "json.py").write_text("raise RuntimeError")
    before = len(sys.path)
    with pytest.raises((ConfigError, RuntimeError)):  # its own my_credit is not found, that of this folder is no good
        load_checked(["--resume", str(project / RUN)], load_plugins())
    assert str(project / RUN) not in sys.path[: len(sys.path) - before + 1]


NOT_PATHS = {  # keys that sound like a path, and why they are none
    "lora.targets": "names of layers of the model",
    "plugins.search_paths": "modules, found in the recorded folder",
    "reward.judge_model": "a name at a service",
    "tinker base_model": "a name at a service",
    **dict.fromkeys((f"{source} subset" for source in NAMED_SETS), "a folder below [data] path"),
}


def test_every_key_that_sounds_like_a_path_says_so_or_has_a_reason() -> None:
    plugins = load_plugins()
    models = {f"{table}.": entry.model for table, entry in registered_tables(plugins).items()}
    for kind in (kind for kind in Kind if kind is not Kind.LAUNCHER):  # a launcher's options are about the machine
        for entry in plugins.registered(kind):
            models |= {f"{entry.spec.name} ": model} if (model := entry.spec.load_params()) else {}
    undeclared = {
        f"{head}{name}"
        for head, model in models.items()
        for name, info in model.model_fields.items()
        if SMELL.search(f"{name} {info.description}") and TEXTS.search(str(info.annotation))
        if (info.alias or name) not in declared_sorts(model) and head != "campaign."
        if not (isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("names"))
    }
    assert undeclared == NOT_PATHS.keys(), "add reads= or is_path= to the key, or a reason to NOT_PATHS"


def test_a_key_of_a_plugin_is_followed_where_it_says_that_it_is_a_path(finished: Path, elsewhere: Path) -> None:
    class Options(Table):
        words: str = key("", "Stop words.", reads="data")
        cache: list[str] = key([], "Caches.", is_path=True)
        note: str = key("", "Not one.")

    tables = {"stop": TableEntry(model=Options)}
    given = Options(words=str(finished / "held" / "hard.jsonl"), cache=["here", "there"], note="data/a.jsonl")
    found = named_inputs(Config(tables={"stop": given}), tables, load_plugins())
    assert [(each.keys, each.sort, each.value) for each in found] == [
        (("stop", "words"), "data", given.words),
        (("stop", "cache", "0"), "path", "here"),
        (("stop", "cache", "1"), "path", "there"),
    ]


@pytest.mark.slow
def test_a_campaign_that_was_copied_renamed_and_robbed_of_its_data_goes_on_elsewhere(
    tmp_path: Path, elsewhere: Path
) -> None:
    project = tmp_path / "the project"
    project.mkdir()
    write_project(project)
    campaign = (
        "[campaign]\nseeds = [1, 2]\nconditions = [{advantage_mode = 'my_credit.centred', transform_mode = 'none'}]\n"
    )
    text = TOML.replace('advantage_mode = "my_credit.centred"\ntransform_mode = "none"\n', "")
    text = text.replace('"logs/first run/ckpt"', '"ckpt"').replace('"logs/first run"', '"logs/it"')
    (project / "campaign.toml").write_text(text + campaign, encoding="utf-8")
    assert (outcome := retrain("campaign.toml", cwd=project)).code == 0, outcome.err
    moved = tmp_path / "moved"
    project.rename(moved)
    (moved / "logs" / "it").rename(moved / "logs" / "renamed")
    lost = "my_credit.centred+none_s2"
    shutil.rmtree(moved / "logs" / "renamed" / "runs" / lost)
    shutil.rmtree(moved / "ckpt" / lost)
    (moved / "data").rename(tmp_path / "data")
    outcome = retrain("--resume", "../moved/logs/renamed", cwd=elsewhere)
    assert (outcome.code, "--set data.path=" in outcome.err) == (2, True), outcome.err
    outcome = retrain("--resume", "../moved/logs/renamed", "--data-path", "../data/*.jsonl", cwd=elsewhere)
    assert outcome.code == 0, outcome.err + outcome.out
    assert (moved / "ckpt" / lost / "final").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("--resume", "{run}", "--max-steps", "2"),
        ("eval", "{run}"),
        ("sample", "{run}", "--prompts", "prompts.txt", "--max-tokens", "3"),
        ("export", "{run}", "--format", "vllm"),
        ("export", "{run}", "--format", "transformers", "--out", "merged", "--no-check"),
        ("replay", "{run}", "--step", "0", "--try", "loss=ppo"),
        ("pack", "{run}", "--out", "run.pack"),
        ("signal", "{run}"),
        ("credit", "{run}"),
        ("audit", "{run}/config.toml"),
        ("status", "{run}", "--resume"),
    ],
    ids=lambda words: words[0].strip("-"),
)
def test_every_command_opens_the_run_from_another_folder(
    project: Path, elsewhere: Path, words: tuple[str, ...]
) -> None:
    (elsewhere / "prompts.txt").write_text("What is 1 + 1?\n")
    run = f"../{project.name}/{RUN}"
    outcome = retrain(*(word.format(run=run) for word in words), cwd=elsewhere)
    accepted = (0, 1) if words[0] == "audit" else (0,)  # this reward fails its audit, once it is found
    assert outcome.code in accepted, outcome.err
    assert "not this one" not in outcome.err
