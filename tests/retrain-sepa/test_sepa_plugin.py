import subprocess
import sys

import pytest

from retrain.api import Config, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.kernel.config.keys import TableTraits
from retrain.kernel.config.load import TableEntry, load_config
from retrain_sepa.controller import SepaController
from retrain_sepa.planning import RegexPlanningDetector
from retrain_sepa.tables import SepaTable

NAMES = {
    Kind.ADVANTAGE: {
        "grpo",
        "maxrl",
        "rloo",
        "dr_grpo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "gdpo",
        "distillation",
    },
    Kind.TRANSFORM: {"none", "gtpo", "gtpo_hicra", "gtpo_sepa"},
    Kind.UNCERTAINTY: {"surprisal", "predictive_variance", "shannon_entropy"},
    Kind.ALGORITHM: {"grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa"},
    Kind.PLANNING_DETECTOR: {"regex", "semantic"},
    Kind.CONTROLLER: {"sepa"},
    Kind.CONFIG_TABLE: {"gtpo", "hicra", "sepa", "planning"},
}
ALIASES = {
    "surprisal": ("token_surprisal", "neg_logprob", "negative_logprob", "nll"),
    "shannon_entropy": ("shannon", "entropy", "token_entropy"),
    "predictive_variance": ("pred_var", "bernoulli_variance"),
}


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


def test_every_part_registers_and_loads(plugins):
    assert not plugins.failures
    for kind, names in NAMES.items():
        ours = {entry.spec.name for entry in plugins.registered(kind) if entry.owner.distribution == "retrain-sepa"}
        assert ours == names
        for name in names:
            assert resolve(plugins, kind, name, where="test").target is not None


def test_aliases(plugins):
    for name, aliases in ALIASES.items():
        for alias in aliases:
            assert resolve(plugins, Kind.UNCERTAINTY, alias, where="test").name == name


def test_registering_imports_nothing_heavy():
    code = (
        "import sys; from retrain.api import load_plugins; load_plugins({'RETRAIN_PLUGINS': 'retrain-sepa'});"
        "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_defaults_and_flags(tables, tmp_path):
    config, problems = load(tables, tmp_path)
    assert not problems
    assert (config.value("gtpo.beta", None), config.value("hicra.alpha", None)) == (0.1, 0.2)
    assert config.table("sepa", SepaTable).model_dump() == {
        "steps": 500,
        "schedule": "linear",
        "delay_steps": 50,
        "correct_rate_gate": 0.1,
        "ema_decay": 0.99,
        "threshold": 0.2,
        "warmup_steps": 50,
    }
    flags = ["--gtpo-beta", "0.5", "--hicra-alpha=1", "--sepa-steps", "7", "--sepa-schedule=auto"]
    flags += ["--sepa-delay-steps", "1", "--sepa-correct-rate-gate=0", "--planning-detector", "mine.detector"]
    config, problems = load(tables, tmp_path, arguments=flags)
    assert not problems
    assert (config.value("gtpo.beta", None), config.value("hicra.alpha", None)) == (0.5, 1.0)
    assert config.value("planning.detector", None) == "mine.detector"
    assert config.table("sepa", SepaTable).schedule == "auto"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[gtpo]\nbeta = -0.1", "[gtpo] beta"),
        ("[gtpo]\nbeta = nan", "[gtpo] beta"),
        ("[hicra]\nalpha = 1.5", "[hicra] alpha"),
        ("[hicra]\nalpha = -0.1", "[hicra] alpha"),
        ("[hicra]\nalpha = true", "[hicra] alpha"),
        ("[sepa]\nsteps = -1", "[sepa] steps"),
        ("[sepa]\nsteps = 1.5", "[sepa] steps"),
        ('[sepa]\nschedule = "cosine"', "[sepa] schedule"),
        ("[sepa]\ndelay_steps = -1", "[sepa] delay_steps"),
        ("[sepa]\ncorrect_rate_gate = 1.1", "[sepa] correct_rate_gate"),
        ("[sepa]\nema_decay = 1.0", "[sepa] ema_decay"),
        ("[sepa]\nthreshold = 0.0", "[sepa] threshold"),
        ("[sepa]\nwarmup_steps = 0", "[sepa] warmup_steps"),
        ("[sepa]\nstep = 3", "did you mean 'steps'"),
    ],
)
def test_bad_values_are_named(tables, tmp_path, text, shown):
    _, problems = load(tables, tmp_path, text)
    assert len(problems) == 1
    assert shown in str(problems[0])


def test_factories_of_controller_and_detector(plugins, tables, tmp_path, tokenizer):
    config, _ = load(tables, tmp_path, "[sepa]\nsteps = 10\ndelay_steps = 0\ncorrect_rate_gate = 0.0")
    context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer)
    sepa = resolve(plugins, Kind.CONTROLLER, "sepa", where="test").target(context)
    assert isinstance(sepa, SepaController)
    assert sepa.value(5) == 0.5
    detector = resolve(plugins, Kind.PLANNING_DETECTOR, "regex", where="test").target(context)
    assert isinstance(detector, RegexPlanningDetector)


def test_controller_without_its_table_uses_the_defaults(plugins):
    context = PluginContext(config=Config(tables={}), seeds=Seeds(1), plugins=plugins)
    sepa = resolve(plugins, Kind.CONTROLLER, "sepa", where="test").target(context)
    assert sepa.settings == SepaTable()
