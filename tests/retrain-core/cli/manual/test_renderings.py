"""The renderings stay valid for any text in a plugin's docstrings and summaries."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.manual import markdown
from retrain.cli.manual.renderings import html_page, man_page

MACROS = {".TH", ".SH", ".SS", ".PP", ".RS", ".RE", ".EX", ".EE", ".IP", ".TP"}
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from(
            ["# ", "## ", "- ", "1. ", "| a | b |\n|---|---|\n| ", "`", "```", "**", "\n", "\n\n", ".so x", "'"]
        ),
        st.sampled_from(["\\", "\\fB", "<script>", "</code>", "&lt;", "<!-- generated: keys -->", "[x](javascript:y)"]),
        st.text(max_size=8),
    ),
    max_size=14,
).map("".join)


class _Tags(HTMLParser):
    """Every tag of the body, and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("href", "src")]


@settings(max_examples=40)
@given(HOSTILE)
def test_no_text_becomes_a_macro_of_the_man_page(text: str) -> None:
    page = man_page(text)
    assert page.isascii()
    for line in page.splitlines():
        if line.startswith((".", "'")):
            assert line.split(" ")[0] in MACROS, line
        assert not re.search(r"\\(?!\[u[0-9A-F]{4,6}\]|f[BIR]|e|-|\(aq|\(ga|\(ha|\(ti|\(bu|\(dq|&)", line), line


@settings(max_examples=40)
@given(HOSTILE)
def test_no_text_becomes_a_tag_of_the_html_page(text: str) -> None:
    tags = _Tags()
    tags.feed(html_page(text, title=text))
    assert not tags.seen & {"script", "iframe", "object", "link"}
    assert not [each for each in tags.addresses if each.lower().startswith(("javascript:", "data:", "vbscript:"))]


@given(st.lists(st.lists(st.text(max_size=12), min_size=2, max_size=2), min_size=1, max_size=4))
def test_a_cell_never_breaks_its_table(rows: list[list[str]]) -> None:
    lines = markdown.table(("a", ""), rows).split("\n")
    columns = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(lines) == len(rows) + 2
    assert len(columns) == 1


def test_prose_keeps_code_and_lists_and_joins_paragraphs() -> None:
    text = "One\nsentence.\n\n    A = b\n    C = d\n\n- first\n- second\n\n\b\n  verbatim  text\n"
    assert markdown.prose(text) == (
        "One sentence.\n\n```text\nA = b\nC = d\n```\n\n- first\n- second\n\n```text\nverbatim  text\n```"
    )
    assert markdown.prose(None) == ""
