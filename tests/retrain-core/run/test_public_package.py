"""Every name of the public `retrain` package is a name here, or the user is told its successor."""

import re
import tomllib
from pathlib import Path

import pytest

from retrain.campaign.load import load_campaign
from retrain.kernel.config.load import all_keys
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.configure import load_with_problems
from retrain.run.public_package import PREFIXES, missing_name, note_on, note_on_entry
from retrain.run.tables import registered_tables

NAMES = tomllib.loads(Path(__file__).with_name("public_package.toml").read_text(encoding="utf-8"))
KEYS = [f"{table}.{name}" for table, names in NAMES["keys"].items() for name in names.split()]
OPTIONS = [f"backend.options.{name}" for name in NAMES["options"].split()]
INSTALLED = load_plugins({})


def problems_of(file: Path, text: str):
    file.write_text(text, encoding="utf-8")
    return load_with_problems([str(file)], INSTALLED)[2]


def test_every_key_option_and_part_is_one_here_or_its_successor_is_named():
    keys = all_keys(registered_tables(INSTALLED))
    known = {key.path for key in keys} | {f"{key.table}.{alias}" for key in keys for alias in key.aliases}
    untold = [path for path in KEYS if path not in known and not note_on(path)]
    assert [path for path in untold if not note_on(path.partition(".")[0])] == []
    models = filter(None, (entry.spec.load_params() for entry in INSTALLED.registered(Kind.BACKEND)))
    own = {f"backend.options.{name}" for model in models for name in model.model_fields}
    assert [path for path in OPTIONS if path not in own and not note_on(path)] == []
    assert [path for path in known | own if note_on(path)] == []  # a row that no user can meet
    for kind, names in NAMES["parts"].items():
        for name in names.split():
            problem = missing_name(INSTALLED, Kind(kind), name, "here")
            assert bool(INSTALLED.find(Kind(kind), name)) == (problem is None), name
            assert problem is None or problem.fix.startswith(tuple(PREFIXES.values()))


def test_the_new_name_of_a_renamed_key_exists():
    paths = {key.path for key in all_keys(registered_tables(INSTALLED))} | {"backend.options.micro_batch_tokens"}
    notes = [note_on(name) for name in (*KEYS, *OPTIONS, "transform entropy_mask")]
    renamed = [note for note in notes if note.startswith(PREFIXES["renamed"])]
    named = [".".join(found) for note in renamed for found in re.findall(r"\[([\w.]+)\] (\w+)", note)]
    assert len(named) >= 6
    assert set(named) <= paths


def test_the_loader_tells_each(tmp_path):
    file = tmp_path / "old.toml"
    told = {p.where.removeprefix(f"{file}:"): p.fix for p in problems_of(file, NAMES["old"])}
    assert "2 [algorithm] advantage_mode" not in told  # a name here, too, for another thing: the next note says so
    renamed, gone = PREFIXES["renamed"], PREFIXES["none"]
    assert told["8 [training] batch_advantage_norm"].startswith(f"{renamed}[algorithm] batch_norm")
    assert 'write "reinforce_pp_baseline" here' in told["8 [training] batch_advantage_norm"]
    assert told["7 [training] clip_eps"].startswith(f"{renamed}[algorithm] clip_eps")
    for place in ("3 [algorithm] transform_mode", "6 [training] tl_grpo", "11 [backend] backend", "19 [echo]"):
        assert told[place].startswith(gone), place
    assert told["17 [inference] engine"].startswith(gone)
    options = problems_of(file, "[backend.options]\nliger_kernel = true\ncolour = 1\n")
    fixes = [problem.fix for problem in options if "backend" in problem.where]
    assert fixes[0].startswith(note_on("backend.options.liger_kernel"))
    assert fixes[1].startswith("known: ")


def test_a_condition_tells_each_under_its_flat_name(tmp_path):
    (tmp_path / "old.toml").write_text(NAMES["campaign"], encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_campaign([str(tmp_path / "old.toml")], INSTALLED)
    told = {p.where.partition("condition 1 ")[2]: p.fix for p in caught.value.problems}
    assert told["clip_ratio_c"] == note_on("training.clip_ratio_c")
    assert told["clip_ratio_c"].startswith(PREFIXES["renamed"] + "[algorithm] dual_clip")
    assert told["echo_weight"] == note_on("echo") != ""
    assert told["batch_advantage_norm"] == note_on("training.batch_advantage_norm") != ""
    assert note_on_entry("no_such_key") == ""


CLIPS = {  # a run's own config.toml has both numbers
    **{f"clip_eps = 0.2\n{more}": not more for more in ("", "clip_eps_high = 0.0\nloss = 'importance_sampling'\n")},
    "clip_eps_high = 0.28\n": True,
    "clip_eps = 0.3\nloss = 'ppo'\n": False,
    "": False,
}


@pytest.mark.parametrize(("text", "is_refused"), CLIPS.items())
def test_a_clip_without_a_loss_is_no_silent_nothing(tmp_path, text, is_refused):
    problems = [p for p in problems_of(tmp_path / "clip.toml", f"[algorithm]\n{text}") if "clip" in p.where]
    assert bool(problems) is is_refused
    assert all('loss = "ppo"' in p.fix and ":2 [algorithm] clip_eps" in p.where for p in problems)
