"""Faults of plugins and of inputs: each has its code, and names its plugin, group, completion and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.credit.pipeline import CreditGroup, assign_credit
from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformOutput, TransformSpec, UncertaintySpec
from retrain.kernel.errors import CreditError
from tests.kit.credit_parts import make_credit_group, make_flow
from tests.kit.problems import codes_in

NAN = float("nan")


def answers(value: Any) -> Callable[..., Any]:
    """A stage that answers the same to anything."""
    return lambda *_: value


def raising(*_: Any) -> Any:
    raise KeyError("scale")


def refused(flow: Any, groups: CreditGroup | list[CreditGroup], code: str) -> str:
    with pytest.raises(CreditError) as caught:
        assign_credit(groups if isinstance(groups, list) else [groups], flow)
    assert codes_in(caught) == [code]
    return str(caught.value)


OF_NUMBERS = [  # answers where two numbers are wanted
    ([1.0], "credit.wrong-length"),
    ([[1.0], [2.0]], "credit.wrong-length"),
    (1.0, "credit.wrong-length"),
    ([1.0, NAN], "credit.not-finite"),
    ([float("-inf"), 1.0], "credit.not-finite"),
    (None, "credit.not-numbers"),
    ([None, 1.0], "credit.not-numbers"),
    (["1.5", 1.0], "credit.not-numbers"),
    ([[1.0], [1.0, 2.0]], "credit.not-numbers"),
    (raising, "credit.part-raised"),
]


@pytest.mark.parametrize(("value", "code"), OF_NUMBERS)
@pytest.mark.parametrize("stage", ["advantage", "uncertainty", "entropy_transform", "post_process"])
def test_a_faulty_part_is_named_with_its_place(stage: str, value: Any, code: str) -> None:
    compute = raising if value is raising else answers(value)
    if stage == "advantage":
        flow, place = make_flow(advantage=AdvantageSpec(name="bad", compute=compute)), "step 3: "
    elif stage == "uncertainty":
        flow, place = make_flow(uncertainty=UncertaintySpec(name="bad", compute=compute)), "step 3 completion 0: "
    else:
        flow, place = make_flow(transform=TransformSpec(name="bad", **{stage: compute})), "step 3 completion 0: "
    text = refused(flow, make_credit_group([1, 0], [[-1, -1], [-2, -2]], name="step 3"), code)
    assert text.startswith(place)
    assert stage in text
    assert "'bad'" in text
    assert code != "credit.not-finite" or f"at position {int(value[0] == 1.0)}" in text
    assert value is not raising or f"test_faults.py:{raising.__code__.co_firstlineno + 1})" in text


def test_a_negative_uncertainty_is_refused() -> None:
    flow = make_flow(uncertainty=UncertaintySpec(name="bad", compute=lambda ctx: ctx.logprobs_T))
    text = refused(flow, make_credit_group([1, 0], [[-0.0], [-0.0, -2.0]]), "credit.negative-uncertainty")
    assert "completion 1: uncertainty 'bad' is -2.0 at position 1" in text


OF_GROUPS = [  # answers where two and one numbers are wanted
    ([[1.0, 1.0]], "credit.wrong-count", "one per completion"),
    ([[1.0, 1.0], [1.0, 1.0]], "credit.wrong-length", "completion 1"),
    ([[1.0, 1.0], [NAN]], "credit.not-finite", "completion 1 is nan at position 0"),
    (None, "credit.wrong-count", "is NoneType"),
    (3.0, "credit.wrong-count", "is float"),
    (iter([]), "credit.wrong-count", ""),
    (raising, "credit.part-raised", "KeyError: 'scale'"),
]
OF_OUTPUTS = [
    (TransformOutput(token_advs=[]), "credit.wrong-count", "has 0 entries"),
    (TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": NAN}), "credit.not-finite", "metric 'm'"),
    (TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": "text"}), "credit.not-numbers", "metric 'm'"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize("whole", ["algorithm", "transform", "advantage by token"])
@pytest.mark.parametrize(("value", "code", "fragment"), [*OF_GROUPS, *OF_OUTPUTS])
def test_a_faulty_function_of_a_group_is_named(whole: str, value: Any, code: str, fragment: str) -> None:
    compute = raising if value is raising else answers(value)
    if whole == "algorithm":
        flow, named = make_flow(algorithm=AlgorithmSpec(name="bad", compute_context=compute)), "algorithm 'bad'"
    elif whole == "transform":
        flow, named = make_flow(transform=TransformSpec(name="bad", compute_context=compute)), "'toy_centre+bad'"
    elif isinstance(value, TransformOutput):
        return
    else:
        flow, named = make_flow(advantage=AdvantageSpec(name="bad", compute_tokens=compute)), "advantage 'bad'"
    text = refused(flow, make_credit_group([1, 0], [[-1, -1], [-2]]), code)
    assert text.startswith("group 0: ")
    assert fragment in text
    assert named in text


@pytest.mark.parametrize(
    ("value", "code", "place"),
    [
        ([[1.0, 0.0]], "credit.wrong-count", "one per group"),
        (3.0, "credit.wrong-count", "is float"),
        ([[1.0, 0.0], [1.0]], "credit.wrong-length", "group 1: "),
        ([[1.0, 0.0], [1.0, NAN]], "credit.not-finite", "group 1: "),
        (raising, "credit.part-raised", ""),
    ],
)
def test_a_faulty_advantage_of_steps_is_named(value: Any, code: str, place: str) -> None:
    compute = raising if value is raising else answers(value)
    flow = make_flow(advantage=AdvantageSpec(name="a", compute_step=compute))
    groups = [make_credit_group([1, 0], [[-1], [-1]], name=f"group {number}") for number in range(2)]
    text = refused(flow, groups, code)
    assert "advantage 'a'" in text
    assert place in text


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({"logprobs_G": [np.array([-1.0, np.nan]), np.array([-1.0])]}, "credit.not-finite", "completion 0"),
        ({"logprobs_G": [np.array([-1.0, -1.0]), np.array([-np.inf])]}, "credit.not-finite", "completion 1"),
        ({"logprobs_G": [np.array([-1.0, -1.0])]}, "credit.wrong-count", "log-probabilities"),
        ({"planning_G": [np.array([True, False])]}, "credit.wrong-count", "planning masks"),
        ({"planning_G": [np.array([True]), np.array([True])]}, "credit.wrong-mask", "completion 0"),
        ({"rewards_G": np.array([1.0, np.nan])}, "credit.not-finite", "reward is nan at position 1"),
    ],
)
def test_faulty_inputs_are_named(changes: dict[str, Any], code: str, place: str) -> None:
    text = refused(make_flow(), replace(make_credit_group([1, 0], [[-1, -1], [-1]]), **changes), code)
    assert text.startswith("group 0")
    assert place in text


def test_missing_entropies_are_reported_before_anything_is_computed() -> None:
    flow = make_flow(uncertainty=UncertaintySpec(name="h", compute=lambda ctx: ctx.entropies_T, needs_entropy=True))
    refused(flow, make_credit_group([1, 0], [[-1], [-1]]), "backend.no-entropies")
    group = make_credit_group([1, 0], [[-1], [-1]], entropies_G=[np.array([0.5]), np.array([0.7])])
    assert assign_credit([group], flow).uncertainties[0][1].tolist() == [0.7]
