"""Reading TOML: an error shows its line, and what no configuration needs is refused before it can do harm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retrain.kernel.config.toml_file import MAX_DEPTH, MAX_WORD, parse_free, parse_toml, read_toml, unquoted
from retrain.kernel.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [
        ("a = 1\nb = = 2\n", 2, "b = = 2\n        ^"),
        ("a = 1\n\n[t]\na.b = 1\na = 2\n", 5, "a = 2\n         ^"),
        ("x = 1\ntext = '''\nnever\n\nclosed\n", 2, "text = '''"),
        ("x = 1\nlist = [\n  1,\n  2,\n", 4, "  2,"),
        ("x = 1\n" + "k" * 200 + " = = 2\n", 2, f"{'k' * 56} = = 2\n    {' ' * 59}^"),
    ],
)
def test_an_error_shows_its_line(text: str, line: int, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_toml(text, "my.toml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, problem.why) == ("config.not-toml", f"my.toml:{line}", shown)


@pytest.mark.parametrize(
    ("text", "where", "code"),
    [
        pytest.param("#" * 10_000_000, "my.toml", "config.too-large", id="10 MB"),
        pytest.param("a = 1\nx = " + "[" * 5000 + "]" * 5000, "my.toml:2", "config.too-large", id="arrays"),
        pytest.param("x = " + "{a=" * 5000 + "1" + "}" * 5000, "my.toml:1", "config.too-large", id="tables"),
        pytest.param("\n" + "a." * 20_000 + "a = 1\n", "my.toml:2", "config.too-large", id="key of 20,000 parts"),
        pytest.param("[" + "'a' . " * 20_000 + "a]\n", "my.toml:1", "config.too-large", id="header of 20,000 parts"),
        pytest.param("x = " + "7" * 5000, "my.toml:1", "config.too-large", id="5,000 digits"),
        pytest.param("x = 0x" + "f" * 5000, "my.toml:1", "config.too-large", id="5,000 hex digits"),
        pytest.param('x = "' + '\\"""' * 200_000, "my.toml:1", "config.not-toml", id="strings that never end"),
    ],
)
def test_what_no_configuration_needs_is_refused(text: str, where: str, code: str, tmp_path: Path) -> None:
    """Each of these used to end in a traceback, or take minutes."""
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path / "my.toml")
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [(code, str(tmp_path / where))]


def test_the_limits_themselves_are_allowed() -> None:
    depth = MAX_DEPTH
    arrays = "[" * depth + "]" * depth
    text = f'x = {arrays}\n{".".join("a" * MAX_DEPTH)} = 1\n{"k" * MAX_WORD} = "{"." * 10_000}"\ny = "{"[" * 10_000}"\n'
    assert len(parse_toml(text, "my.toml")) == 4


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "link to device"])
def test_a_pipe_or_device_is_not_read(make: object, tmp_path: Path) -> None:
    make(tmp_path / "my.toml")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="not a regular file"):
        read_toml(tmp_path / "my.toml")


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 50_000])
def test_oversized_text_values_stay_text(text: str) -> None:
    assert parse_free(text) == text
    assert unquoted(text, 1) == ""
