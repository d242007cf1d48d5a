"""`retrain init-plugin`: the file, its test, the TOML, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, slug


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> list[str]:
    """Every file below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_it_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init-plugin", "-k", "transform", "-n", "entropy floor", "--with-test"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "Wrote plugins/entropy_floor.py and tests/test_entropy_floor_plugin.py. Name it in your TOML:",
        "  [algorithm]",
        '  transform_mode = "entropy_floor.PLUGIN"',
        "  transform_params = { floor = 0.5 }",
        "Next:",
        "  python -m pytest tests/test_entropy_floor_plugin.py",
        "  retrain explain",
    ]
    assert files(tmp_path) == ["plugins/entropy_floor.py", "tests/test_entropy_floor_plugin.py"]


@pytest.mark.parametrize("kind", [slug(kind) for kind in KINDS])
def test_the_file_is_the_example_of_the_distribution(kind: str, tmp_path: Path) -> None:
    assert run(["init-plugin", "--distribution", "--name", "my-part", "--kind", kind, "--no-input"]) == 0
    assert run(["init-plugin", "--kind", kind, "--name", "my_part", "--json"]) == 0
    own = (tmp_path / "plugins/my_part.py").read_text(encoding="utf-8").splitlines()
    file = kind.replace("-", "_")
    for line in (tmp_path / f"my-part/src/my_part/{file}.py").read_text(encoding="utf-8").splitlines():
        assert line in own or line.startswith("from retrain.api import")


def test_json_names_files_and_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init-plugin", "-k", "reward", "-n", "close", "-o", "lab/parts", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["files"] == ["lab/parts/close.py"] == files(tmp_path)
    assert tomllib.loads(content["toml"]) == {
        "reward": {"type": "lab.parts.close.PLUGIN", "params": {"tolerance": 1e-6}}
    }


@pytest.mark.parametrize("existing", ["plugins/mine.py", "tests/test_mine_plugin.py"])
def test_nothing_is_overwritten(existing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / existing
    file.parent.mkdir()
    file.write_text("precious", encoding="utf-8")
    assert run(["init-plugin", "-k", "reward", "-n", "mine", "--with-test"]) == 2
    assert f"{existing}: exists already; nothing was written" in capsys.readouterr().err
    assert files(tmp_path) == [existing]
    assert file.read_text(encoding="utf-8") == "precious"


def test_both_files_are_written_or_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests").write_text("no folder", encoding="utf-8")
    assert run(["init-plugin", "-k", "reward", "-n", "mine", "--with-test"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert files(tmp_path) == ["tests"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-k", "reward", "-n", "../x"], "is a path, not a name"),
        (["-k", "reward", "-n", "class"], "is a Python keyword"),
        (["-k", "reward", "-n", "json"], "a module of the standard library"),
        (["-k", "reward", "-n", "x" * 300], "has 300 characters"),
        (["-k", "rewards", "-n", "mine"], "did you mean 'reward'?"),
        (["-k", "reward", "-n", "mine", "-o", "../outside"], "is not a folder that a plugin can be imported from"),
        (["-k", "reward", "-n", "mine", "-o", "my-plugins"], "is not a folder that a plugin can be imported from"),
        (["-k", "reward"], "--name"),
    ],
)
def test_a_wrong_command_line_is_told_and_nothing_is_written(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init-plugin", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        ("own_parts.py", "own-parts"),
        ("own_parts/__init__.py", "own-parts"),
        ("own_parts/score.py", "own-parts"),
        ("plugins/own_parts/__init__.py", "own_parts"),
        ("lab/own_parts.py", "own_parts"),
    ],
)
@pytest.mark.parametrize(
    "command", [("init-plugin", "-k", "reward", "-n"), ("init-plugin", "--distribution", "--no-input", "-n")]
)
def test_a_name_that_a_file_here_has_is_refused_with_the_file_and_a_free_name(
    command: tuple[str, ...], holder: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "retrain.toml").write_text('[plugins]\nsearch_paths = ["lab", "plugins"]\n', encoding="utf-8")
    for file in (holder, "my_own_parts.py"):  # the second one is taken too
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("", encoding="utf-8")
    before = files(tmp_path)
    assert run([*command, name]) == 2
    told = capsys.readouterr().err
    assert holder.removesuffix("/score.py") in told
    assert "my-own-parts-2 is free" in told
    assert files(tmp_path) == before
    assert run([*command, "my-own-parts-2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "holder"),
    [
        (("-k", "transform", "-n", "gtpo"), "retrain-sepa"),
        (("-k", "reward", "-n", "numpy"), "numpy/__init__.py"),
        (("-k", "reward", "-n", "json"), "standard library"),
        (("-k", "recorder", "-n", "yaml"), "yaml/__init__.py"),
    ],
)
def test_a_name_that_something_installed_has_is_refused(
    arguments: tuple[str, ...], holder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init-plugin", *arguments]) == 2
    assert holder in capsys.readouterr().err
    assert files(tmp_path) == []
