"""What users type and read keeps its name: TOML keys and defaults, parts, commands, hooks, public names, run files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import retrain.advantages
import retrain.api
import retrain.testing
from retrain.cli.command_line import run
from retrain.cli.completion import FORMER_NAMES
from retrain.kernel import hooks

NAMES = json.loads(Path(__file__).with_name("names_that_stay.json").read_text(encoding="utf-8"))
SHORT = ("--max-steps", "2", "--eval-examples", "8", "--eval-every", "1", "--log-dir", "logs/t")


def leaves(schema: dict[str, Any], root: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys of a JSON schema with their defaults."""
    forms = [
        root["$defs"][each["$ref"].rsplit("/", 1)[-1]] if "$ref" in each else each
        for each in (schema, *schema.get("anyOf", ()))
    ]
    tables = [form["properties"] for form in forms if form.get("properties")]
    for name, below in (pair for table in tables for pair in table.items()):
        yield from leaves(below, root, (*path, name))
    if not tables:
        yield ".".join(path), schema.get("default", "<none>")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(list(arguments)) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


def test_public_names() -> None:
    assert set(NAMES["api"]) <= set(retrain.api.__all__)
    assert set(NAMES["advantages"]) <= {name for name in dir(retrain.advantages) if not name.startswith("_")}
    assert set(NAMES["testing"]) <= set(retrain.testing.__all__)
    assert set(NAMES["hooks"]) <= set(dir(hooks))


def test_keys_and_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    schema = printed(capsys, "explain", "--schema")
    now = dict(leaves(schema, schema))
    assert {key: now.get(key, "<gone>") for key in NAMES["keys"]} == NAMES["keys"]


def test_parts_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(NAMES["commands_now_options"]) <= set(FORMER_NAMES)
    kinds = printed(capsys, "plugins", "--json")["kinds"]
    for kind, names in {**NAMES["parts"], "command": NAMES["commands"]}.items():
        assert not set(names) - {row["name"] for row in kinds[kind]}, kind


@pytest.mark.slow
def test_files_of_a_run_and_their_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--template", "tiny"]) == 0
    assert run(["retrain.toml", *SHORT]) == 0
    folder = tmp_path / "logs/t"
    assert not set(NAMES["run_files"]) - {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert not set(NAMES["metrics"]).difference(*map(json.loads, lines))
    assert not set(NAMES["manifest"]) - set(json.loads((folder / "run.json").read_text(encoding="utf-8")))
