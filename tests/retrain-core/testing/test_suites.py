"""The suites distinguish sound parts from parts with a single fault; `parts.toml` has the table."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from retrain.testing import ConformanceError, conformance, launchers
from tests.kit.conforming import check_conforms
from tests.kit.problems import codes_in

PAGE = Path(__file__).parents[3] / "docs/pages/write-a-plugin.md"
PARTS = tomllib.loads(Path(__file__).with_name("parts.toml").read_text(encoding="utf-8"))
IMPATIENT = {"reward": {"scoring": {"timeout_s": 1.0}}}
FOLDER = Path(__file__).parent / "parts"
TOY_MODEL = "conformance:toy"  # the tokenizer that the suites make in memory
COMMON = {"is_found_by_name", "says_what_it_is", "is_announced_without_heavy_imports", "refuses_unknown_options"}


@pytest.fixture(autouse=True)
def parts(monkeypatch, tmp_path):
    """The parts can be named by dotted paths, here and in the processes that they are sent to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in [path.stem for path in FOLDER.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.fixture
def failures():
    """`failures("transform", "some.part", only=..., config=...)`: message by name of the check that failed."""

    def run(kind, name, *, only="", config=None):
        found = {}
        for check in conformance(kind, name, config={"model": {"model": TOY_MODEL}, **(config or {})}):
            if str(check) in COMMON or (only and str(check) != only):
                continue
            try:
                check()
            except ConformanceError as error:
                found[str(check)] = str(error)
        return found

    return run


def cases(group):
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
def test_sound_parts_pass(kind, part, failures):
    if kind == "loss":
        pytest.importorskip("retrain_local", reason="a loss is tried by the backend that applies it")
    assert failures(kind, part) == {}


@pytest.mark.parametrize(("kind", "part", "check", "words"), cases("broken"))
def test_broken_parts_are_named(kind, part, check, words, failures, monkeypatch):
    if kind == "loss":
        pytest.importorskip("retrain_local")
    monkeypatch.setattr(launchers, "WAIT_S", 3.0)  # for a child that outlives its parent
    message = failures(kind, part, only=check, config=IMPATIENT.get(kind))[check]
    assert words in message
    assert codes_in(message)[-1].startswith("conformance."), message
    assert "fix: " in message or "conformance.refused" in codes_in(message)


@pytest.mark.long
def test_the_kernel_alone_is_enough(monkeypatch):
    monkeypatch.setenv("RETRAIN_PLUGINS", "retrain-core")
    for check in (*conformance("transform", "credit_parts.spread"), *conformance("reward", "task_parts.Sound")):
        check()


def test_the_whole_algorithm_of_the_documentation_conforms(tmp_path, monkeypatch):
    text = PAGE.read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "traits=Needs()" in part]
    check_conforms("algorithm", block, monkeypatch, tmp_path, "running_mean_of_the_page")


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


def test_traits_must_be_the_capabilities_of_the_object(distribution, failures):
    distribution("retrain-policies", {"policy_plugin": POLICIES})
    name = "declares_its_capabilities"
    assert failures("backend", "honest", only=name) == {}
    assert "registered with traits Capabilities(" in failures("backend", "liar", only=name)[name]
    assert "registered with traits None" in failures("backend", "silent", only=name)[name]


@pytest.mark.long
def test_an_engine_is_tried_in_the_backend_that_the_caller_names():
    config = {"backend": {"backend": "policy_parts.Backend"}, "model": {"model": "conformance:toy"}}
    for check in conformance("inference engine", "broken_policies.OneShort", config=config):
        check()  # that backend uses no engine: it is what answers
    broken = config | {"backend": {"backend": "broken_policies.OneShort"}}
    checks = {str(check): check for check in conformance("inference engine", "policy_parts.Backend", config=broken)}
    with pytest.raises(ConformanceError, match="groups of"):
        checks["samples_one_completion_per_seed"]()


@pytest.mark.long
def test_an_engine_is_tried_with_a_toy_policy_where_no_backend_is_installed(failures, monkeypatch):
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    assert failures("inference engine", "policy_parts.Engine") == {}


@pytest.mark.slow
def test_a_reward_is_tried_on_the_examples_of_a_named_source(failures):
    config = {"data": {"source": "task_parts.SharedIds"}}
    assert failures("reward", "task_parts.Sound", only="calls_its_gold_right", config=config) == {}
    empty = {"data": {"source": "task_parts.Empty"}}
    found = failures("reward", "task_parts.Sound", only="calls_its_gold_right", config=empty)
    assert "conformance.no-examples" in found["calls_its_gold_right"]


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


def message(kind, name, check, **more):
    with pytest.raises(ConformanceError) as caught:
        {str(found): found for found in conformance(kind, name, **more)}[check]()
    return str(caught.value)


@pytest.mark.slow
def test_what_a_registered_part_announces(distribution):
    distribution("retrain-heavy", {"vllm": "", "heavy_plugin": HEAVY}, entry="heavy_plugin")
    assert "its summary is ''" in message("advantage", "heavy", "says_what_it_is")
    heavy = message("advantage", "heavy", "is_announced_without_heavy_imports")
    assert "announcing the plugins of retrain-heavy imports vllm" in heavy
    assert "Lax accepts the unknown option" in message("advantage", "heavy", "refuses_unknown_options")
    assert "No module named 'no_such'" in message("advantage", "gone", "is_found_by_name")
    assert "--lr is grabbing.lr and training.lr" in message("config table", "grabbing", "has_flags_of_its_own")


@pytest.mark.slow
def test_names_kinds_and_configurations_that_are_wrong_are_reported():
    assert "no transform named 'gtpo_sep'" in message("transform", "gtpo_sep", "is_found_by_name")
    assert "stepz" in message("advantage", "x", "is_found_by_name", config={"training": {"stepz": 1}})
    with pytest.raises(ValueError, match="'transform'") as caught:
        conformance("tranform", "none")
    assert codes_in(caught) == ["conformance.unknown-kind"]
    for kind in ("data-source", "data source", "data_source", "Data-Source"):
        checks = conformance(kind, "arithmetic")
        assert [str(check) for check in checks] == [check.name for check in checks]
        assert all(check.purpose.endswith(".") for check in checks)


@pytest.mark.slow
def test_listing_the_checks_loads_nothing():
    code = (
        "import sys\nfrom retrain.testing import conformance\n"
        "from retrain.api import Kind\nfor kind in Kind: assert conformance(kind, 'anything')\n"
        "found = {'torch', 'transformers', 'pytest', 'retrain_sepa.plugin', 'retrain_local'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
