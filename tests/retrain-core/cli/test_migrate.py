"""Migration of earlier configurations: their new content, and everything that must not change."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.migrate import migrate
from retrain.cli.plugin import LEGACY_KEYS
from retrain.kernel.errors import ConfigError

WITH_COMMENTS = """\
# my run
[backend]
backend = "prime_rl"          # which
prime_rl_transport = "zmq"    # faster here
# the port that the cluster leaves open
prime_rl_zmq_port = 5_556

[model]   # and what
model = "x"
"""
MIGRATED = """\
# my run
[backend]
backend = "prime_rl"          # which

[backend.options]
transport = "zmq"    # faster here
# the port that the cluster leaves open
zmq_port = 5_556

[model]   # and what
model = "x"
"""


def said(text: str) -> dict[str, Any]:
    return tomllib.loads(text.removeprefix("\ufeff"))


def expected(document: dict[str, Any]) -> dict[str, Any]:
    """The content of a migrated document, computed independently of the code under test."""
    backend = dict(document.get("backend", {}))
    moved = {name.removeprefix("prime_rl_"): backend.pop(name) for name in list(backend) if name in LEGACY_KEYS}
    if moved:
        backend["options"] = {**moved, **backend.get("options", {})}
    return {**document, "backend": backend} if "backend" in document else document


def test_the_seven_keys_are_those_of_the_documented_options() -> None:
    names = ("transport", "zmq_host", "zmq_port", "zmq_hwm", "strict_advantages", "sync_wait_s", "sync_poll_s")
    assert {f"prime_rl_{name}": name for name in names} == LEGACY_KEYS


def test_comments_and_layout_stay_a_comment_goes_with_its_key_and_a_second_migration_changes_nothing() -> None:
    found, again = migrate(WITH_COMMENTS, "a.toml"), migrate(MIGRATED, "a.toml")
    assert (found.after, found.legacy_keys) == (MIGRATED, ("prime_rl_transport", "prime_rl_zmq_port"))
    assert found.options == again.options == {"transport": "zmq", "zmq_port": 5556}
    assert (again.after, again.legacy_keys, again.diff()) == (MIGRATED, (), "")


@pytest.mark.parametrize(
    "text",
    [
        '[backend]\nprime_rl_transport = "zmq"',
        '[backend]\nprime_rl_transport = "zmq"\n[model]\nmodel = "x"\n[backend.options]\nzmq_port = 1\n',
        '[backend.options]\nzmq_port = 3\n[backend]\nprime_rl_transport = "zmq"\n',
        "[backend]\nprime_rl_zmq_port = 1\noptions.zmq_hwm = 3\n",
        "[backend]\nprime_rl_zmq_port = 1\noptions = {zmq_hwm = 3}\n",
        'backend = {backend = "prime_rl", prime_rl_transport = "zmq"}\n[model]\nmodel = "x"\n',
        'backend.prime_rl_transport = "zmq"\nbackend.backend = "prime_rl"\n[model]\nmodel = "x"\n',
        '[backend]\n"prime_rl_zmq_host" = """\na\nb"""  # c\n',
        "[ backend ]\n'prime_rl_sync_wait_s'=3\n\n\n# the end",
        "[backend]\nprime_rl_colour = 3\nprime_rl_zmq_hwm = 1\n",
        '[model]\nmodel = "é 模"\n[backend]\nprime_rl_zmq_host = "[backend]\\nprime_rl_zmq_hwm = 1"\n',
        '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[backend]\nprime_rl_zmq_hwm = 1\n[campaign]\nseeds = [1]\n',
    ],
)
def test_every_way_to_write_the_table_is_understood(text: str) -> None:
    found = migrate(text, "a.toml")
    assert said(found.after) == expected(said(text))
    assert found.legacy_keys


def test_an_option_that_is_set_already_wins_and_keeps_its_comment() -> None:
    text = '[backend]\nprime_rl_transport = "zmq"\n# mine\n[backend.options]\ntransport = "filesystem" # it is\n'
    found = migrate(text, "a.toml")
    assert found.after == '[backend]\n# mine\n[backend.options]\ntransport = "filesystem" # it is\n'
    assert found.options == {"transport": "filesystem"}


@pytest.mark.parametrize("text", ["", "# nothing\n", '[model]\nmodel = "x"\n', 'backend = "local"\n', "[backend]\n"])
def test_a_file_without_legacy_keys_comes_out_as_it_went_in(text: str) -> None:
    found = migrate(text, "a.toml")
    assert (found.after, found.legacy_keys) == (text, ())


def test_in_a_file_of_mixed_line_ends_every_old_line_keeps_its_own() -> None:
    text = '[backend]\r\nbackend = "prime_rl"\nprime_rl_zmq_hwm = 1\r\n\r\n[model]\nmodel = "x"\r\n'
    after = migrate(text, "a.toml").after
    assert '[backend]\r\nbackend = "prime_rl"\n' in after
    assert after.endswith('[model]\nmodel = "x"\r\n')
    assert "[backend.options]\r\nzmq_hwm = 1\r\n" in after


def test_the_difference_says_where_a_last_line_has_no_end() -> None:
    diff = migrate("[backend]\nprime_rl_zmq_hwm = 1", "a.toml").diff()
    assert diff.startswith("--- a.toml\n+++ a.toml.migrated\n@@ ")
    assert "-prime_rl_zmq_hwm = 1\n\\ No newline at end of file\n" in diff


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[backend\n", "a.toml:1"),
        ("[backend]\nx = 1\nx = 2\n", "a.toml:3"),
        ("[backend]\nprime_rl_zmq_hwm = 1\noptions = 3\n", "a.toml [backend] options"),
    ],
)
def test_a_file_that_cannot_be_migrated_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        migrate(text, "a.toml")
    assert [problem.where for problem in caught.value.problems] == [place]


VALUES = st.one_of(st.integers(-(2**62), 2**62), st.booleans(), st.text(max_size=8), st.floats(allow_nan=False))
KEYS = st.one_of(st.sampled_from(list(LEGACY_KEYS)), st.text("abz_-é. ", min_size=1, max_size=4))
TABLES = st.dictionaries(KEYS, VALUES, max_size=5)
OPTIONS = st.dictionaries(st.sampled_from(list(LEGACY_KEYS.values())), VALUES, max_size=3)


@settings(max_examples=50)
@given(TABLES, OPTIONS | st.none(), TABLES, st.booleans())
def test_any_document_says_the_same_afterwards(
    backend: dict[str, Any], options: dict[str, Any] | None, other: dict[str, Any], windows: bool
) -> None:
    document = {"backend": {**backend, **({"options": options} if options is not None else {})}, "model": other}
    text = tomli_w.dumps(document)
    text = text.replace("\n", "\r\n") if windows else text
    assert said(migrate(text, "a.toml").after) == expected(document)
