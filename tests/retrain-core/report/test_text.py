"""Untrusted text as HTML: nothing acts, nothing is lost without a word."""

from __future__ import annotations

import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.report.completions import HEAD_CHARS, TAIL_CHARS, excerpt
from retrain.report.parts import long_text, plain, text

ANY = st.text(st.characters() | st.characters(categories=("Cs", "Cc", "Cf")) | st.sampled_from("<>&\"'`%{}\\"))


class Reader(HTMLParser):
    """What a browser would see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.seen = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(f"{tag} {attrs}")

    def handle_data(self, data: str) -> None:
        self.seen += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(f"<p>{markup}</p>")
    reader.close()
    return reader


@given(ANY)
def test_no_text_becomes_markup_or_acts(value: str) -> None:
    reader = read(text(value, 10_000))
    assert set(reader.tags) <= {"p []", "span [('class', 'ctl')]"}
    acting = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not [c for c in reader.seen if unicodedata.category(c) in acting and c not in "\n\t\u200c\u200d"]
    reader.seen.encode("utf-8")


@given(ANY)
def test_printable_text_is_seen_as_it_is(value: str) -> None:
    kept = "".join(c for c in value if c.isprintable())
    assert read(text(kept, 10_000)).seen == kept
    assert plain(kept, 10_000) == kept


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("\x1b[2J", "[U+001B][2J"),
        ("a\u202eb\u202c", "a[U+202E]b[U+202C]"),
        ("\u2066x\u2069\u200f", "[U+2066]x[U+2069][U+200F]"),
        ("zero\u200bwidth\ufeff", "zero[U+200B]width[U+FEFF]"),
        ("half \ud83d", "half \N{REPLACEMENT CHARACTER}"),
        ("\N{MAN}\u200d\N{PERSONAL COMPUTER}", "\N{MAN}\u200d\N{PERSONAL COMPUTER}"),
        ("line\r\nline\rx", "line\nline[U+000D]x"),
        ("\x00\x7f", "[U+0000][U+007F]"),
    ],
)
def test_what_acts_is_shown(value: str, seen: str) -> None:
    assert read(text(value)).seen == seen


def test_long_texts_say_what_is_left_out() -> None:
    value = "<" * 1_000_000 + "\\boxed{7}"
    shown = excerpt(value)
    assert shown.left_out == len(value) - HEAD_CHARS - TAIL_CHARS
    reader = read(long_text(shown))
    assert reader.seen.startswith("<" * HEAD_CHARS)
    assert reader.seen.endswith("\\boxed{7}")
    assert f"[{shown.left_out:,} characters left out]" in reader.seen
    assert read(text("x" * 500)).seen == "x" * 400 + "…"


def test_messages_are_shown_with_their_roles() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert excerpt(messages).head == "system: s\n\nuser: u"
    assert excerpt(None).head == ""
    assert excerpt({"a": 1}).head == '{"a": 1}'
