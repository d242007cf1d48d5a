"""The generated sections: what they refuse, and how they show a plugin's parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.cli.manual.command import generator
from retrain.cli.manual.contracts import PUBLIC
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins


@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("nonsense", "keys, "),
        ("contract advntage", "advantage, "),
        ("api os", "retrain.api, "),
        ("checks advntage", "'adv"),
    ],
)
def test_what_cannot_be_generated_is_answered_with_what_can(what: str, wanted: str, plugins: Plugins) -> None:
    with pytest.raises(ConfigError) as caught:
        generator(plugins)(what)
    assert wanted in caught.value.problems[0].fix


@pytest.mark.parametrize("kind", PUBLIC, ids=str)
def test_every_contract_names_its_hook_and_its_types(kind: str, plugins: Plugins) -> None:
    page = generator(plugins)(f"contract {str(kind).replace(' ', '-')}")
    assert "| registered by | `retrain_register_" in page
    for name in PUBLIC[kind]:  # type: ignore[index]
        assert f"### {name}" in page


@pytest.mark.parametrize("what", ["api retrain.api", "api retrain.advantages", "hooks", "contract backend", "keys"])
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


def test_the_page_shows_what_the_scaffold_writes(plugins: Plugins) -> None:
    page = generator(plugins)("scaffold transform my_floor")
    code = page.partition("```python\n")[2].partition("\n```")[0]
    compile(code, "my_floor.py", "exec")
    assert 'name="my_floor"' in code
    assert "[algorithm]" in page
