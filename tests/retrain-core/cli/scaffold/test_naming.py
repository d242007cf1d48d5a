"""Names that users type, friendly and hostile, and the names derived from them."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.cli.scaffold.render import MAX_CHARS, Names, names_from, plain_text, refuse_taken
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind


@pytest.mark.parametrize(
    ("text", "distribution", "module", "part"),
    [
        ("entropy-floor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("Entropy Floor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("EntropyFloor", "entropy-floor", "entropy_floor", "entropy_floor"),
        ("retrain-entropy-floor", "retrain-entropy-floor", "retrain_entropy_floor", "entropy_floor"),
        ("  top_k.2 ", "top-k-2", "top_k_2", "top_k_2"),
        ("Übermut", "ubermut", "ubermut", "ubermut"),
    ],
)
def test_a_name_becomes_three(text: str, distribution: str, module: str, part: str) -> None:
    names = names_from(text, where="NAME")
    assert (names.distribution, names.module, names.part) == (distribution, module, part)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "an empty name"),
        ("   ", "an empty name"),
        ("---", "yields no name that Python can import"),
        ("../x", "is a path, not a name"),
        ("/etc/passwd", "is a path, not a name"),
        ("a\\b", "is a path, not a name"),
        (".hidden", "is a path, not a name"),
        ("class", "is a Python keyword"),
        ("retrain-class", "is a Python keyword"),
        ("json", "a module of the standard library"),
        ("retrain-json", "a module of the standard library"),
        ("retrain", "'retrain' is taken"),
        ("2fast", "yields no name that Python can import"),
        ("数学", "letters that are not portable in module names"),
        ("маth", "letters that are not portable in module names"),
        ("x" * 300, "has 300 characters"),
        ("{{ 7 * 7 }}", "yields no name that Python can import"),
    ],
)
def test_what_is_no_name_is_refused_with_a_fix(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names_from(text, where="NAME")
    assert told in str(caught.value)
    assert str(caught.value).startswith("NAME: ")
    assert caught.value.problems[0].fix


@given(st.text(max_size=60))
def test_every_text_is_refused_or_gives_names_that_can_be_used(text: str) -> None:
    try:
        names = names_from(text, where="NAME")
    except ConfigError:
        return
    assert len(names.distribution) <= 2 * MAX_CHARS
    assert names.module.replace("_", "-") == names.distribution
    for name in (names.module, names.part):
        assert name.isascii()
        assert name.isidentifier()
        assert name == name.lower()
        assert not keyword.iskeyword(name)
        assert name not in sys.stdlib_module_names


def nothing(names: Names) -> list[Path]:
    """No file is to be written."""
    return []


@pytest.mark.parametrize(
    ("name", "kind", "owner"),
    [
        ("grpo", Kind.ADVANTAGE, "retrain-sepa"),
        ("nll", Kind.UNCERTAINTY, "retrain-sepa"),
        ("local", Kind.BACKEND, "retrain-local"),
        ("tinker", Kind.BACKEND, "retrain-tinker"),
        ("numpy", Kind.REWARD, "the module name 'numpy' is taken by .*numpy/__init__.py"),
    ],
)
def test_a_name_that_is_taken_is_refused_with_its_owner(name: str, kind: Kind, owner: str, plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match=owner):
        refuse_taken(names_from(name, where="NAME"), kind, plugins, where="NAME", targets=nothing)


def test_a_name_of_another_kind_is_free(plugins: Plugins) -> None:
    refuse_taken(names_from("grpo", where="NAME"), Kind.REWARD, plugins, where="NAME", targets=nothing)


def test_a_name_that_a_stranger_has_is_refused(distribution: Callable[..., Path]) -> None:
    from retrain.kernel.plugins.discover import load_plugins

    source = "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_rewards(register):\n"
    distribution("theirs", {"theirs": source + "    register(PluginSpec(name='mine', summary='s', factory=print))\n"})
    with pytest.raises(ConfigError, match=r"theirs 1\.0 provides it"):
        refuse_taken(names_from("mine", where="NAME"), Kind.REWARD, load_plugins({}), where="NAME", targets=nothing)


@pytest.mark.parametrize("text", ['say "hi"', "back\\slash", "{{ 7 * 7 }}", "two\nlines", "\x1b[31m", "line\u2028end"])
def test_text_that_would_break_a_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not allowed here"):
        plain_text(text, where="--author")


def test_other_text_is_kept() -> None:
    assert plain_text("  Zoë  O'Neil 🎉 <zoe@example.org> ", where="--author") == "Zoë O'Neil 🎉 <zoe@example.org>"
