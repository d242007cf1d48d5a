"""What the pages show works: links lead somewhere, TOML loads, commands parse, examples compute what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import yaml

from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from tests.docs.reading import (
    LINK,
    PAGES,
    PICTURE,
    REFERENCE,
    ROOT,
    SITE,
    SITE_PAGES,
    anchors,
    blocks,
    command_lines,
    faults,
    name_of,
    prose,
    text_of,
)
from tests.kit.conforming import check_conforms


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere_within_the_site_and_pictures_exist(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists() or to in REFERENCE, target
        assert page not in SITE_PAGES or to.is_relative_to(SITE), target
        assert not anchor or anchor in anchors(to), target
    for pair in PICTURE.findall(prose(page)):
        target = next(filter(None, pair))
        assert target.startswith("https://") or (page.parent / target).is_file(), target


def test_the_navigation_is_four_groups_of_pages_that_exist() -> None:
    nav = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [page for each in nav for entries in each.values() for entry in entries for page in entry.values()]
    assert len(nav) == 4
    assert len(pages) == len(set(pages)) <= 35, "33 pages, the measured table of types, the entrance of the reference"
    assert set(pages) <= {str(page.relative_to(SITE)) for page in [*SITE_PAGES, *REFERENCE]}
    assert pages[0] == "index.md"


def test_every_page_is_within_three_clicks_of_the_home_page() -> None:
    """By links in the text alone: nobody has to open the navigation."""
    clicks = {SITE / "index.md": 0}
    waiting = [SITE / "index.md"]
    while waiting:
        page = waiting.pop(0)
        targets = (target.partition("#")[0] for target in LINK.findall(prose(page)) if ":" not in target)
        for to in ((page.parent / target).resolve() for target in targets if target.endswith(".md")):
            if to not in clicks:
                clicks[to] = clicks[page] + 1
                waiting.append(to)
    assert not {name_of(page) for page in SITE_PAGES if clicks.get(page, 99) > 3}


def test_a_page_has_one_title() -> None:
    for page in SITE_PAGES:
        assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1, name_of(page)


NO_CONFIGURATION = re.compile(r"^\[(project|tool|build)", re.MULTILINE)  # of a pyproject
# What the generated sections show of a name: its first line, or the fields of a dataclass.
SIGNATURE = re.compile(r"(def [^\n]*[^:\n]|class \w+[^\n]*[^:\n]|\w+ = \S[^\n]*|\w+: \w+|\w+\(\n.*\n\))\n\Z", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_toml_loads_commands_parse_and_python_compiles(page: Path, tmp_path: Path) -> None:
    tables, file = registered_tables(load_plugins({})), tmp_path / "block.toml"
    for block in blocks(page, "toml"):
        if not NO_CONFIGURATION.search(block):
            file.write_text(block, encoding="utf-8")
            _, problems = load_config(file, tables=tables)
            assert not problems, f"{[str(problem) for problem in problems]}\n{block}"
    for words in command_lines(page):
        assert not faults(words), f"retrain {' '.join(words)}"
    for block in blocks(page, "python", "py"):
        if not SIGNATURE.match(block):
            compile(block, name_of(page), "exec")
    assert page not in SITE_PAGES or list(command_lines(page)) or blocks(page, "python"), "there is nothing to run"


def test_examples_compute_what_the_page_says() -> None:
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    for page in PAGES:
        text = "\n".join(blocks(page, "pycon"))
        runner.run(doctest.DocTestParser().get_doctest(text, {}, name_of(page), str(page), 0), out=said.append)
    assert runner.tries > 10
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("retrain statuss", "no command"),
        ("retrain status --actve", "--actve"),
        ("retrain --max-stepss 3", "--max-stepss"),
        ("retrain my.toml --set training.lrr=1", "training.lrr"),
        ("retrain man --format pdf", "pdf"),
        ("retrain explain x.toml --lrr 1", "--lrr"),
        ("FOO=1 retrain init && retrain --nonsense 1", "--nonsense"),
        ("retrain status \\\n  --wrong | head", "--wrong"),
    ],
)
def test_a_wrong_command_line_would_be_found(line: str, wanted: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash\n{line}\n```\n", encoding="utf-8")
    found = [fault for words in command_lines(page) for fault in faults(words)]
    assert any(wanted in fault for fault in found), found


# What `--help` shows as an example: two spaces, the line, and what it is for after two more.
EXAMPLE = re.compile(r"^  (retrain(?: \S+)*)(?:  .*)?$", re.MULTILINE)


def test_examples_of_help_parse(tmp_path: Path) -> None:
    """They are in the generated page of commands; nothing is run."""
    text = text_of(SITE / "reference/commands.md")
    lines = [line for line in EXAMPLE.findall(text) if "<TAB>" not in line]
    assert len(lines) > 60
    page = tmp_path / "page.md"
    page.write_text("```bash\n" + "\n".join(lines) + "\n```\n", encoding="utf-8")
    for words in command_lines(page):
        assert not faults(words), f"retrain {' '.join(words)}"


def test_the_health_monitor_of_the_page_passes_the_suite_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = (b for b in blocks(SITE / "write-a-plugin.md", "python") if "class Expensive" in b)
    check_conforms("health-monitor", block, monkeypatch, tmp_path, "example_of_a_monitor")
