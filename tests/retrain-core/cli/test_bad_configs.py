"""Bad configurations through the real command: exit code 2, one clear message with the location and the fix."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from tests.kit.shared import first_or_long

TABLE = Path(__file__).with_name("bad_configs.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """A bad configuration, and what its message must contain; `bad_configs.toml` explains the fields."""

    name: str
    wanted: Sequence[str]
    text: str = ""
    argv: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    bytes: Mapping[str, str] = field(default_factory=dict)
    folders: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    problems: int = 1
    before_data: bool = False


CASES = [Bad(**case) for case in tomllib.loads(TABLE.read_text(encoding="utf-8"))["case"]]
IN_A_PROCESS = ("three-at-once", "tinker")


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Bad], None]:
    """Write the files of a case."""
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


def judge(case: Bad, code: int, out: str, err: str) -> None:
    """The requirements on every message."""
    assert code == 2, out + err
    assert "Traceback" not in out + err
    head, *rest = err.splitlines()
    assert head in ("retrain: config error", "retrain: plugin error", "retrain: resume error")
    text = "\n".join(rest)
    assert all(fragment in text for fragment in case.wanted), text
    assert text.count("fix: ") == case.problems, text
    assert text.startswith("1. ") == (case.problems > 1)
    assert len(text) < 2500


def test_there_are_enough_cases_and_no_two_alike() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    assert len(CASES) >= 45


@pytest.mark.parametrize(
    "case",
    [  # a third of them at every change, the others at night
        pytest.param(case, id=case.name, marks=pytest.mark.long if place % 3 else ())
        for place, case in enumerate(CASES)
    ],
)
def test_a_bad_configuration_is_refused_with_one_clear_message(
    case: Bad, prepare: Callable[[Bad], None], command: Callable[..., Any], tmp_path: Path
) -> None:
    prepare(case)
    result = command(*case.argv)
    judge(case, result.code, result.out, result.err)
    assert not list(tmp_path.rglob("run.json"))
    assert not (case.before_data and result.out), "lines about the tokenizer and the data"


@pytest.mark.parametrize(
    "case", first_or_long([case for case in CASES if case.name in IN_A_PROCESS]), ids=lambda case: case.name
)
def test_the_same_through_the_script(
    case: Bad, prepare: Callable[[Bad], None], script: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    prepare(case)
    done = script(*case.argv)
    judge(case, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("damage", "fragment"),
    first_or_long(
        [
            ({"config.json": "{"}, ""),
            ({"config.json": "[]"}, ""),
            ({"config.json": '{"model_type": "no_such_architecture"}'}, ""),
            ({"model.safetensors": None}, ""),
            ({"model.safetensors": "not safetensors"}, ""),
            ({"tokenizer.json": "{"}, "no tokenizer could be loaded from './model'"),
        ]
    ),
    ids=["config-cut", "config-no-table", "architecture", "no-weights", "weights-broken", "tokenizer-broken"],
)
def test_a_damaged_model_folder_is_refused(
    damage: dict[str, str | None],
    fragment: str,
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny = resources.files("retrain_local") / "tiny"
    with resources.as_file(tiny) as folder:
        shutil.copytree(folder, tmp_path / "model")
    for name, content in damage.items():
        (tmp_path / "model" / name).unlink()
        if content is not None:
            (tmp_path / "model" / name).write_text(content)
    result = command("--model", "./model", "--data-source", "arithmetic", "--devices", "cpu")
    judge(Bad(name="model", wanted=("--model [model] model", fragment)), result.code, "", result.err)


def test_explain_refuses_what_training_would(prepare: Callable[[Bad], None], command: Callable[..., Any]) -> None:
    (case,) = [case for case in CASES if case.name == "three-at-once"]
    prepare(case)
    result = command("explain", "--json", *case.argv)
    judge(case, result.code, result.out, result.err)
    assert result.out == ""


def test_entropies_that_a_backend_cannot_give_are_refused(toys: Path, command: Callable[..., Any]) -> None:
    for uncertainty in ("shannon_entropy", "toy_entropy"):
        result = command("--backend", "toy", "--uncertainty-kind", uncertainty)
        case = Bad(
            name="entropy",
            wanted=(
                f"'{uncertainty}' needs entropies, and backend 'toy' with engine",
                "--uncertainty-kind [algorithm]",
            ),
        )
        judge(case, result.code, result.out, result.err)


def test_parameters_whose_model_cannot_be_imported_are_told(
    distribution: Callable[..., Path], command: Callable[..., Any]
) -> None:
    source = (
        "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_backends(register):\n"
        "    register(PluginSpec(name='lazy', summary='s', factory='m:f', params='a_missing_library:Options'))\n"
    )
    distribution("lazy-dist", {"lazy_dist": source})
    result = command("--backend", "lazy")
    wanted = ("the parameters of backend 'lazy' failed to load", "No module named 'a_missing_library'", "lazy-dist")
    judge(Bad(name="params", wanted=wanted), result.code, result.out, result.err)


def test_a_name_with_two_owners_is_refused(distribution: Callable[..., Path], command: Callable[..., Any]) -> None:
    source = (
        "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_rewards(register):\n"
        "    register(PluginSpec(name='match', summary='s', factory=lambda c: None))\n"
    )
    distribution("clash-dist", {"clash_dist": source})
    result = command("--max-steps", "3")
    wanted = ("reward 'match' is provided twice: by ", "clash-dist 1.0", "retrain-rewards", "RETRAIN_BLOCK=")
    judge(Bad(name="clash", wanted=wanted), result.code, result.out, result.err)


def test_of_a_distribution_that_is_left_out_the_variable_is_told(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-sepa")
    (tmp_path / "retrain.toml").write_text(
        "[algorithm]\nadvantage_mode = 'grpo'\n[sepa]\nsteps = 3\n[logging]\nstrategic_grams = ['so']\n"
    )
    result = command()
    case = Bad(
        name="blocked",
        problems=1,
        wanted=(
            "5 problems with one fix:",
            "retrain.toml:3 [sepa]: unknown table",
            "retrain.toml:6 [logging] strategic_grams: unknown key",
            "retrain.toml:2 [algorithm] advantage_mode: no advantage named 'grpo'",
            "[algorithm] transform_mode (default): no transform named 'gtpo_sepa'",
            "[algorithm] uncertainty_kind (default): no uncertainty named 'surprisal'",
            "fix: retrain-sepa is installed, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out: change that",
        ),
    )
    judge(case, result.code, result.out, result.err)


def test_terminal_escapes_in_a_configuration_are_not_passed_on(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text('[data]\nsource = "files"\npath = "\\u001b[2J"\n["\\u001b[31mx"]\n')
    result = command()
    assert result.code == 2
    assert "\ufffd[31mx" in result.err or "\\x1b[31mx" in result.err
    assert "\x1b" not in result.err
