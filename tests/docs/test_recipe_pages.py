"""The recipe book: each recipe has a section with formula, source, differences and vectors, and a row of figures."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Kind
from tests.docs.reading import FENCE, SITE, text_of

BOOK = SITE / "algorithms"
TITLES = dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), "reinforce_pp, reinforce_pp_baseline")
OF_LOSSES = ("dapo", "gspo", "cispo")
RECIPES = sorted(each.spec.name for each in load_plugins({}).registered(Kind.RECIPE))
ROW = r"^\| `{}` \| [\d.e-]+ \|.*\d"


def section(name: str) -> str:
    """Return the section of an algorithm."""
    page = "losses.md" if name in OF_LOSSES else "group-advantages.md"
    text = text_of(BOOK / page).partition(f"\n## {TITLES.get(name, name)}\n")[2]
    return re.split(r"^## ", text, flags=re.MULTILINE)[0]


def missing(text: str) -> Iterator[str]:
    """Yield the parts that the section of an algorithm lacks."""
    blocks = [(match["language"], match["body"]) for match in FENCE.finditer(text)]
    if not any(language == "text" and re.search(r"\bA(_i)? += ", body) for language, body in blocks):
        yield "formula"
    if "https://arxiv.org/abs/" not in text:
        yield "source"
    if "TRL" not in text or "verl" not in text:
        yield "differences"
    if not any(language == "pycon" for language, _ in blocks):
        yield "vectors"


@pytest.mark.parametrize("name", [*RECIPES, "maxrl", "gdpo"])
def test_the_section_of_an_algorithm_is_complete(name: str) -> None:
    assert not list(missing(section(name)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_row_and_its_figures(name: str) -> None:
    text = text_of(BOOK / "recipes.md")
    assert re.search(ROW.format(name), text, re.MULTILINE)
    assert f"| [`{name}`](" in text


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        (r"```text\n.*?```", "formula"),
        (r"https://arxiv.org/abs/", "source"),
        (r"verl", "differences"),
        (r"```pycon\n.*?```", "vectors"),
    ],
)
def test_a_missing_part_is_found(taken: str, found: str) -> None:
    assert list(missing(re.sub(taken, "", section("dapo"), flags=re.DOTALL))) == [found]
