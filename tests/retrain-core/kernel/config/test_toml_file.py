"""Reading TOML: an error shows its line, and what no configuration needs is refused before it can do harm."""

import os
import tomllib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.toml_file import (
    MAX_DEPTH,
    MAX_WORD,
    key_lines,
    parse_free,
    parse_toml,
    read_toml,
    toml_text,
    unquoted,
)
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
def test_an_error_shows_its_line(text, line, shown):
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
def test_what_no_configuration_needs_is_refused(text, where, code, tmp_path):
    """Each of these used to end in a traceback, or take minutes."""
    (tmp_path / "my.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(tmp_path / "my.toml")
    assert [(problem.code, problem.where) for problem in caught.value.problems] == [(code, str(tmp_path / where))]


def test_the_limits_themselves_are_allowed():
    depth = MAX_DEPTH
    arrays = "[" * depth + "]" * depth
    text = f'x = {arrays}\n{".".join("a" * MAX_DEPTH)} = 1\n{"k" * MAX_WORD} = "{"." * 10_000}"\ny = "{"[" * 10_000}"\n'
    assert len(parse_toml(text, "my.toml")) == 4


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["FIFO", "link to device"])
def test_a_pipe_or_device_is_not_read(make, tmp_path):
    make(tmp_path / "my.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        read_toml(tmp_path / "my.toml")


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 50_000])
def test_oversized_text_values_stay_text(text):
    assert parse_free(text) == text
    assert unquoted(text, 1) == ""


NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=10)


@settings(max_examples=50)
@given(VALUES)
def test_toml_reads_it_back(value):
    assert tomllib.loads(f"value = {toml_text(value)}") == {"value": value}


@pytest.mark.parametrize(
    ("value", "default", "meant"),
    [
        *(("70", 500, "70"), ("1e-4", 4e-5, "1e-4"), ("true", False, "true"), ("7.5", 1, "7.5")),
        *(("many", 500, ""), ("true", 1, ""), ("1", True, ""), ("[1]", 1, ""), ("70", "grpo", ""), (70, 500, "")),
    ],
)
def test_a_number_or_boolean_in_quotes_is_recognised(value, default, meant):
    assert unquoted(value, default) == meant


@given(st.text(max_size=12))
def test_free_values_never_fail_and_are_never_nan(text):
    value = parse_free(text)
    assert value == value or isinstance(value, list | dict)  # NaN alone differs from itself


BARE = st.text("abcXYZ019_-", min_size=1, max_size=6)
HARD = st.text(
    "ab .#[]{}=,'\\\"\t\u2028\x85é", max_size=6
)  # \u2028 and \x85 end a line for str.splitlines, not in TOML
SOURCES = st.sampled_from(
    [
        *("1", "-1.5e-3", "inf", "true", "1979-05-27 07:32:00Z"),
        *('"plain"', '"# [x] = \\" {"', "'C:\\dir # = ['", '"""one line"""', '"""a""""'),
        '"""\nfake = 1\n[fake]\n\\""" still\n"""',
        '"""\\\n   joined"""',
        "'''\nfake = 2 # no\n'''",
        "'''x'''''",
        "[]",
        '[1, "]", # ]\n  2,\n]',
        "[\n  [1, 2], # comment [\n  { a = 1 },\n  '''\nfake = 3\n''',\n]",
        "{}",
        '{ x = "}", "y z" = [1], z.w = { v = "#" } }',
    ]
)
COMMENTS = st.sampled_from(["", " # plain", ' # "unbalanced [ {', "\t# '''", " # \u2028 \x85"])


@dataclass
class Document:
    """A document under construction, and the line where each of its keys was put."""

    text: str = ""
    expected: dict[str, int] = field(default_factory=dict)

    def put(self, path, start, source):
        line = self.text.count("\n") + 1
        for end in range(start + 1, len(path) + 1):
            self.expected.setdefault(".".join(path[:end]), line)
        self.text += source + "\n"


def quoted(name, style):
    """A key in one of its three spellings."""
    if style == 0 and name and all(c in "abcXYZ019_-" for c in name):
        return name
    if style == 1 and not set(name) & set("'\x85\u2028\x00"):
        return f"'{name}'"
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'


@st.composite
def documents(draw):
    document = Document()
    newline = st.sampled_from(["", "# note = 1\n", "\n", "   # [ghost]\n"])
    taken = set()

    def key(prefix):
        names = draw(st.lists(st.one_of(BARE, HARD), min_size=1, max_size=3))
        names[0] = f"{names[0]}{len(taken)}"  # no two keys clash
        taken.add((*prefix, *names))
        dot = draw(st.sampled_from([".", " . ", "\t."]))
        return [*prefix, *names], dot.join(quoted(name, draw(st.integers(0, 2))) for name in names)

    def pairs(prefix):
        for _ in range(draw(st.integers(0, 3))):
            document.text += draw(newline)
            path, source = key(prefix)
            indent, equals = draw(st.sampled_from(["", "  "])), draw(st.sampled_from([" = ", "=", "\t="]))
            document.put(path, len(prefix), f"{indent}{source}{equals}{draw(SOURCES)}{draw(COMMENTS)}")

    pairs([])
    for _ in range(draw(st.integers(0, 3))):
        document.text += draw(newline)
        path, source = key([])
        header = f"[[ {source} ]]" if draw(st.booleans()) else f"[{source}]"
        document.put(path, 0, header + draw(COMMENTS))
        pairs(path)
    return document


@settings(max_examples=50)
@given(documents(), st.booleans())
def test_every_key_and_header_is_found_on_its_line_and_nothing_else(document, windows):
    text = document.text.replace("\n", "\r\n") if windows else document.text
    tomllib.loads(text)
    found = key_lines(text)
    assert {path: found.get(path) for path in document.expected} == document.expected
    assert not {name for name in found if "fake" in name or "ghost" in name}


def test_keys_without_a_line_of_their_own():
    inline = dict.fromkeys(("training", *(f"training.{n}" for n in ("lr", "inner", "inner.deep", "inner.deep.er"))), 2)
    assert key_lines("# first\ntraining = { lr = 1e-4, inner = { deep.er = 1 } }\n") == inline
    assert key_lines("[[a]]\nx = 1\n[[a]]\nx = 2\n") == {"a": 1, "a.x": 2}  # the first of several counts
    assert key_lines("\n[a.params]\nx = 1\n") == {"a": 2, "a.params": 2, "a.params.x": 3}
