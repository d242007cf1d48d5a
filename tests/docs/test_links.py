"""Links and their anchors lead somewhere, and every page can be reached from the navigation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.reading import LINK, PAGES, PICTURE, ROOT, SITE, SITE_PAGES, anchors, name_of, prose


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), target
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


def test_every_page_is_in_the_navigation_once() -> None:
    content = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        children = node if isinstance(node, list) else node.values() if isinstance(node, dict) else []
        return [page for child in children for page in pages(child)]

    assert sorted(pages(content["nav"])) == sorted(str(page.relative_to(SITE)) for page in SITE_PAGES)


def test_a_page_has_one_title() -> None:
    for page in SITE_PAGES:
        assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1, name_of(page)
