"""`retrain man` in all formats, its generated sections, and renderings that stay valid for any text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.manual import command as man_command
from retrain.cli.manual import markdown
from retrain.cli.manual.command import generator
from retrain.cli.manual.markdown import MANUAL, regenerated, topics
from retrain.cli.manual.renderings import html_page, man_page
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from tests.end_to_end.terminal import converse

Command = Callable[..., Any]
HOSTILE = (
    "## A <script>alert(1)</script> & \\fBx\n\n.TH evil\n'so /etc/passwd\n\n`a\\b` -- \u03bb <img src=x onerror=y>\n"
)


@pytest.fixture
def manual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy = tmp_path / "manual.md"
    shutil.copy(MANUAL, copy)
    monkeypatch.setattr(man_command, "MANUAL", copy)
    return copy


@pytest.mark.parametrize("form", ["text", "json", "troff", "html"])
def test_every_form_prints_something_without_internal_markers(form: str, command: Command) -> None:
    for topic in ((), ("--topic", "metrics")):
        result = command("man", "--format", form, *topic)
        assert (result.code, result.err) == (0, "")
        assert len(result.out) > 1000
        assert not re.search(r"<!--|-->|<<AUTO", result.out.replace("<!doctype", ""))


def test_text_is_the_file_and_a_topic_in_any_spelling_is_its_part(command: Command) -> None:
    whole = command("man").out
    assert (whole.startswith("# retrain"), command("manual").out) == (True, whole)
    for name in ("quickstart", "Quickstart", "capacity-planning", "environments", " hooks "):
        part = command("man", "-t", name).out.strip()
        assert (part.startswith("## "), part in whole) == (True, True)


def test_a_topic_may_be_named_alone_and_an_unknown_one_is_answered_with_the_nearest(command: Command) -> None:
    assert command("man", "campaign") == command("man", "--topic", "campaign")
    for words, wanted in (
        (("campagn",), "'campaign'"),
        (("--topic", "metrix"), "'metrics'"),
        (("--topic", "zzz"), "quickstart"),
        (("campaign", "metrics"), "topic"),
        (("page.md",), "--check"),
    ):
        result = command("man", *words)
        assert (result.code, wanted in result.err) == (2, True)


def test_json_has_the_documented_fields(command: Command) -> None:
    whole = json.loads(command("man", "--json").out)
    assert set(whole) == {"tool", "path", "topics", "manual"}
    assert Path(whole["path"]) == MANUAL
    part = json.loads(command("man", "--format", "json", "--topic", "quickstart").out)
    assert set(part) == {"tool", "path", "topic", "section", "content"}
    assert (part["tool"], part["topic"], part["section"]) == ("retrain", "quickstart", "Quickstart")
    assert part["content"] in whole["manual"]
    rows = json.loads(command("man", "--list-topics", "--json").out)
    assert [row["name"] for row in rows] == whole["topics"]
    assert len(command("man", "--list-topics").out.splitlines()) == len(rows)
    assert Path(command("man", "--path").out.strip()) == MANUAL


def test_what_is_installed_is_what_is_printed(distribution: Callable[..., Path], command: Command) -> None:
    source = (
        "from retrain.api import MetricSpec, PluginSpec, hookimpl\n"
        "@hookimpl\ndef retrain_register_advantages(register):\n"
        "    register(PluginSpec(name='fresh_advantage', summary='Quite new | indeed.', factory='x:y'))\n"
        "@hookimpl\ndef retrain_describe_metrics():\n"
        "    return [MetricSpec(name='fresh_rate', meaning='How fresh.', unit='kg')]\n"
    )
    distribution("fresh", {"fresh": source})
    assert "`fresh_advantage` | fresh | Quite new \\| indeed." in command("man", "-t", "plugins").out
    assert "`fresh_rate` | kg | How fresh." in command("man", "-t", "metrics").out
    result = command("man", "--check")
    assert result.code == 1
    assert "stale" in result.out


def test_what_a_plugin_cannot_describe_is_named_and_the_rest_is_there(
    distribution: Callable[..., Path], command: Command
) -> None:
    source = (
        "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_commands(register):\n"
        "    register(PluginSpec(name='broken', summary='s', factory='no_such_module:command'))\n"
        "@hookimpl\ndef retrain_describe_metrics():\n    return 1 / 0\n"
    )
    distribution("faulty", {"faulty": source})
    for topic, named, other in (
        ("commands", "### retrain broken\n", "### retrain status"),
        ("metrics", "### faulty, `faulty`\n", "| `loss` |"),
    ):
        page = command("man", "-t", topic).out
        assert re.search(rf"{named}\nCannot be (loaded|described): \w+Error\.", page)
        assert other in page


@pytest.mark.long
def test_sync_brings_the_file_along_and_check_tells(manual: Path, command: Command) -> None:
    assert command("man", "--sync").code == 0
    whole = manual.read_text(encoding="utf-8")
    manual.write_text(re.sub(r"\| `lr` \|.*\n", "", whole), encoding="utf-8")
    stale = command("man", "--check")
    assert (stale.code, stale.out) == (1, f"{manual} (stale)\n")
    assert stale.err == "fix: retrain man --sync\n"
    assert manual.read_text(encoding="utf-8") != whole, "--check writes nothing"
    assert command("man", "--sync").out == f"{manual} (updated)\n"
    assert manual.read_text(encoding="utf-8") == whole
    assert command("man", "--sync").out == f"{manual} (already up to date)\n"
    assert command("man", "--check").code == 0


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--sync", "--check"], "--sync"),
        (["--check", "gone.md"], "gone.md"),
        (["--check", "bytes.md"], "bytes.md"),
        (["--sync", "odd.md"], "nonsense"),
        (["--sync", "damaged.md"], "damaged"),
        (["--format", "pdf"], "pdf"),
    ],
)
def test_wrong_usage_is_refused_and_changes_nothing(
    arguments: list[str], place: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "bytes.md").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.md").write_text("<!-- generated: nonsense -->\n<!-- end: nonsense -->\n", encoding="utf-8")
    (tmp_path / "damaged.md").write_text("<!-- generated: keys -->\n", encoding="utf-8")
    result = command("man", *arguments)
    assert (result.code, place in result.err) == (2, True)
    assert "nonsense -->\n<!-- end" in (tmp_path / "odd.md").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("source", ["manual", "hostile"])
def test_groff_reads_the_man_page_without_a_warning(source: str, command: Command) -> None:
    troff = command("man", "--format", "troff").out if source == "manual" else man_page(HOSTILE)
    assert troff.isascii()
    form = ["groff", "-man", "-Tutf8", "-ww", "-rLL=100n"]
    done = subprocess.run(form, input=troff, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
    plain = re.sub(r"\x1b\[[\d;]*m|.\x08", "", done.stdout)
    hostile = (".TH evil", "a\\b", "--", "\u03bb")
    for text in ("QUICKSTART", "retrain init --template tiny") if source == "manual" else hostile:
        assert text in plain


@pytest.mark.parametrize("source", ["manual", "hostile"])
def test_the_html_page_is_escaped_and_loads_nothing(source: str, command: Command) -> None:
    page = command("man", "--format", "html").out if source == "manual" else html_page(HOSTILE, title="<b>")
    assert page.startswith("<!doctype html>")
    assert not re.search(r"<(script|img|link|iframe|b)\b|<[^>]* (src|srcset|data)=", page)
    targets, ids = (set(re.findall(rf'{name}="#?([^"]*)"', page)) for name in ("<a href", "id"))
    assert {each for each in targets if "/" not in each} <= ids
    assert ("&lt;script&gt;" in page) == (source == "hostile")


def test_on_a_terminal_it_is_rendered(tmp_path: Path) -> None:
    script = str(Path(sys.executable).with_name("retrain"))
    code, shown = converse([script, "man", "--topic", "quickstart"], [], cwd=tmp_path, environ={"NO_COLOR": ""})
    assert (code, "\x1b[" in shown, "Quickstart" in shown, "```" in shown) == (0, True, True, False)


def test_what_cannot_be_generated_is_answered_with_what_can(plugins: Plugins) -> None:
    with pytest.raises(ConfigError) as caught:
        generator(plugins)("nonsense")
    assert "keys, " in caught.value.problems[0].fix


@pytest.mark.parametrize("what", ["hooks", "keys"])
def test_a_section_is_the_same_in_every_process(what: str, plugins: Plugins) -> None:
    page = generator(plugins)(what)
    assert " at 0x" not in page
    assert "PydanticUndefined" not in page
    assert page == generator(load_plugins({}))(what)


def test_parameters_of_a_part_are_listed_with_required_ones(distribution: Callable[..., Path]) -> None:
    source = (
        "from pydantic import BaseModel\nfrom retrain.api import PluginSpec, hookimpl\n"
        "class P(BaseModel):\n    must: int\n    may: float = 0.5\n"
        "@hookimpl\ndef retrain_register_rewards(register):\n"
        "    register(PluginSpec(name='strict_one', summary='s', factory='x:y', params=P, aliases=('other',)))\n"
    )
    distribution("params", {"params_plugin": source})
    page = generator(load_plugins({}))("plugins")
    assert "`strict_one` (`other`)" in page
    table = page.partition("Parameters of `strict_one`:")[2]
    assert "| `must` |  |" in table
    assert "| `may` | `0.5` |" in table


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
HOSTILE_TEXTS = st.lists(
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
@given(HOSTILE_TEXTS)
def test_no_text_becomes_a_macro_of_the_man_page(text: str) -> None:
    page = man_page(text)
    assert page.isascii()
    for line in page.splitlines():
        if line.startswith((".", "'")):
            assert line.split(" ")[0] in MACROS, line
        assert not re.search(r"\\(?!\[u[0-9A-F]{4,6}\]|f[BIR]|e|-|\(aq|\(ga|\(ha|\(ti|\(bu|\(dq|&)", line), line


@settings(max_examples=40)
@given(HOSTILE_TEXTS)
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
