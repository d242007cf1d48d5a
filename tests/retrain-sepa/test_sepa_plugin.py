"""The registrations of retrain-sepa: names, aliases, tables with their bounds, and the extra of one detector."""

import pytest

from retrain.api import Config, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.kernel.config.keys import TableTraits
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.plugins.first_party import promised_names
from retrain_sepa.controller import SepaController
from retrain_sepa.planning import RegexPlanningDetector
from retrain_sepa.plugin import ALIASES, retrain_diagnose
from retrain_sepa.tables import PlanningTable, SepaTable

KINDS = (Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.ALGORITHM, Kind.PLANNING_DETECTOR, Kind.CONTROLLER)


@pytest.fixture(scope="module")
def plugins():
    return load_plugins({"RETRAIN_PLUGINS": "retrain-sepa"})


@pytest.fixture(scope="module")
def tables(plugins):
    return {
        entry.spec.name: TableEntry(model=entry.spec.load(), traits=entry.spec.traits or TableTraits())
        for entry in plugins.registered(Kind.CONFIG_TABLE)
    }


def load(tables, tmp_path, text="", arguments=()):
    file = tmp_path / "retrain.toml"
    file.write_text(text)
    return load_config(file, tables=tables, arguments=arguments)


def test_every_promised_part_and_alias_registers_and_loads(plugins):
    assert not plugins.failures
    for kind in KINDS:
        ours = {entry.spec.name for entry in plugins.registered(kind) if entry.owner.distribution == "retrain-sepa"}
        assert ours == set(promised_names(kind)) != set()
        for name in ours:
            assert resolve(plugins, kind, name, where="test").target is not None
    for name, aliases in ALIASES.items():
        for alias in aliases:
            assert resolve(plugins, Kind.UNCERTAINTY, alias, where="test").name == name


def test_defaults_and_flags(tables, tmp_path):
    config, problems = load(tables, tmp_path)
    assert not problems
    assert (config.value("gtpo.beta", None), config.value("hicra.alpha", None)) == (0.1, 0.2)
    ramp = {"steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.1}
    auto = {"ema_decay": 0.99, "threshold": 0.2, "warmup_steps": 50}
    assert config.table("sepa", SepaTable).model_dump() == {**ramp, **auto}
    flags = ["--gtpo-beta", "0.5", "--hicra-alpha=1", "--sepa-steps", "7", "--sepa-schedule=auto"]
    flags += ["--sepa-delay-steps", "1", "--sepa-correct-rate-gate=0", "--planning-detector", "mine.detector"]
    config, problems = load(tables, tmp_path, arguments=flags)
    assert not problems
    paths = ("gtpo.beta", "hicra.alpha", "sepa.steps", "sepa.schedule", "sepa.delay_steps", "planning.detector")
    assert [config.value(path, None) for path in paths] == [0.5, 1.0, 7, "auto", 1, "mine.detector"]


@pytest.mark.parametrize(
    "line",
    [
        *("[gtpo] beta = -0.1", "[gtpo] beta = nan"),
        *("[hicra] alpha = 1.5", "[hicra] alpha = -0.1", "[hicra] alpha = true"),
        *("[sepa] steps = -1", "[sepa] steps = 1.5", '[sepa] schedule = "cosine"', "[sepa] delay_steps = -1"),
        *("[sepa] correct_rate_gate = 1.1", "[sepa] ema_decay = 1.0", "[sepa] threshold = 0.0"),
        *("[sepa] warmup_steps = 0", "[sepa] step = 3"),
    ],
)
def test_bad_values_are_refused_with_their_place(tables, tmp_path, line):
    _, (problem,) = load(tables, tmp_path, line.replace("] ", "]\n"))
    assert line.partition(" =")[0] in str(problem)


def test_controller_and_detector_are_built_from_their_tables(plugins, tables, tmp_path, tokenizer):
    config, _ = load(tables, tmp_path, "[sepa]\nsteps = 10\ndelay_steps = 0\ncorrect_rate_gate = 0.0")
    context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer)
    sepa = resolve(plugins, Kind.CONTROLLER, "sepa", where="test").target
    assert isinstance(sepa(context), SepaController)
    assert sepa(context).value(5) == 0.5
    detector = resolve(plugins, Kind.PLANNING_DETECTOR, "regex", where="test").target(context)
    assert isinstance(detector, RegexPlanningDetector)
    without = PluginContext(config=Config(tables={}), seeds=Seeds(1), plugins=plugins)
    assert sepa(without).settings == SepaTable()
    for name, needed in (("semantic", True), ("regex", False)):
        (finding,) = retrain_diagnose(Config(tables={"planning": PlanningTable(detector=name)}))
        assert (finding.name, finding.needed) == ("retrain-sepa[semantic]", needed)
