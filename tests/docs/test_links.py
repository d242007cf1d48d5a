"""Links and their anchors lead somewhere, and every page can be reached from the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.reading import LINK, PAGES, PICTURE, REFERENCE, ROOT, SITE, SITE_PAGES, anchors, name_of, prose


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
    assert len(pages) == len(set(pages)) <= 31, "30 pages and the entrance of the reference"
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
