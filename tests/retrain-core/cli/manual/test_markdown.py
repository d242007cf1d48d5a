"""Pages with generated sections, topics, and renderings that stay valid for any text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.manual import markdown
from retrain.cli.manual.markdown import MANUAL, regenerated, topics
from retrain.cli.manual.renderings import html_page, man_page
from retrain.kernel.errors import ConfigError

PAGE = "# Title\n\n<!-- generated: keys -->\nold\n<!-- end: keys -->\n\ntail without newline"


def test_only_generated_sections_change() -> None:
    page = regenerated(PAGE, lambda what: f"new {what}\n")
    assert page == PAGE.replace("old", "\nnew keys\n")
    assert regenerated(page, lambda what: f"new {what}") == page
    hostile = "\\1 \\g<what> $0 ``` <b> \u202e"  # is not read again
    page = regenerated(PAGE, lambda what: hostile)
    assert hostile in page
    assert regenerated(page, lambda what: hostile) == page
    page = "<!-- generated: contract data-source -->\n<!-- end: contract data-source -->\n"
    assert "[contract data-source]" in regenerated(page, lambda what: f"[{what}]")


@pytest.mark.parametrize(
    "page",
    [
        "<!-- generated: keys -->\nno end\n",
        "<!-- generated: keys -->\n<!-- end: flags -->\n",
        "<!-- generated: keys -->\n<!-- generated: flags -->\n<!-- end: flags -->\n",
    ],
)
def test_a_damaged_page_is_refused_and_not_repaired_by_guessing(page: str) -> None:
    with pytest.raises(ConfigError):
        regenerated(page, lambda what: "")


def test_a_heading_inside_a_fence_is_no_topic() -> None:
    fence = "```toml\n## not a topic\n```"
    text = f"# T\n\n## One\n\nFirst. Second.\n\n{fence}\n\n## Two words\n\n| a |\n|---|\n\nHere: it is\n"
    found = topics(text)
    assert [(topic.name, topic.summary) for topic in found] == [("one", "First."), ("two-words", "Here.")]
    assert "not a topic" in found[0].text
    assert text.endswith(found[1].text)


def test_the_shipped_manual_has_every_topic_with_a_summary() -> None:
    found = {topic.name: topic for topic in topics(MANUAL.read_text(encoding="utf-8"))}
    assert {"quickstart", "commands", "configuration", "data", "reward", "metrics", "plugins"} < set(found)
    assert all(len(topic.summary) > 15 for topic in found.values())


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
