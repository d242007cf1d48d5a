"""The site as it is built: nothing is loaded from elsewhere, lists count on, and search works from a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.reading import REFERENCE, ROOT, SITE, SITE_PAGES, text_of
from tests.kit.browser import dom_at, needs_chromium

pytestmark = pytest.mark.client
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=\"?([^\" >]+)")
FOUND = re.compile(r'<a href="([^"]*)" class="md-search-result__link"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    options = ("--strict", "--quiet", "--config-file", str(ROOT / "docs/mkdocs.yml"), "--site-dir", str(folder))
    environ = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", *options], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in [*SITE_PAGES, *REFERENCE]:
        text = (site / page.relative_to(SITE).with_suffix(".html")).read_text(encoding="utf-8")
        assert not [address for address in LOADED.findall(text) if re.match(r"(?:https?:)?//", address)], page


def test_a_numbered_list_of_a_page_is_one_list(site: Path) -> None:
    for page in SITE_PAGES:
        last = re.findall(r"^(\d+)\. ", text_of(page), re.MULTILINE)
        text = (site / page.relative_to(SITE).with_suffix(".html")).read_text(encoding="utf-8")
        article = text.partition("<article")[2].partition("</article>")[0]
        assert article.count("<ol>") <= last.count("1"), page


@needs_chromium
def test_pages_fit_a_phone(site: Path) -> None:
    """Only their own blocks scroll sideways."""
    pages = [str(page.relative_to(SITE).with_suffix(".html")) for page in SITE_PAGES]
    (site / "frames.html").write_text(
        "".join(f'<iframe src="{page}" style="width:390px;height:800px;border:0"></iframe>' for page in pages)
        + "<script>onload = () => { for (const frame of document.querySelectorAll('iframe')) "
        "frame.title = frame.contentDocument.documentElement.scrollWidth; }</script>"
    )
    found = dom_at((site / "frames.html").as_uri(), "--allow-file-access-from-files")
    widths = [int(width) for width in re.findall(r'title="(\d+)"', found)]
    assert len(widths) == len(pages)
    assert not [page for page, width in zip(pages, widths, strict=True) if width > 390]


@needs_chromium
@pytest.mark.parametrize(
    ("query", "wanted"),
    [("your data", "your-data.html"), ("gpu memory", "your-model.html"), ("coming from TRL", "coming-from.html")],
)
@pytest.mark.parametrize("page", ["index.html", "algorithms/losses.html"])
def test_search_answers_a_page_that_was_opened_as_a_file(site: Path, page: str, query: str, wanted: str) -> None:
    found = FOUND.findall(dom_at(f"{(site / page).as_uri()}?q={query.replace(' ', '+')}"))
    assert any(Path(address.partition("?")[0]) == Path(f"{site.as_uri()}/{wanted}") for address in found[:6]), found[:9]
