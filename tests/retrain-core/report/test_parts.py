"""Untrusted text as HTML: nothing acts, nothing is lost without a word, in every part of a page."""

from __future__ import annotations

import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.report.completions import HEAD_CHARS, TAIL_CHARS, excerpt
from retrain.report.parts import (
    Box,
    Code,
    Facts,
    Fold,
    Heading,
    Items,
    Link,
    Links,
    Paragraph,
    Part,
    Pill,
    Plot,
    Pre,
    Section,
    Table,
    Words,
    figures_of,
    long_text,
    plain,
    text,
)
from retrain.report.shell import sections_page

ANY = st.text(st.characters() | st.characters(categories=("Cs", "Cc", "Cf")) | st.sampled_from("<>&\"'`%{}\\"))
EVIL = "\"'><script>alert(1)</script>\x1b[2J\u202e{{ 7 * 7 }}"
PLOT = Plot(EVIL, EVIL, {"kind": "plugin"}, Table(EVIL, (EVIL, EVIL, EVIL), [(EVIL, EVIL, EVIL)]), kind="forest")
PARTS: list[Part] = [
    Link(EVIL, "run/%22/"),
    Code([EVIL, EVIL]),
    Words([EVIL, Code([EVIL])]),
    Pill(EVIL, "better", EVIL),
    Paragraph([EVIL, Link(EVIL, "./x")], "note"),
    Heading(EVIL, 4, EVIL),
    Pre(EVIL),
    Items([(EVIL, [EVIL, EVIL])]),
    Facts([(EVIL, EVIL)], wide=frozenset({EVIL})),
    PLOT,
    Box("alert", EVIL, [PLOT]),
    Fold(EVIL, [PLOT], remark=EVIL, level=3),
    Section("name", EVIL, [PLOT]),
]


class Reader(HTMLParser):
    """What a browser would see: names of elements and attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.seen = ""
        self.feed(str(page))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(f"{tag} {attrs}" if tag == "span" else tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.seen += data


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_part_escapes_every_text(part: Part) -> None:
    html = part.__html__()
    assert not {"\x1b", "\u202e"} & set(html)
    assert "{{ 7 * 7 }}" in html
    reader = Reader(html)
    assert "script" not in reader.tags
    drawing = {"viewbox", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "points"}
    usual = {"class", "id", "href", "scope", "role", "tabindex", "aria-label", "aria-hidden", "aria-labelledby"}
    assert reader.attributes <= {*usual, *drawing, "data-head"}


def test_a_page_loads_nothing_and_has_a_script_only_for_plots() -> None:
    page = sections_page("retrain", EVIL, [Section("one", EVIL, [Paragraph([EVIL])])])
    assert not {"script", "link", "img", "iframe"} & set(Reader(page).tags)
    drawn = sections_page("retrain", EVIL, [Section("one", "", [PLOT]), Section("two", "", [Fold("", [PLOT])])])
    assert len(re.findall("<script", drawn)) == 3
    assert "unsafe" not in drawn.split("</head>")[0]
    assert len(list(figures_of([Section("one", "", [None, PLOT]), PLOT]))) == 2


def test_links_are_relative_paths_whatever_a_name_looks_like(tmp_path: Path) -> None:
    links = Links(tmp_path)
    assert links.to(tmp_path / "javascript:alert(1)", "x").address == "./javascript%3Aalert%281%29"
    assert links.to(tmp_path.parent / 'a"b', "x").address.startswith("../a%22b")


@given(ANY)
def test_no_text_becomes_markup_or_acts_and_what_is_printable_stays(value: str) -> None:
    reader = Reader(text(value, 10_000))
    assert set(reader.tags) <= {"span [('class', 'ctl')]"}
    acting = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not [c for c in reader.seen if unicodedata.category(c) in acting and c not in "\n\t\u200c\u200d"]
    reader.seen.encode("utf-8")
    kept = "".join(c for c in value if c.isprintable())
    assert Reader(text(kept, 10_000)).seen == plain(kept, 10_000) == kept


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
    assert Reader(text(value)).seen == seen


def test_long_texts_say_what_is_left_out_and_messages_have_roles() -> None:
    value = "<" * 1_000_000 + "\\boxed{7}"
    shown = excerpt(value)
    assert shown.left_out == len(value) - HEAD_CHARS - TAIL_CHARS
    seen = Reader(long_text(shown)).seen
    assert (seen[:HEAD_CHARS], seen[-9:]) == ("<" * HEAD_CHARS, "\\boxed{7}")
    assert f"[{shown.left_out:,} characters left out]" in seen
    assert Reader(text("x" * 500)).seen == "x" * 400 + "…"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert excerpt(messages).head == "system: s\n\nuser: u"
    assert excerpt(None).head == ""
    assert excerpt({"a": 1}).head == '{"a": 1}'
