"""Every part of a page escapes every text that it is given, in its content and in its attributes."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

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
)
from retrain.report.shell import sections_page

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
    """Names of elements and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


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
    assert not {"script", "link", "img", "iframe"} & Reader(page).tags
    drawn = sections_page("retrain", EVIL, [Section("one", "", [PLOT]), Section("two", "", [Fold("", [PLOT])])])
    assert len(re.findall("<script", drawn)) == 3
    assert "unsafe" not in drawn.split("</head>")[0]
    assert len(list(figures_of([Section("one", "", [None, PLOT]), PLOT]))) == 2


def test_links_are_relative_paths_whatever_a_name_looks_like(tmp_path: Path) -> None:
    links = Links(tmp_path)
    assert links.to(tmp_path / "javascript:alert(1)", "x").address == "./javascript%3Aalert%281%29"
    assert links.to(tmp_path.parent / 'a"b', "x").address.startswith("../a%22b")
