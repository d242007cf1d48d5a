"""What retrain-sepa registers; the five conditions through the public credit API; the recipes and their page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.advantages import compute_composable_advantages
from retrain.api import Config, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.credit.flow import build_flow
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.declared import TableTraits
from retrain.kernel.plugins.first_party import promised_names
from retrain_sepa.controller import SepaController
from retrain_sepa.planning import RegexPlanningDetector
from retrain_sepa.plugin import ALIASES, retrain_check_config, retrain_diagnose
from retrain_sepa.tables import PlanningTable, SepaTable
from tests.kit.problems import refused

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


def test_every_promised_part_and_alias_registers_and_loads(plugins, all_plugins):
    assert not plugins.failures
    for kind in KINDS:
        ours = {entry.spec.name for entry in plugins.registered(kind) if entry.owner.distribution == "retrain-sepa"}
        assert ours == set(promised_names(kind)) != set()
        for name in ours:
            assert resolve(plugins, kind, name, where="test").target is not None
    for name, aliases in ALIASES.items():
        for alias in aliases:
            assert resolve(plugins, Kind.UNCERTAINTY, alias, where="test").name == name
    registered = [entry.spec.name for entry in all_plugins.registered(Kind.RECIPE)]
    assert sorted(NAMES) == registered == sorted(row[0] for row in ROW.findall(PAGE.read_text(encoding="utf-8")))


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


U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.isin(np.arange(10), [2, 6])
REWARDS = [1.0, 0.0, 0.0, 0.0]  # maxrl: 2.999988 and three times -0.999996
TRANSFORMS = ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"]
SEPA_HALF = [2.817944, 2.842137, 3.570968, 2.793750, 2.987298, 2.817944, 3.716129, 2.842137, 2.793750, 2.817944]
HICRA_RIGHT = [2.796774, 2.845161, 4.285161, 2.748387, 3.135484, 2.796774, 4.459355, 2.845161, 2.748387, 2.796774]
HICRA_WRONG = [-0.932258, -0.948387, -0.952258, -0.916129, -1.045161, -0.932258, -0.990968]
HICRA_WRONG += [-0.948387, -0.916129, -0.932258]
GTPO_01 = [0.932258, 0.948387, 1.190323, 0.916129, 1.045161, 0.932258, 1.238710, 0.948387, 0.916129, 0.932258]
GTPO_1 = [0.322581, 0.483871, 2.903226, 0.161290, 1.451613, 0.322581, 3.387097, 0.483871, 0.161290, 0.322581]
GTPO_2 = [0, 0, 4.806452, 0, 1.903226, 0, 5.774193, 0, 0, 0]
BERNOULLI = [0.148411, 0.192007, 0.137975, 0.086107, 0.241271, 0.148411, 0.107461, 0.192007, 0.086107, 0.148411]


def credit(rewards=REWARDS, **settings):
    return compute_composable_advantages(rewards, [-U] * len(rewards), [PLANNING] * len(rewards), **settings)


@pytest.mark.parametrize(("beta", "weights"), [(0.1, GTPO_01), (1.0, GTPO_1), (2.0, GTPO_2)])
def test_gtpo_vectors(beta, weights):
    result = credit(rewards=[1.0, -1.0], advantage_mode="grpo", transform_mode="gtpo", gtpo_beta=beta)
    assert_allclose(result.token_advs, [weights, -np.asarray(weights)], atol=1e-6)


def test_sepa_and_hicra_vectors():
    sepa = credit(transform_mode="gtpo_sepa", sepa_lambda=0.5)
    assert_allclose(sepa.token_advs[0], SEPA_HALF, atol=2e-5)
    assert sepa.uncertainties[0][~PLANNING].var() == pytest.approx(0.058594, abs=5e-7)
    assert sepa.pooled[0][~PLANNING].var() == pytest.approx(0.014648, abs=5e-7)
    assert sepa.pooled[0][PLANNING].tolist() == [1.8, 2.1]
    assert sepa.flow.condition == "maxrl+gtpo_sepa"
    assert_allclose(credit(transform_mode="gtpo_hicra").token_advs[:2], [HICRA_RIGHT, HICRA_WRONG], atol=2e-5)
    assert all(np.ptp(advs) == 0 for advs in credit(transform_mode="none", gtpo_beta=0.7).token_advs)
    bessel = {"advantage_mode": "grpo", "transform_mode": "none", "advantage_params": {"scale": "std", "ddof": 1}}
    firsts = [advs[0] for advs in credit(rewards=[-1, 1, 0, 0.5], **bessel).token_advs]
    assert_allclose(firsts, [-1.317311, 1.024575, -0.146368, 0.439104], atol=5e-7)
    assert_allclose(credit(transform_mode="gtpo", uncertainty_kind="pred_var").uncertainties[0], BERNOULLI, atol=5e-7)
    weighted = credit(transform_mode="gtpo", uncertainty_kind="entropy", entropies_G=[U] * 4)
    assert_allclose(weighted.token_advs[0], credit(transform_mode="gtpo").token_advs[0])
    assert refused(credit, transform_mode="gtpo", uncertainty_kind="entropy") == ["backend.no-entropies"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_top_rho_acts_with_every_transform(transform):
    result = credit(transform_mode=transform, surprisal_mask_rho=0.2)
    assert result.metrics["entropy_mask_threshold"] == pytest.approx(1.8)
    assert [np.count_nonzero(advs) for advs in result.token_advs] == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa"])
def test_algorithms_are_pairs(name):
    table = AlgorithmTable(
        algorithm_mode=name, advantage_mode="grpo", transform_mode="gtpo", uncertainty_kind="surprisal"
    )
    flow = build_flow(Config(tables={"algorithm": table}), load_plugins({"RETRAIN_PLUGINS": "retrain-sepa"}))
    advantage, _, transform = name.partition("_")
    assert (flow.advantage.name, flow.transform.name, flow.condition) == (advantage, transform, name)
    assert flow.controller == ("sepa" if transform == "gtpo_sepa" else "")
    assert flow.needs_planning == (transform in ("gtpo_hicra", "gtpo_sepa"))


PAGE = Path(__file__).parents[2] / "docs/pages/algorithms/recipes.md"
ROW = re.compile(r"^\| \[`(\w+)`\]\([\w#.-]+\) \| ([^|]*)\| ([^|]*)\| ([^|]*)\| ([^|]*)\| [^|]* \|$", re.MULTILINE)
NAMES = [*promised_names(Kind.RECIPE)]


@pytest.fixture(scope="module")
def all_plugins():
    return load_plugins({})


def values(all_plugins, name):
    (entry,) = all_plugins.find(Kind.RECIPE, name)
    return dict(entry.spec.load())


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_the_page_says_all_that_a_recipe_sets(all_plugins, name):
    found = values(all_plugins, name)
    row = next(row for row in ROW.findall(PAGE.read_text(encoding="utf-8")) if row[0] == name)
    advantage, loss, aggregation, more = (cell.strip() for cell in row[1:5])
    assert f"`{found.pop('algorithm.advantage_mode')}`" in advantage
    if teacher := found.get("distil.teacher"):
        assert (loss, more) == ("a divergence", f'`[distil] teacher = "{teacher}"`')
        return
    params = found.pop("algorithm.advantage_params", {})
    assert params == ({"scale": "std", "ddof": 1} if advantage.endswith("/ std") else {})
    assert loss.startswith(f"`{found.pop('algorithm.loss')}`")
    assert f"`{found.pop('algorithm.aggregation')}`" == aggregation
    assert found.pop("algorithm.transform_mode") == "none"
    clips = {"algorithm.clip_eps": "ε ", "algorithm.clip_eps_high": "ε' "}
    for path, mark in clips.items():
        said = re.search(rf"(?:^|, ){mark}(\S+?)(?:,|$)", loss)
        assert (float(said[1]) if said else None) == found.pop(path, None)
    assert more == ", ".join(f"`{path.partition('.')[2]} = {json.dumps(value)}`" for path, value in found.items())


@pytest.mark.parametrize(
    ("algorithm", "teacher", "codes"),
    [
        ({"advantage_mode": "grpo", "loss": "gspo"}, {}, []),
        ({"advantage_mode": "distillation"}, {"model": "a/b"}, []),
        ({"advantage_mode": "distillation", "algorithm_mode": "sepa"}, {}, []),
        ({"advantage_mode": "distillation"}, {}, ["teacher.missing"]),
    ],
)
def test_distillation_needs_a_teacher(algorithm, teacher, codes):
    tables = {"algorithm": AlgorithmTable(**algorithm), "teacher": TeacherTable(**teacher)}
    assert [problem.code for problem in retrain_check_config(Config(tables=tables))] == codes
