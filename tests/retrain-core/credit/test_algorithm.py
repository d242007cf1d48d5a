"""The default algorithm: a step's groups become credit, rows and fields; its controller learns and resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.flow import CreditFlow
from retrain.credit.specs import ControllerView, TransformSpec, UncertaintySpec
from retrain.kernel.contracts.algorithm import Needs
from retrain.kernel.errors import PluginError
from retrain.kernel.types import Completion, Group
from tests.kit.credit_parts import make_flow

MakeGroup = Callable[..., Group]
MakeCompletion = Callable[..., Completion]


def flow(uncertainty: str = "surprisal") -> CreditFlow:
    """Centred rewards; pooling halves the uncertainty whatever lambda is."""
    transform = TransformSpec(
        name="t", uses_sepa_controller=True, controller="ramp", entropy_transform=lambda u, p, lam: 0.5 * u
    )
    kind = UncertaintySpec(name=uncertainty, compute=lambda ctx: -ctx.logprobs_T)
    return make_flow(transform=transform, uncertainty=kind)


class EverySecond:
    """A detector that marks every second token."""

    def masks(self, completions_G: Any) -> Any:
        return [np.arange(len(tokens)) % 2 == 1 for tokens in completions_G]


class Ramp:
    """Lambda is a tenth per observed step."""

    def __init__(self, **fields: float | bool) -> None:
        self.seen: list[ControllerView] = []
        self.fields = fields
        self.start = 0

    def value(self, step: int) -> float:
        return 0.1 * (self.start + len(self.seen))

    def observe(self, view: ControllerView) -> None:
        self.seen.append(view)

    def metrics(self) -> Mapping[str, float | bool]:
        return {"ramp_seen": len(self.seen), **self.fields}

    def state(self) -> Mapping[str, Any]:
        return {"seen": self.start + len(self.seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.start = state["seen"]


def test_token_statistics_before_and_after_pooling(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    completions = [make_completion([-1, -4, -3], entropies=[1, 2, 3]), make_completion([-5], entropies=[4])]
    algorithm = CreditAlgorithm(flow=flow(), detector=EverySecond(), controller=Ramp())
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
    assert algorithm.controller.seen == [  # type: ignore[attr-defined]
        ControllerView(step=0, correct_rate=0.5, execution_variance=pytest.approx(execution.var()))  # type: ignore[arg-type]
    ]
    other = CreditAlgorithm(flow=flow("toy"), detector=EverySecond()).assign(0, groups)
    assert "post_exec_uncertainty_mean" in other.metrics


def test_the_controller_sees_the_correct_rate_that_no_choice_has_touched(make_group: MakeGroup) -> None:
    algorithm = CreditAlgorithm(flow=flow(), controller=Ramp())
    later = [replace(make_group(1, second), round=1) for second in (1, 0)]
    groups = [make_group(0, 0), make_group(1, 0), *later]
    algorithm.observe(0, groups, algorithm.assign(0, groups))
    assert [view.correct_rate for view in algorithm.controller.seen] == [0.25]  # type: ignore[attr-defined]


def test_statistics_of_no_token_are_absent(make_group: MakeGroup) -> None:
    algorithm = CreditAlgorithm(flow=flow(), controller=Ramp())
    groups = [make_group(None, None)]
    credit = algorithm.assign(0, groups)
    assert credit.metrics == {"sepa_lambda": 0.0, "ramp_seen": 0}
    algorithm.observe(0, groups, credit)
    assert algorithm.controller.seen == [  # type: ignore[attr-defined]
        ControllerView(step=0, correct_rate=0.0, execution_variance=None)
    ]


def test_rows_carry_credit_at_action_tokens_only(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    completions = [make_completion([-1, -2], prompt=3), make_completion([-1]), make_completion([])]
    credit = CreditAlgorithm(flow=flow()).assign(4, [make_group(1, 0, 0, completions=completions)])
    assert [int(row.action_T.sum()) for row in credit.rows] == [2, 1]
    assert [row.advantages_T.tolist() for row in credit.rows] == [
        [0.0, 0.0, 0.0, pytest.approx(2 / 3), pytest.approx(2 / 3)],
        [0.0, 0.0, pytest.approx(-1 / 3)],
    ]


def test_a_completion_without_a_verdict_takes_no_part(make_group: MakeGroup) -> None:
    groups = [make_group(1, None, 0, "broken")]
    credit = CreditAlgorithm(flow=flow()).assign(0, groups)
    assert [tokens.advantages_A.tolist() for tokens in credit.tokens_PG[0]] == [[0.5], [0.0], [-0.5], [0.0]]
    assert all(tokens.planning_A is None for tokens in credit.tokens_PG[0])
    assert len(credit.rows) == 2
    marked = CreditAlgorithm(flow=flow(), detector=EverySecond()).assign(0, groups)
    assert [tokens.planning_A.tolist() for tokens in marked.tokens_PG[0]] == [[False]] * 4  # type: ignore[union-attr]


def test_only_informative_groups_are_trained(make_group: MakeGroup) -> None:
    groups = (make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(1, None))
    credit = CreditAlgorithm(flow=flow()).assign(0, groups)
    names = ["INFORMATIVE", "ALL_RIGHT", "ALL_WRONG", "TIED", "NO_VERDICT"]
    assert [status.name for status in credit.statuses_P] == names
    assert len(credit.rows) == 2


def test_the_controller_is_asked_before_it_sees_the_step(make_group: MakeGroup) -> None:
    algorithm, groups = CreditAlgorithm(flow=flow(), controller=Ramp()), [make_group(1, 0)]
    for step in range(3):
        credit = algorithm.assign(step, groups)
        assert algorithm.assign(step, groups).metrics == credit.metrics  # a retried step is the same step
        assert credit.metrics["sepa_lambda"] == pytest.approx(0.1 * step)
        assert credit.metrics["ramp_seen"] == step
        algorithm.observe(step, groups, credit)
    assert algorithm.state() == {"controller": {"seen": 3}}
    resumed = CreditAlgorithm(flow=flow(), controller=Ramp())
    resumed.restore(algorithm.state())
    assert resumed.assign(3, groups).metrics["sepa_lambda"] == pytest.approx(0.3)


def test_without_a_controller_lambda_is_zero_and_there_is_nothing_to_keep(make_group: MakeGroup) -> None:
    algorithm, groups = CreditAlgorithm(flow=flow(), mode="my_mode"), [make_group(1, 0)]
    credit = algorithm.assign(0, groups)
    algorithm.observe(0, groups, credit)
    assert credit.metrics["sepa_lambda"] == 0.0
    assert algorithm.state() == {}
    algorithm.restore({})
    assert algorithm.needs == Needs(entropy=False)
    modes = {"advantage_mode": "toy_centre", "transform_mode": "t", "uncertainty_kind": "surprisal"}
    assert algorithm.labels == {"algorithm_mode": "my_mode", **modes, "condition": "toy_centre+t"}


def test_two_metrics_of_one_name_are_an_error_that_names_the_source(make_group: MakeGroup) -> None:
    with pytest.raises(PluginError, match="'sepa_lambda' of controller 'ramp' exists already"):
        CreditAlgorithm(flow=flow(), controller=Ramp(sepa_lambda=1.0)).assign(0, [make_group(1, 0)])
