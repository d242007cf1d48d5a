"""Links and their anchors lead somewhere, and every page can be reached from the navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.reading import LINK, PAGES, PICTURE, REFERENCE, ROOT, SITE, SITE_PAGES, anchors, name_of, prose, text_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists() or to in REFERENCE, target
        if anchor:
            assert anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pictures_exist(page: Path) -> None:
    for pair in PICTURE.findall(prose(page)):
        target = next(filter(None, pair))
        assert target.startswith("https://") or (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", SITE_PAGES, ids=name_of)
def test_a_page_of_the_site_links_within_the_site(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if not re.match(r"https?:|mailto:|#", target):
            assert (page.parent / target.partition("#")[0]).resolve().is_relative_to(SITE), target


def nav_of(content: dict[str, Any]) -> dict[str, list[str]]:
    """The pages of each group of the navigation."""
    return {
        group: [page for entry in entries for page in entry.values()]
        for each in content["nav"]
        for group, entries in each.items()
    }


def test_the_navigation_is_four_groups_of_pages_that_exist() -> None:
    groups = nav_of(yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")))
    pages = [page for entries in groups.values() for page in entries]
    assert len(groups) == 4
    assert len(pages) == len(set(pages)) <= 31, "30 pages and the entrance of the reference"
    assert set(pages) <= {str(page.relative_to(SITE)) for page in [*SITE_PAGES, *REFERENCE]}
    assert pages[0] == "index.md"


def test_every_page_is_within_three_clicks_of_the_home_page() -> None:
    """By links in the text alone: nobody has to open the navigation."""
    assert not {name for name, clicks in clicks_from_home().items() if clicks > 3}


def clicks_from_home() -> dict[str, int]:
    """How many links lie between the home page and each page of the site; 99 where there is no way."""
    clicks = {SITE / "index.md": 0}
    waiting = [SITE / "index.md"]
    while waiting:
        page = waiting.pop(0)
        targets = (target.partition("#")[0] for target in LINK.findall(prose(page)) if ":" not in target)
        for to in ((page.parent / target).resolve() for target in targets if target.endswith(".md")):
            if to not in clicks:
                clicks[to] = clicks[page] + 1
                waiting.append(to)
    return {name_of(page): clicks.get(page, 99) for page in SITE_PAGES}


def test_the_home_page_opens_four_doors() -> None:
    doors = re.findall(
        r"^-   ### \[([^\]]+)\]\(([^)]+)\)", (SITE / "index.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [title for title, _ in doors] == ["Try it", "Your data", "Compare algorithms", "Write a plugin"]


def broken_lists(text: str) -> list[str]:
    """Items of numbered lists that a browser counts from 1 again.

    Python-Markdown, which makes the site, ends a list at a block that is indented by less than four.
    """
    found, is_open, was_blank, fence = [], False, True, ""
    for line in text.splitlines():
        indent, bare = len(line) - len(line.lstrip()), line.strip()
        if fence:
            fence = "" if bare.startswith(fence) else fence
        elif bare.startswith("```"):
            fence, is_open = "```", is_open and indent >= 4
        elif match := re.match(r"(\d+)\. ", line):
            if not is_open and int(match[1]) > 1:
                found.append(line)
            is_open = True
        elif bare and was_blank and indent < 4:
            is_open = False
        was_blank = not bare
    return found


@pytest.mark.parametrize("page", SITE_PAGES, ids=name_of)
def test_numbered_lists_count_on(page: Path) -> None:
    assert not broken_lists(text_of(page))


def test_a_list_that_starts_again_would_be_found() -> None:
    first, second = "1. one\n   more\n", "2. two\n"
    assert broken_lists(f"{first}\n   ```\n   code\n   ```\n\n{second}") == ["2. two"]
    assert broken_lists(f"{first}\nText between.\n\n{second}") == ["2. two"]
    assert not broken_lists(f"{first}\n    ```\n    code\n    ```\n\n{second}")
    assert not broken_lists(f"{first}{second}\n2. is a sentence in a paragraph\n")
    assert not broken_lists(f"{first}\n    A paragraph of it.\n\n{second}")


def test_a_page_has_one_title() -> None:
    for page in SITE_PAGES:
        assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1, name_of(page)
