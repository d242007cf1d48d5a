"""The recipe book: each recipe has a page with formula, source, differences, a configuration that runs, and figures."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Kind
from tests.docs.reading import FENCE, SITE, text_of

BOOK = SITE / "algorithms"
OF_ONE_PAGE = {"reinforce_pp_baseline": "reinforce-pp"}
RECIPES = sorted(each.spec.name for each in load_plugins({}).registered(Kind.RECIPE))
PAGES = {name: OF_ONE_PAGE.get(name, name.replace("_", "-")) for name in [*RECIPES, "gdpo"]}
ROW = r"^\| `{}` \| [\d.e-]+ \|.*\d"


def section(text: str, title: str) -> str:
    """What stands under a heading that begins so, up to the next one."""
    return re.split(r"^## ", text.partition(f"\n## {title}")[2], flags=re.MULTILINE)[0]


def missing(text: str, name: str) -> Iterator[str]:
    """What the page of an algorithm lacks."""
    blocks = [(match["language"], match["body"]) for match in FENCE.finditer(text)]
    if not any(language == "text" and re.search(r"\bA(_i)? += ", body) for language, body in blocks):
        yield "formula"
    if "https://arxiv.org/abs/" not in section(text, "Where it comes from, and when it helps"):
        yield "source"
    differences = section(text, "What differs in TRL")
    if "TRL" not in differences or "verl" not in differences:
        yield "differences"
    configurations = [tomllib.loads(body) for language, body in blocks if language == "toml"]
    runs = [each for each in configurations if each.get("model", {}).get("model") == "builtin:tiny"]
    if not any(name in str(each["algorithm"]) for each in runs):
        yield "configuration"
    if not all(re.search(ROW.format(row), section(text, "What was measured"), re.MULTILINE) for row in ("grpo", name)):
        yield "figures"
    if not any(language == "pycon" for language, _ in blocks):
        yield "vectors"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_of_a_recipe_is_complete(name: str) -> None:
    page = Path(BOOK / f"{PAGES[name]}.md")
    assert not list(missing(text_of(page), name)), page
    assert f"[`{name}`]({page.name})" in (BOOK / "recipes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (r"```text\n.*?```", "formula"),
        (r"\[arXiv[^)]*\)", "source"),
        (r"## What differs in TRL.*?(?=\n## )", "differences"),
        (r"```toml\n.*?```", "configuration"),
        (r"\| `dapo` \| [^\n]*", "figures"),
        (r"```pycon\n.*?```", "vectors"),
    ],
)
def test_what_a_page_lacks_is_found(taken: str, found: str) -> None:
    text = (BOOK / "dapo.md").read_text(encoding="utf-8")
    assert list(missing(re.sub(taken, "", text, flags=re.DOTALL), "dapo")) == [found]
