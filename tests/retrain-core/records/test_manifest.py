"""`run.json` and `config.toml`: enough to run it again as it was."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

import retrain
from retrain.kernel.config.load import load_config
from retrain.records.files import write_text
from retrain.records.manifest import build_manifest, config_toml

FULL = Path(__file__).parents[1] / "kernel" / "config" / "full_annotated.toml"


def reloaded(config, seed, tables, folder):
    """The configuration in `config.toml`."""
    write_text(folder / "config.toml", config_toml(config, seed=seed))
    again, problems = load_config(folder / "config.toml", tables=tables)
    assert [str(problem) for problem in problems] == []
    return again


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", ()),
        (FULL.read_text(encoding="utf-8"), ()),
        ("[training]\nlr = 1e-7\nmax_steps = 3\n", ("--lr", "2e-3", "--optim-eps", "1e-12")),
        ("[logging]\nrecorders = ['a']\nstrategic_grams = '[\"a, b\"]'\n", ("--data-opt", 'deep={"a": [1, {"b": 2}]}')),
    ],
)
def test_the_resolved_file_loads_to_the_same_configuration(text, arguments, load, tables, tmp_path):
    config, problems = load(text, *arguments)
    assert problems == []
    again = reloaded(config, 1234, tables, tmp_path)
    before, after = config.as_dict(), again.as_dict()
    assert after["training"].pop("seed") == 1234
    del before["training"]["seed"]
    assert after == before


def test_the_manifest_names_versions_origins_and_place(load, plugins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, _ = load("[training]\nlr = 1e-3\n", "--max-steps", "3", environ={"RETRAIN__TRAINING__BATCH_SIZE": "2"})
    manifest = build_manifest(config, plugins, seed=7, condition="maxrl+gtpo_sepa")
    assert json.loads(json.dumps(manifest, allow_nan=False)) == manifest
    assert (manifest["status"], manifest["seed"], manifest["condition"]) == ("running", 7, "maxrl+gtpo_sepa")
    assert manifest["origins"] == {
        "training.batch_size": "RETRAIN__TRAINING__BATCH_SIZE",
        "training.lr": f"{tmp_path / 'retrain.toml'}:2",
        "training.max_steps": "--max-steps",
    }
    assert manifest["config"]["training"]["lr"] == 1e-3
    assert manifest["distributions"]["retrain-core"] == retrain.__version__
    assert manifest["libraries"]["numpy"]
    assert manifest["git"] == {}
    assert manifest["hardware"]["cores"] >= 1


def test_the_manifest_names_the_commit_and_whether_it_was_changed(load, plugins, tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=n", "-c", "user.email=e@e", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def recorded():
        return build_manifest(config, plugins, seed=7, condition="x")["git"]

    config, _ = load("")
    monkeypatch.chdir(tmp_path)
    git("init", "-q")
    assert recorded() == {}
    git("add", ".")
    git("commit", "-qm", "one")
    found = {"commit": git("rev-parse", "HEAD").strip(), "dirty": False, "folder": tmp_path.name}
    assert recorded() == found
    (tmp_path / "new").touch()
    assert recorded() == found | {"dirty": True}


def test_the_digest_follows_the_values_and_the_file_of_a_resumed_run_starts_a_new_one(load, plugins, tables, tmp_path):
    def digest(*arguments, seed=1):
        return str(build_manifest(load("", *arguments)[0], plugins, seed=seed, condition="x")["config_sha256"])

    assert digest() == digest("--lr", "4e-5")
    assert len({digest(), digest("--lr", "5e-5"), digest(seed=2)}) == 3
    config, problems = load("", "--resume", str(tmp_path))
    assert problems == []
    assert reloaded(config, 1, tables, tmp_path).resume.from_ == ""
    assert "campaign" not in tomllib.loads(config_toml(config, seed=0))
