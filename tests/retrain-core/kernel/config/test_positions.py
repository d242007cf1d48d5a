"""Every key's line, on generated TOML documents in every form that keys and values can take."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.toml_file import key_lines

BARE = st.text("abcXYZ019_-", min_size=1, max_size=6)
HARD = st.text(
    "ab .#[]{}=,'\\\"\t\u2028\x85é", max_size=6
)  # \u2028 and \x85 end a line for str.splitlines, not in TOML
VALUES = st.sampled_from(
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

    def put(self, path: list[str], start: int, source: str) -> None:
        line = self.text.count("\n") + 1
        for end in range(start + 1, len(path) + 1):
            self.expected.setdefault(".".join(path[:end]), line)
        self.text += source + "\n"


def quoted(name: str, style: int) -> str:
    """A key in one of its three spellings."""
    if style == 0 and name and all(c in "abcXYZ019_-" for c in name):
        return name
    if style == 1 and not set(name) & set("'\x85\u2028\x00"):
        return f"'{name}'"
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'


@st.composite
def documents(draw: st.DrawFn) -> Document:
    document = Document()
    newline = st.sampled_from(["", "# note = 1\n", "\n", "   # [ghost]\n"])
    taken: set[tuple[str, ...]] = set()

    def key(prefix: list[str]) -> tuple[list[str], str]:
        names = draw(st.lists(st.one_of(BARE, HARD), min_size=1, max_size=3))
        names[0] = f"{names[0]}{len(taken)}"  # no two keys clash
        taken.add((*prefix, *names))
        dot = draw(st.sampled_from([".", " . ", "\t."]))
        return [*prefix, *names], dot.join(quoted(name, draw(st.integers(0, 2))) for name in names)

    def pairs(prefix: list[str]) -> None:
        for _ in range(draw(st.integers(0, 3))):
            document.text += draw(newline)
            path, source = key(prefix)
            indent, equals = draw(st.sampled_from(["", "  "])), draw(st.sampled_from([" = ", "=", "\t="]))
            document.put(path, len(prefix), f"{indent}{source}{equals}{draw(VALUES)}{draw(COMMENTS)}")

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
def test_every_key_and_header_is_found_on_its_line_and_nothing_else(document: Document, windows: bool) -> None:
    text = document.text.replace("\n", "\r\n") if windows else document.text
    tomllib.loads(text)
    found = key_lines(text)
    assert {path: found.get(path) for path in document.expected} == document.expected
    assert not {name for name in found if "fake" in name or "ghost" in name}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "# first\ntraining = { lr = 1e-4, inner = { deep.er = 1 } }\n",
            dict.fromkeys(("training", *(f"training.{n}" for n in ("lr", "inner", "inner.deep", "inner.deep.er"))), 2),
        ),
        ("[[a]]\nx = 1\n[[a]]\nx = 2\n", {"a": 1, "a.x": 2}),
        ("\n[a.params]\nx = 1\n", {"a": 2, "a.params": 2, "a.params.x": 3}),
    ],
    ids=["inline tables", "arrays of tables: the first counts", "a parent without a header"],
)
def test_keys_without_a_line_of_their_own(text: str, found: dict[str, int]) -> None:
    assert key_lines(text) == found
