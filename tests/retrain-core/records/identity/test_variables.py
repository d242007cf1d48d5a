"""Environment variables that code reads: found in its text, compared between sessions, never written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.identity.code import ALL, SECRET, UNSET, variables_read
from tests.kit.shared import first_or_long

ENVIRON = {"BONUS": "0.25", "OTHER": "1", "SHLVL": "2", "SSH_TTY": "/dev/pts/0", "JUDGE_API_KEY": "planted-secret-123"}
BONUS = variables_read([b"import os\nos.environ['BONUS']"], ENVIRON)["BONUS"]


BY_NAME = (
    'import os\ndef score(): return float(os.environ["BONUS"])',
    'import os\nX = os.environ.get("BONUS", "0")',
    'from os import environ\nX = environ.setdefault("BONUS", "0")',
    'from os import getenv\nX = getenv("BONUS")',
    'import os as system\nX = system.getenv("BONUS", "0")',
    'import os\nNAME = "BONUS"\ndef score(): return os.environ[NAME]',
    'import os\nX = "BONUS" in os.environ',
    "import os\nX = os.environb[b'BONUS']",
)
ANY = (
    "import os\nX = [os.environ[name] for name in ('BO' + 'NUS',)]",
    "import os\nX = dict(os.environ)",
    "import os\nX = getattr(os, 'environ')",
    "from os import getenv as read\nX = read('BONUS')",
    "import os\nX = os.path.expandvars('$BONUS')",
    "X = open('/proc/self/environ').read()",
    "import os\nX = os.environ[",
)


@pytest.mark.parametrize("source", [*BY_NAME, *ANY])
def test_a_literal_name_is_read_and_all_variables_where_names_are_unknown(source: str) -> None:
    found = variables_read([source.encode()], ENVIRON)
    if source in ANY:
        assert found.pop(ALL) == ALL
        assert found.keys() == {"BONUS", "OTHER", "JUDGE_API_KEY"}
        assert "planted" not in str(found)
        assert (found["JUDGE_API_KEY"], found["BONUS"]) == (SECRET, BONUS)
    else:
        assert found == {"BONUS": BONUS}
        assert variables_read([source.encode()], {}) == {"BONUS": UNSET}
    assert "0.25" not in str(found)


def test_what_is_only_written_or_mentioned_is_not_read() -> None:
    source = b'"""Reads no environ, nor getenv."""\nimport os\nos.environ["X"] = "1"  # environ["BONUS"]\n'
    assert variables_read([source], ENVIRON) == {}


@settings(max_examples=40)
@given(st.text(alphabet="os.environgetv[]()'\"=,: \n\\x00é", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert isinstance(variables_read([f"environ{text}".encode()], ENVIRON), dict)


@pytest.mark.parametrize("is_resumed", first_or_long([True, False]))
def test_a_changed_variable_is_named_by_compare_without_its_value(
    is_resumed: bool, run: Callable[..., Any], project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = project / "mine/helpers.py"
    helpers.write_text(f"import os\nBONUS = os.environ.get('MY_BONUS', 'none')\n{helpers.read_text()}")
    monkeypatch.setenv("MY_BONUS", "unspeakable-1")
    if not is_resumed:
        (project / "stop").unlink()
    assert run("--log-dir", "logs/a").code == (75 if is_resumed else 0)
    monkeypatch.setenv("MY_BONUS", "unspeakable-2")
    if is_resumed:
        assert run("--resume", "logs/a").code == 0
    assert run("--log-dir", "logs/b", "--seed", "2").code == 0
    told = json.loads(run("compare", "logs/a", "logs/b", "--json").out)["undeclared"]
    words = "resumed at step 2 although environment variable MY_BONUS changed" if is_resumed else "MY_BONUS changed"
    assert any(words in line for line in told), told
    files = (file for file in (project / "logs").rglob("*") if file.is_file())
    assert not [file for file in files if b"unspeakable" in file.read_bytes()]
