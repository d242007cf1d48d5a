"""A plugin's own `Algorithm`, declared by its traits, and the default one: credit, rows, fields, a controller."""

import json
from dataclasses import replace

import numpy as np
import pytest

from retrain.credit.algorithm import CreditAlgorithm, build_algorithm
from retrain.credit.flow import build_flow
from retrain.credit.pipeline import assign_credit
from retrain.credit.specs import ControllerView, TransformSpec, UncertaintySpec
from retrain.kernel.config.load import load_config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Needs
from retrain.kernel.errors import ConfigError, CreditError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from tests.kit.credit_parts import make_flow
from tests.kit.problems import codes_in, refused

BATCH_MEAN = """
import numpy as np
from retrain.advantages import Credit, GroupStatus, Needs, TokenCredit, group_status, train_rows
from retrain.api import PluginSpec, Table, hookimpl
class Params(Table):
    scale: float = 1.0

class BatchMean:
    needs = Needs(entropy=ENTROPY)
    labels = LABELS
    def __init__(self, context):
        self.scale, self.steps = context.params.scale, 0
    def assign(self, step, groups):
        mean = np.mean([score.value for group in groups for score in group.scores])
        statuses, tokens, rows = [], [], []
        for group in groups:
            statuses.append(group_status(group))
            credits = [
                TokenCredit(advantages_A=np.full(c.num_actions, self.scale * (score.value - mean) * FACTOR))
                for c, score in zip(group.completions, group.scores)
            ]
            tokens.append(tuple(credits))
            if statuses[-1] is GroupStatus.INFORMATIVE:
                for c, credit in zip(group.completions, credits):
                    rows += train_rows(c, credit.advantages_A)
        metrics = {"batch_mean": float(mean), "steps_seen": self.steps}
        return Credit(statuses_P=tuple(statuses), tokens_PG=tuple(tokens), rows=tuple(rows), metrics=metrics)
    def observe(self, step, groups, credit):
        self.steps += 1
    def state(self):
        return {"steps": self.steps}
    def restore(self, state):
        self.steps = state["steps"]

@hookimpl
def retrain_register_algorithms(register):
    traits = Needs(entropy=ENTROPY)
    register(PluginSpec(name="batch_mean", summary="A test.", factory=BatchMean, params=Params, traits=traits))
"""
LABELS = {"condition": "batch_mean"}


@pytest.fixture
def install(distribution, toys):
    """`install(factor="np.inf")`: the algorithm, with or without a fault."""

    def write(*, factor="1.0", labels=LABELS, entropy=False):
        constants = f"import numpy as np\nFACTOR, LABELS, ENTROPY = {factor}, {labels!r}, {entropy}\n"
        distribution("retrain-batch-mean", {"batch_mean": constants + BATCH_MEAN})

    return write


@pytest.fixture
def flow(tables):
    """`flow("--algorithm-param", "scale=2")`: the flow that is configured, and what a factory is given."""

    def build(*arguments):
        config, problems = load_config(None, tables=tables, arguments=["--algorithm-mode", "batch_mean", *arguments])
        assert problems == []
        plugins = load_plugins({"RETRAIN_BLOCK": "retrain-sepa"})  # it needs nobody's stages
        return build_flow(config, plugins), PluginContext(config=config, seeds=Seeds(0), plugins=plugins)

    return build


def test_its_traits_make_it_a_whole_algorithm(install, flow, make_group):
    install(entropy=True)
    built, context = flow("--algorithm-params", '{"scale": 2.0}')
    assert (built.is_custom, built.condition) == (True, "batch_mean")
    assert (built.needs_entropy, built.needs_planning, built.controller) == (True, False, "")
    algorithm = build_algorithm(built, context)
    assert algorithm.needs == Needs(entropy=True)
    names = {"algorithm_mode": "batch_mean", "condition": "batch_mean"}
    assert dict(algorithm.labels) == {**names, "advantage_mode": "", "transform_mode": "", "uncertainty_kind": ""}
    groups = [make_group(1, 0), make_group(1, 1)]
    credit = algorithm.assign(3, groups)
    assert [t.advantages_A.tolist() for tokens_G in credit.tokens_PG for t in tokens_G] == [[0.5], [-1.5], [0.5], [0.5]]
    assert len(credit.rows) == 2
    algorithm.observe(3, groups, credit)
    resumed = build_algorithm(built, context)
    resumed.restore(algorithm.state())
    assert resumed.assign(4, groups).metrics["steps_seen"] == 1


def test_it_has_no_stages_to_compute_and_its_parameters_are_checked(install, flow, command, toy_arguments, tmp_path):
    install()
    assert refused(assign_credit, [], flow()[0]) == ["credit.own-algorithm"]
    with pytest.raises(ConfigError, match="unknown option 'scael'"):
        flow("--algorithm-params", '{"scael": 2.0}')
    result = command(*toy_arguments, "--max-steps", "3", "--algorithm-mode", "batch_mean")
    assert (result.code, result.err) == (0, "")
    folder = tmp_path / "logs" / "train"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["condition"], line["steps_seen"]) for line in steps] == [("batch_mean", n) for n in range(3)]
    assert "sepa_lambda" not in steps[0]
    assert json.loads((folder / "run.json").read_text())["condition"] == "batch_mean"


@pytest.mark.parametrize("labels", [{}, {"name": "x"}, {"condition": 1}, "batch_mean"])
def test_labels_without_a_condition_are_refused(labels, install, flow):
    install(labels=labels)
    assert refused(build_algorithm, *flow()) == ["plugin.no-condition"]


@pytest.mark.parametrize(
    ("factor", "code"),
    [("np.nan", "credit.not-finite"), ("np.inf", "credit.not-finite"), ("None", "credit.part-raised")],
)
def test_faulty_credit_is_named(factor, code, install, flow, make_group):
    install(factor=factor)
    with pytest.raises(CreditError, match="step 5: algorithm 'batch_mean'") as caught:
        build_algorithm(*flow()).assign(5, [make_group(1, 0)])
    assert codes_in(caught) == [code]


def test_credit_and_rows_of_another_shape_are_named(install, flow, make_group, monkeypatch):
    install()
    group, algorithm = make_group(1, 0), build_algorithm(*flow())
    completions = [replace(c, reference_logprobs_T=np.zeros(len(c.tokens_T)), kl_coef=0.1) for c in group.completions]
    near = replace(group, completions=tuple(completions))
    assert all(row.kl_coef == 0.1 for row in algorithm.assign(5, [near]).rows)
    sound = algorithm.assign(5, [group])
    first, *rest = sound.rows
    elsewhere = replace(first, advantages_T=np.ones(len(first.tokens_T)))
    for answer, given, code in (
        (sound, near, "credit.no-reference"),
        ("credit", group, "credit.not-credit"),
        (replace(sound, statuses_P=()), group, "credit.wrong-count"),
        (replace(sound, tokens_PG=(sound.tokens_PG[0][:1],)), group, "credit.wrong-count"),
        (replace(sound, rows=(elsewhere, *rest)), group, "credit.unsampled-token"),
    ):
        monkeypatch.setattr(algorithm.algorithm, "assign", lambda step, groups, a=answer: a)
        assert refused(algorithm.assign, 5, [given]) == [code]


def pooling_flow(uncertainty="surprisal"):
    """Centred rewards; pooling halves the uncertainty whatever lambda is."""
    transform = TransformSpec(
        name="t", uses_sepa_controller=True, controller="ramp", entropy_transform=lambda u, p, lam: 0.5 * u
    )
    kind = UncertaintySpec(name=uncertainty, compute=lambda ctx: -ctx.logprobs_T)
    return make_flow(transform=transform, uncertainty=kind)


class EverySecond:
    """A detector that marks every second token."""

    def masks(self, completions_G):
        return [np.arange(len(tokens)) % 2 == 1 for tokens in completions_G]


class Ramp:
    """Lambda is a tenth per observed step."""

    def __init__(self, **fields):
        self.seen: list[ControllerView] = []
        self.fields = fields
        self.start = 0

    def value(self, step):
        return 0.1 * (self.start + len(self.seen))

    def observe(self, view):
        self.seen.append(view)

    def metrics(self):
        return {"ramp_seen": len(self.seen), **self.fields}

    def state(self):
        return {"seen": self.start + len(self.seen)}

    def restore(self, state):
        self.start = state["seen"]


def test_token_statistics_before_and_after_pooling(make_group, make_completion):
    completions = [make_completion([-1, -4, -3], entropies=[1, 2, 3]), make_completion([-5], entropies=[4])]
    algorithm = CreditAlgorithm(flow=pooling_flow(), detector=EverySecond(), controller=Ramp())
    groups = [make_group(1, 0, completions=completions)]
    credit = algorithm.assign(0, groups)
    fields = credit.metrics
    execution = np.array([1.0, 3.0, 5.0])
    assert fields["exec_surprisal_mean"] == pytest.approx(3.0)
    assert fields["exec_surprisal_var"] == pytest.approx(execution.var())
    assert (fields["plan_surprisal_mean"], fields["plan_surprisal_var"]) == (4.0, 0.0)
    assert fields["post_exec_surprisal_var"] == pytest.approx((execution / 2).var())
    assert fields["exec_entropy_mean"] == pytest.approx(np.mean([1, 3, 4]))
    algorithm.observe(0, groups, credit)
    assert algorithm.controller.seen == [
        ControllerView(step=0, correct_rate=0.5, execution_variance=pytest.approx(execution.var()))
    ]
    other = CreditAlgorithm(flow=pooling_flow("toy"), detector=EverySecond()).assign(0, groups)
    assert "post_exec_uncertainty_mean" in other.metrics
    with pytest.raises(PluginError, match="'sepa_lambda' of controller 'ramp' exists already"):
        CreditAlgorithm(flow=pooling_flow(), controller=Ramp(sepa_lambda=1.0)).assign(0, groups)
    later = [replace(make_group(1, second), round=1) for second in (1, 0)]  # chosen, so they do not count
    rates = ([make_group(0, 0), make_group(1, 0), *later], 0.25), ([make_group(None, None)], 0.0)
    for groups, rate in rates:
        algorithm = CreditAlgorithm(flow=pooling_flow(), controller=Ramp())
        credit = algorithm.assign(0, groups)
        algorithm.observe(0, groups, credit)
        assert [view.correct_rate for view in algorithm.controller.seen] == [rate]
    assert credit.metrics == {"sepa_lambda": 0.0, "ramp_seen": 0}, "statistics of no token are absent"
    assert [view.execution_variance for view in algorithm.controller.seen] == [None]


def test_rows_carry_credit_at_action_tokens_only(make_group, make_completion):
    completions = [make_completion([-1, -2], prompt=3), make_completion([-1]), make_completion([])]
    credit = CreditAlgorithm(flow=pooling_flow()).assign(4, [make_group(1, 0, 0, completions=completions)])
    assert [int(row.action_T.sum()) for row in credit.rows] == [2, 1]
    assert [row.advantages_T.tolist() for row in credit.rows] == [
        [0.0, 0.0, 0.0, pytest.approx(2 / 3), pytest.approx(2 / 3)],
        [0.0, 0.0, pytest.approx(-1 / 3)],
    ]
    groups = [make_group(1, None, 0, "broken")]
    credit = CreditAlgorithm(flow=pooling_flow()).assign(0, groups)
    assert [tokens.advantages_A.tolist() for tokens in credit.tokens_PG[0]] == [[0.5], [0.0], [-0.5], [0.0]]
    assert all(tokens.planning_A is None for tokens in credit.tokens_PG[0])
    assert len(credit.rows) == 2
    marked = CreditAlgorithm(flow=pooling_flow(), detector=EverySecond()).assign(0, groups)
    assert [tokens.planning_A.tolist() for tokens in marked.tokens_PG[0]] == [[False]] * 4
    groups = [make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(1, None)]
    credit = CreditAlgorithm(flow=pooling_flow()).assign(0, groups)
    names = ["INFORMATIVE", "ALL_RIGHT", "ALL_WRONG", "TIED", "NO_VERDICT"]
    assert ([status.name for status in credit.statuses_P], len(credit.rows)) == (names, 2)


def test_the_controller_is_asked_before_it_sees_the_step(make_group):
    algorithm, groups = CreditAlgorithm(flow=pooling_flow(), controller=Ramp()), [make_group(1, 0)]
    for step in range(3):
        credit = algorithm.assign(step, groups)
        assert algorithm.assign(step, groups).metrics == credit.metrics  # a retried step is the same step
        assert credit.metrics["sepa_lambda"] == pytest.approx(0.1 * step)
        assert credit.metrics["ramp_seen"] == step
        algorithm.observe(step, groups, credit)
    assert algorithm.state() == {"controller": {"seen": 3}}
    resumed = CreditAlgorithm(flow=pooling_flow(), controller=Ramp())
    resumed.restore(algorithm.state())
    assert resumed.assign(3, groups).metrics["sepa_lambda"] == pytest.approx(0.3)


def test_without_a_controller_lambda_is_zero_and_there_is_nothing_to_keep(make_group):
    algorithm, groups = CreditAlgorithm(flow=pooling_flow(), mode="my_mode"), [make_group(1, 0)]
    credit = algorithm.assign(0, groups)
    algorithm.observe(0, groups, credit)
    assert credit.metrics["sepa_lambda"] == 0.0
    assert algorithm.state() == {}
    algorithm.restore({})
    assert algorithm.needs == Needs(entropy=False)
    modes = {"advantage_mode": "toy_centre", "transform_mode": "t", "uncertainty_kind": "surprisal"}
    assert algorithm.labels == {"algorithm_mode": "my_mode", **modes, "condition": "toy_centre+t"}
