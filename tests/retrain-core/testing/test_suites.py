"""The suites distinguish sound parts from parts with a single fault; `parts.toml` has the table."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.testing import ConformanceError, conformance, launchers
from tests.kit.problems import codes_in

PAGE = Path(__file__).parents[3] / "docs/pages/write-a-plugin.md"
PARTS = tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))
IMPATIENT = {"reward": {"scoring": {"timeout_s": 1.0}}}
Failures = Callable[..., dict[str, str]]


def cases(group: str) -> list[Any]:
    found = []
    for kind, table in PARTS.items():
        tried = table["tried"][group == "broken"]
        for place, case in enumerate(table[group]):
            when = tried if tried != "first" else "long" if place else "quick"
            marks = () if when == "quick" else getattr(pytest.mark, when)
            values = (case,) if isinstance(case, str) else case
            found.append(pytest.param(kind, *values, marks=marks, id=f"{kind}-{values[0]}"))
    return found


@pytest.mark.parametrize(("kind", "part"), cases("sound"))
def test_sound_parts_pass(kind: str, part: str, failures: Failures) -> None:
    if kind == "loss":
        pytest.importorskip("retrain_local", reason="a loss is tried by the backend that applies it")
    assert failures(kind, part) == {}


@pytest.mark.parametrize(("kind", "part", "check", "words"), cases("broken"))
def test_broken_parts_are_named(
    kind: str, part: str, check: str, words: str, failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "loss":
        pytest.importorskip("retrain_local")
    monkeypatch.setattr(launchers, "WAIT_S", 3.0)  # for a child that outlives its parent
    message = failures(kind, part, only=check, config=IMPATIENT.get(kind))[check]
    assert words in message
    assert codes_in(message)[-1].startswith("conformance.")
    assert "fix: " in message or "conformance.refused" in codes_in(message)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "part", "check"),
    [
        ("advantage", "credit_parts.in_place", "leaves_rewards_alone"),
        ("transform", "credit_parts.ASKS_NOBODY", "names_a_controller_that_exists"),
        ("advantage", "credit_parts.sorted_ones", "follows_the_order_of_completions"),
        ("loss", "loss_parts.frozen", "has_the_gradient_of_its_value"),
        ("loss", "loss_parts.upside_down", "raises_what_was_good"),
    ],
)
def test_a_fault_fails_no_check_that_it_does_not_concern(kind: str, part: str, check: str, failures: Failures) -> None:
    assert set(failures(kind, part)) == {check}


@pytest.mark.long
def test_the_kernel_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_PLUGINS", "retrain-core")
    for check in (*conformance("transform", "credit_parts.spread"), *conformance("reward", "reward_parts.Sound")):
        check()


def test_the_whole_algorithm_of_the_documentation_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "traits=Needs()" in part]
    (tmp_path / "running_mean_of_the_page.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for check in conformance("algorithm", "running_mean_of_the_page.PLUGIN"):
        check()


POLICIES = """
from dataclasses import replace
from policy_parts import CAPABILITIES, Backend
from retrain.api import PluginSpec, hookimpl
LIES = replace(CAPABILITIES, provides_entropy=False)
@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="honest", summary="Sound.", factory=Backend, traits=CAPABILITIES))
    register(PluginSpec(name="liar", summary="Sound, but for its traits.", factory=Backend, traits=LIES))
    register(PluginSpec(name="silent", summary="Without traits.", factory=Backend))
"""


def test_traits_must_be_the_capabilities_of_the_object(distribution: Callable[..., object], failures: Failures) -> None:
    distribution("retrain-policies", {"policy_plugin": POLICIES})
    name = "declares_its_capabilities"
    assert failures("backend", "honest", only=name) == {}
    assert "registered with traits Capabilities(" in failures("backend", "liar", only=name)[name]
    assert "registered with traits None" in failures("backend", "silent", only=name)[name]


@pytest.mark.long
def test_an_engine_is_tried_in_the_backend_that_the_caller_names() -> None:
    config = {"backend": {"backend": "policy_parts.Backend"}, "model": {"model": "conformance:toy"}}
    for check in conformance("inference engine", "broken_policies.OneShort", config=config):
        check()  # that backend uses no engine: it is what answers
    broken = config | {"backend": {"backend": "broken_policies.OneShort"}}
    checks = {str(check): check for check in conformance("inference engine", "policy_parts.Backend", config=broken)}
    with pytest.raises(ConformanceError, match="groups of"):
        checks["samples_one_completion_per_seed"]()


@pytest.mark.long
def test_an_engine_is_tried_with_a_toy_policy_where_no_backend_is_installed(
    failures: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    assert failures("inference engine", "policy_parts.Engine") == {}


@pytest.mark.slow
def test_a_reward_is_tried_on_the_examples_of_a_named_source(failures: Failures) -> None:
    config = {"data": {"source": "source_parts.SharedIds"}}
    assert failures("reward", "reward_parts.Sound", only="calls_its_gold_right", config=config) == {}
    empty = {"data": {"source": "source_parts.Empty"}}
    found = failures("reward", "reward_parts.Sound", only="calls_its_gold_right", config=empty)
    assert "conformance.no-examples" in found["calls_its_gold_right"]
