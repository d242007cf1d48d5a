"""The recipes of the field: what the page says of each is what it sets, and its campaign is what it promises."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.load import load_campaign
from retrain.kernel.declared import Kind
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.first_party import promised_names
from retrain.kernel.registry import Plugins

PAGE = Path(__file__).parents[2] / "docs/pages/algorithms/recipes.md"
ROW = re.compile(r"^\| \[`(\w+)`\]\([\w#.-]+\) \| ([^|]*)\| ([^|]*)\| ([^|]*)\| ([^|]*)\| [^|]* \|$", re.MULTILINE)
NAMES = [*promised_names(Kind.RECIPE)]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins({})


def values(plugins: Plugins, name: str) -> dict[str, Any]:
    (entry,) = plugins.find(Kind.RECIPE, name)
    return dict(entry.spec.load())


def test_those_of_the_documentation_are_those_registered(plugins: Plugins) -> None:
    registered = [entry.spec.name for entry in plugins.registered(Kind.RECIPE)]
    assert sorted(NAMES) == registered == sorted(row[0] for row in ROW.findall(PAGE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_page_says_all_that_a_recipe_sets(plugins: Plugins, name: str) -> None:
    found = values(plugins, name)
    row = next(row for row in ROW.findall(PAGE.read_text(encoding="utf-8")) if row[0] == name)
    advantage, loss, aggregation, more = (cell.strip() for cell in row[1:5])
    assert f"`{found.pop('algorithm.advantage_mode')}`" in advantage
    params = found.pop("algorithm.advantage_params", {})
    assert params == ({"scale": "std", "ddof": 1} if "over the group's deviation" in advantage else {})
    assert loss.startswith(f"`{found.pop('algorithm.loss')}`")
    assert f"`{found.pop('algorithm.aggregation')}`" == aggregation
    assert found.pop("algorithm.transform_mode") == "none"
    clips = {"algorithm.clip_eps": "ε ", "algorithm.clip_eps_high": "ε' "}
    for path, mark in clips.items():
        said = re.search(rf"(?:^|, ){mark}(\S+?)(?:,|$)", loss)
        assert (float(said[1]) if said else None) == found.pop(path, None)
    assert more == ", ".join(f"`{path.partition('.')[2]} = {json.dumps(value)}`" for path, value in found.items())


@pytest.mark.long
def test_its_campaign_is_eight_algorithms_by_three_seeds_in_less_than_30_lines(
    plugins: Plugins, tmp_path: Path
) -> None:
    (text,) = (
        block
        for block in re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
        if '{ recipe = "reinforce_pp_baseline" }' in block
    )
    assert len(text.splitlines()) < 30
    file = tmp_path / "recipes.toml"
    file.write_text(text, encoding="utf-8")
    campaign = load_campaign([str(file)], plugins)
    assert sorted(campaign.labels) == sorted(NAMES)
    assert campaign.num_runs == 24
    assert tomllib.loads(text)["model"]["model"] == "builtin:tiny"
    assert all(not each.beaten for each in campaign.conditions)
