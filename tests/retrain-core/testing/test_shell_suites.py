"""The suites of launchers, commands, tables, templates and recipes, and what every registered part must do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from retrain.testing import ConformanceError, conformance, launchers

pytestmark = pytest.mark.slow

Failures = Callable[..., dict[str, str]]
SOUND = (
    ("launcher", "Strict"),
    ("command", "sound"),
    ("command", "refuses"),
    ("config table", "SoundTable"),
    ("init template", "SOUND_TEMPLATE"),
    ("recipe", "SOUND_RECIPE"),
)
BROKEN = (
    ("launcher", "SwallowsCodes", "runs_a_process_to_its_end", "exited with 3 ended as 0"),
    ("launcher", "StaysHere", "gives_it_environment_folder_and_logs", "stdout.log holds 'hello "),
    ("launcher", "StartsLogsAnew", "gives_it_environment_folder_and_logs", "after two runs"),
    ("launcher", "NeverAsks", "asks_it_to_stop", "ended as -9"),
    ("launcher", "LeavesChildren", "kills_it_with_all_it_started", "the child of a killed process to end"),
    ("launcher", "Launcher", "tells_of_a_program_that_is_not_there", "FileNotFoundError"),
    ("command", "no_command", "is_a_click_command", "the factory is function"),
    ("command", "bare", "explains_itself", "--help ended with 0"),
    ("command", "bare", "documents_its_options", "no help for --many"),
    ("config table", "LaxTable", "is_a_strict_model", "accepts the unknown key"),
    ("config table", "NoDefault", "has_defaults", "Field required"),
    ("config table", "Unexplained", "explains_its_keys", "much_ado"),
    ("init template", "NOT_TOML", "is_toml", "not valid TOML"),
    ("init template", "UNKNOWN_KEY", "is_a_valid_template", "did you mean 'max_steps'?"),
    ("init template", "UNKNOWN_NAME", "is_a_valid_template", "'no_such_transform'"),
    ("init template", "NO_COMMENT", "has_comments", "no comment"),
    ("init template", "no_text", "is_toml", "it is None"),
    ("recipe", "EMPTY_RECIPE", "is_a_valid_configuration", "it sets no key"),
    ("recipe", "MISSPELT_RECIPE", "is_a_valid_configuration", "unknown key"),
    ("recipe", "RUN_RECIPE", "is_a_valid_configuration", "no recipe sets it"),
    ("recipe", "NAMES_NOTHING", "is_a_valid_configuration", "no advantage named 'grpoo'"),
    ("recipe", "HOLDS_A_TUPLE", "runs_again_from_its_records", "params.sizes=[1, 2]"),
    ("recipe", "no_recipe", "is_a_valid_configuration", "not a mapping"),
)
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


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that outlives its parent is waited for; how long does not matter here."""
    monkeypatch.setattr(launchers, "WAIT_S", 3.0)


@pytest.mark.parametrize(("kind", "part"), SOUND)
def test_sound_parts_pass(kind: str, part: str, failures: Failures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "WAIT_S", 60.0)
    assert failures(kind, f"shell_parts.{part}") == {}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "part", "check", "words"), BROKEN)
def test_broken_parts_are_named(kind: str, part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures(kind, f"shell_parts.{part}", only=check)[check]


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
    with pytest.raises(ValueError, match="did you mean 'transform'"):
        conformance("tranform", "none")


def test_a_mistake_in_the_given_configuration_is_reported() -> None:
    (check,) = (
        c for c in conformance("advantage", "x", config={"training": {"stepz": 1}}) if c.name == "is_found_by_name"
    )
    with pytest.raises(ConformanceError, match="unknown key"):
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
    assert where.startswith("config table 'shell_parts.Unexplained', check explains_its_keys: no description of ")
    assert why.strip().endswith("show it")
    assert fix.strip().startswith("fix: write retrain.api.key(")
