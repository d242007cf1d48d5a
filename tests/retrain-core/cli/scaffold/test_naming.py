"""Names that users type, friendly and hostile, and the names derived from them."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.cli.scaffold.render import MAX_CHARS, names_from, plain_text, refuse_taken
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from tests.kit.problems import codes_in


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


REFUSED = {
    "plugin.name-empty": ("", "   "),
    "plugin.name-not-importable": ("---", "2fast", "{{ 7 * 7 }}"),
    "plugin.name-is-path": ("../x", "/etc/passwd", "a\\b", ".hidden"),
    "plugin.name-reserved": ("class", "retrain-class", "json", "retrain-json", "retrain"),
    "plugin.name-not-ascii": ("数学", "маth"),
    "plugin.name-too-long": ("x" * 300,),
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in REFUSED.items() for text in texts])
def test_what_is_no_name_is_refused_with_a_fix(code: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names_from(text, where="NAME")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where, bool(problem.fix)) == (code, "NAME", True)


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


def refusal(name: str, kind: Kind, plugins: Plugins) -> str:
    """The refusal; empty for a free name."""
    try:
        refuse_taken(names_from(name, where="NAME"), kind, plugins, where="NAME", targets=lambda names: [])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "kind", "owner"),
    [
        ("grpo", Kind.ADVANTAGE, "retrain-sepa"),
        ("nll", Kind.UNCERTAINTY, "retrain-sepa"),
        ("local", Kind.BACKEND, "retrain-local"),
        ("tinker", Kind.BACKEND, "retrain-tinker"),
        ("numpy", Kind.REWARD, "numpy/__init__.py"),
        ("mine", Kind.REWARD, "theirs 1.0"),
        ("grpo", Kind.REWARD, ""),  # a name of another kind is free
    ],
)
def test_a_name_that_is_taken_is_refused_with_its_owner(
    name: str, kind: Kind, owner: str, distribution: Callable[..., Path]
) -> None:
    source = "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_rewards(register):\n"
    distribution("theirs", {"theirs": source + "    register(PluginSpec(name='mine', summary='s', factory=print))\n"})
    found = refusal(name, kind, load_plugins({}))
    assert (owner in found, codes_in(found)) == (True, ["plugin.name-taken"] if owner else [])


@pytest.mark.parametrize("text", ['say "hi"', "back\\slash", "{{ 7 * 7 }}", "two\nlines", "\x1b[31m", "line\u2028end"])
def test_text_that_would_break_a_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plain_text(text, where="--author")
    assert caught.value.codes == ["plugin.character-refused"]


def test_other_text_is_kept() -> None:
    assert plain_text("  Zoë  O'Neil 🎉 <zoe@example.org> ", where="--author") == "Zoë O'Neil 🎉 <zoe@example.org>"
