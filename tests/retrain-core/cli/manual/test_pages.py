"""Pages with generated sections, and the topics of the manual."""

from __future__ import annotations

import pytest

from retrain.cli.manual.markdown import MANUAL, regenerated, topics, without_markers
from retrain.kernel.errors import ConfigError

PAGE = "# Title\n\n<!-- generated: keys -->\nold\n<!-- end: keys -->\n\ntail without newline"


def test_only_generated_sections_change() -> None:
    page = regenerated(PAGE, lambda what: f"new {what}\n")
    assert page == PAGE.replace("old", "\nnew keys\n")
    assert regenerated(page, lambda what: f"new {what}") == page
    page = "<!-- generated: contract data-source -->\n<!-- end: contract data-source -->\n"
    assert "[contract data-source]" in regenerated(page, lambda what: f"[{what}]")


def test_what_is_generated_may_hold_anything_but_is_not_read_again() -> None:
    hostile = "\\1 \\g<what> $0 ``` <b> \u202e"
    page = regenerated(PAGE, lambda what: hostile)
    assert hostile in page
    assert regenerated(page, lambda what: hostile) == page


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


def test_no_marker_reaches_a_reader() -> None:
    shown = without_markers(regenerated(PAGE, lambda what: "new"))
    assert shown == "# Title\n\nnew\n\ntail without newline"


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
