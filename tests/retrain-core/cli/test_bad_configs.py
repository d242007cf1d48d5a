"""Bad configurations through the real command: exit code 2, and one clear message with place, code and fix."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

Command = Callable[..., Any]
TABLE = Path(__file__).with_name("bad_configs.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A bad configuration, and the places and codes of its message; `bad_configs.toml` explains the fields."""

    name: str
    places: Sequence[str]
    codes: Sequence[str]
    names: Sequence[str] = ()
    text: str = ""
    argv: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    bytes: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    before_data: bool = False


CASES = [Bad(**case) for case in tomllib.loads(TABLE.read_text(encoding="utf-8"))["case"]]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Bad], None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def write(case: Bad) -> None:
        for folder in case.folders:
            (tmp_path / folder).mkdir()
        files = {name: text.encode() for name, text in case.files.items()}
        files |= {name: text.encode("latin-1") for name, text in case.bytes.items()}
        is_override = case.argv[:1] and case.argv[0].startswith("--")  # of an empty file
        files |= {"retrain.toml": case.text.encode()} if case.text or is_override else {}
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(content)
        for name, value in case.environ.items():
            monkeypatch.setenv(name, value)

    return write


def judge(code: int, out: str, err: str, places: Sequence[str], codes: Sequence[str]) -> None:
    """The requirements on every message: a problem for each place, with code and fix, whatever the sentences."""
    assert (code, "Traceback" in out + err) == (2, False), out + err
    head, _, text = err.partition("\n")
    assert head in ("retrain: config error", "retrain: plugin error", "retrain: resume error")
    assert all(place in text for place in places), text
    assert "fix: " in text
    assert codes_in(text) == list(codes), text
    assert len(text) < 2500


@pytest.mark.parametrize(
    "case",
    [  # a third of them at every change, the others at night
        pytest.param(case, id=case.name, marks=pytest.mark.long if number % 3 else ())
        for number, case in enumerate(CASES)
    ],
)
def test_a_bad_configuration_is_refused_with_one_clear_message(
    case: Bad, prepare: Callable[[Bad], None], command: Command, tmp_path: Path
) -> None:
    prepare(case)
    result = command(*case.argv)
    judge(result.code, result.out, result.err, [*case.places, *case.names], case.codes)
    assert not list(tmp_path.rglob("run.json"))
    assert not (case.before_data and result.out), "lines about the tokenizer and the data"
    assert len(BY_NAME) == len(CASES), "two cases have one name"


@pytest.mark.parametrize("name", first_or_long(["three-at-once", "tinker"]))
def test_the_same_through_the_script_and_explain(
    name: str, prepare: Callable[[Bad], None], script: Callable[..., subprocess.CompletedProcess[str]], command: Command
) -> None:
    case = BY_NAME[name]
    prepare(case)
    done, explained = script(*case.argv), command("explain", "--json", *case.argv)
    judge(done.returncode, done.stdout, done.stderr, case.places, case.codes)
    assert (explained.code, explained.out, explained.err) == (2, "", done.stderr)


DAMAGES = [
    ("config.json", "{", "model.no-tokenizer"),
    ("config.json", "[]", "model.no-tokenizer"),
    ("config.json", '{"model_type": "no_such_architecture"}', "model.not-loadable"),
    ("model.safetensors", None, "model.no-safetensors"),
    ("model.safetensors", "not safetensors", "model.not-loadable"),
    ("tokenizer.json", "{", "model.no-tokenizer"),
]


@pytest.mark.parametrize(("name", "content", "code"), first_or_long(DAMAGES))
def test_a_damaged_model_folder_is_refused(
    name: str, content: str | None, code: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with resources.as_file(resources.files("retrain_local") / "tiny") as folder:
        shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / name).unlink()
    if content is not None:
        (tmp_path / "model" / name).write_text(content)
    result = command("--model", "./model", "--data-source", "arithmetic", "--devices", "cpu")
    judge(result.code, "", result.err, ["--model [model] model"], [code])


@pytest.mark.parametrize("uncertainty", ["shannon_entropy", "toy_entropy"])
def test_entropies_that_a_backend_cannot_give_are_refused(uncertainty: str, toys: Path, command: Command) -> None:
    result = command("--backend", "toy", "--uncertainty-kind", uncertainty)
    judge(
        result.code, result.out, result.err, ["--uncertainty-kind [algorithm]", uncertainty], ["backend.no-entropies"]
    )


LAZY = "'lazy', summary='s', factory='m:f', params='no_such:Options'"
TWICE = "'match', summary='s', factory=lambda c: None"
OWNERS = ["lazy-dist 1.0", "retrain-rewards", "RETRAIN_BLOCK="]


@pytest.mark.parametrize(
    ("hook", "spec", "arguments", "places", "code"),
    [
        pytest.param("backends", LAZY, ("--backend", "lazy"), ["lazy-dist"], "plugin.broken-params", id="parameters"),
        pytest.param("rewards", TWICE, ("--max-steps", "3"), OWNERS, "plugin.provided-twice", id="two-owners"),
    ],
)
def test_a_part_that_a_plugin_breaks_is_refused_with_the_plugin(
    hook: str,
    spec: str,
    arguments: Sequence[str],
    places: Sequence[str],
    code: str,
    distribution: Callable[..., Path],
    command: Command,
) -> None:
    source = f"from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_{hook}(register):\n"
    distribution("lazy-dist", {"lazy_dist": f"{source}    register(PluginSpec(name={spec}))\n"})
    result = command(*arguments)
    judge(result.code, result.out, result.err, places, [code])


def test_of_a_distribution_that_is_left_out_all_problems_have_the_one_fix(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-sepa")
    text = "[algorithm]\nadvantage_mode = 'grpo'\n[sepa]\nsteps = 3\n[logging]\nstrategic_grams = ['so']\n"
    (tmp_path / "retrain.toml").write_text(text)
    result = command()
    places = ["retrain.toml:3 [sepa]", "retrain.toml:6 [logging] strategic_grams", "RETRAIN_BLOCK"]
    places += ["[algorithm] advantage_mode", "[algorithm] transform_mode", "[algorithm] uncertainty_kind (default)"]
    codes = ["config.unknown-table", "config.unknown-key", *["plugin.missing"] * 3]
    judge(result.code, result.out, result.err, places, codes)
    assert result.err.count("fix: ") == 1


def test_terminal_escapes_in_a_configuration_are_not_passed_on(command: Command, tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text('[data]\nsource = "files"\npath = "\\u001b[2J"\n["\\u001b[31mx"]\n')
    result = command()
    assert (result.code, "\x1b" in result.err) == (2, False)
    assert re.search(r"(\ufffd|\\x1b)\[31mx", result.err)
