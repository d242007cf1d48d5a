"""What every registered part must do, and what the suites say of themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from retrain.testing import ConformanceError, conformance
from tests.kit.problems import codes_in

pytestmark = pytest.mark.slow

Failures = Callable[..., dict[str, str]]
HEAVY = """
import vllm
from retrain.advantages import AdvantageSpec
from retrain.api import PluginSpec, hookimpl
from pydantic import BaseModel

class Lax(BaseModel):
    scale: float = 1.0

@hookimpl
def retrain_register_advantages(register):
    for name, summary, params in (("heavy", "", Lax), ("gone", "Gone.", None)):
        factory = AdvantageSpec(name=name, compute=lambda ctx: ctx.rewards_G) if name == "heavy" else "no_such:thing"
        register(PluginSpec(name=name, summary=summary, factory=factory, params=params))

@hookimpl
def retrain_register_config_tables(register):
    from shell_parts import TakesAFlag
    register(PluginSpec(name="grabbing", summary="Takes --lr.", factory=TakesAFlag))
"""


def _message(kind: str, name: str, check: str) -> str:
    with pytest.raises(ConformanceError) as caught:
        {str(found): found for found in conformance(kind, name)}[check]()
    return str(caught.value)


def test_what_a_registered_part_announces(distribution: Callable[..., object]) -> None:
    distribution("retrain-heavy", {"vllm": "", "heavy_plugin": HEAVY}, entry="heavy_plugin")
    assert "its summary is ''" in _message("advantage", "heavy", "says_what_it_is")
    heavy = _message("advantage", "heavy", "is_announced_without_heavy_imports")
    assert "announcing the plugins of retrain-heavy imports vllm" in heavy
    assert "Lax accepts the unknown option" in _message("advantage", "heavy", "refuses_unknown_options")
    assert "No module named 'no_such'" in _message("advantage", "gone", "is_found_by_name")
    assert "--lr is grabbing.lr and training.lr" in _message("config table", "grabbing", "has_flags_of_its_own")


def test_a_name_that_no_plugin_provides_is_reported_with_the_nearest_one() -> None:
    assert "no transform named 'gtpo_sep'" in _message("transform", "gtpo_sep", "is_found_by_name")


@pytest.mark.parametrize("kind", ["data-source", "data source", "data_source", "Data-Source"])
def test_a_kind_in_any_spelling(kind: str) -> None:
    checks = conformance(kind, "arithmetic")
    assert [str(check) for check in checks] == [check.name for check in checks]
    assert all(check.purpose.endswith(".") for check in checks)
    assert len(set(map(str, checks))) == len(checks)


def test_a_kind_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="'transform'") as caught:
        conformance("tranform", "none")
    assert codes_in(caught) == ["conformance.unknown-kind"]


def test_a_mistake_in_the_given_configuration_is_reported() -> None:
    (check,) = (
        c for c in conformance("advantage", "x", config={"training": {"stepz": 1}}) if c.name == "is_found_by_name"
    )
    with pytest.raises(ConformanceError, match="stepz"):
        check()


def test_listing_the_checks_loads_nothing() -> None:
    code = (
        "import sys\nfrom retrain.testing import conformance\n"
        "from retrain.api import Kind\nfor kind in Kind: assert conformance(kind, 'anything')\n"
        "found = {'torch', 'transformers', 'pytest', 'retrain_sepa.plugin', 'retrain_local'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_error_says_where_what_why_and_how_to_fix_it(failures: Failures) -> None:
    (message,) = failures("config table", "shell_parts.Unexplained").values()
    where, why, fix = message.splitlines()
    assert where.startswith(
        "config table 'shell_parts.Unexplained', check explains_its_keys: broken promise: no description of "
    )
    assert why.strip().endswith("show it")
    assert fix.strip().startswith("fix: write retrain.api.key(")
