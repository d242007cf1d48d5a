"""Faults of plugins and of inputs, each named with its plugin, group, completion and position."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.credit.pipeline import assign_credit
from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformOutput, TransformSpec, UncertaintySpec
from retrain.kernel.errors import CreditError
from tests.kit.credit_parts import make_credit_group, make_flow


def constant(value: Any) -> Callable[..., Any]:
    """A stage that answers the same to anything."""
    return lambda *_: value


def raising(*_: Any) -> Any:
    raise KeyError("scale")


ADVANTAGE_FAULTS = [
    (constant([1.0]), "advantage 'bad' has length 1, expected 2"),
    (constant([[1.0], [2.0]]), "advantage 'bad' has shape (2, 1), expected 2"),
    (constant(1.0), "advantage 'bad' is one number, expected 2"),
    (constant([1.0, float("nan")]), "advantage 'bad' is nan at position 1: it must be finite"),
    (constant([float("-inf"), 1.0]), "advantage 'bad' is -inf at position 0"),
    (constant(None), "advantage 'bad'"),
    (constant([None, 1.0]), "advantage 'bad'"),
    (constant(["x", 1.0]), "advantage 'bad' is not a list of numbers"),
    (constant([[1.0], [1.0, 2.0]]), "advantage 'bad' is not a list of numbers"),
    (raising, "advantage 'bad' raised KeyError: 'scale'"),
]


@pytest.mark.parametrize(("compute", "fragment"), ADVANTAGE_FAULTS, ids=[fragment for _, fragment in ADVANTAGE_FAULTS])
def test_a_faulty_advantage_is_named(compute: Callable[..., Any], fragment: str) -> None:
    flow = make_flow(advantage=AdvantageSpec(name="bad", compute=compute))
    with pytest.raises(CreditError) as caught:
        assign_credit([make_credit_group([1, 0], [[-1], [-1]], name="step 3 group 1 (example e)")], flow)
    assert str(caught.value).startswith("step 3 group 1 (example e): ")
    assert fragment in str(caught.value)
    assert caught.value.exit_code == 1


def test_the_line_that_raised_is_told() -> None:
    flow = make_flow(advantage=AdvantageSpec(name="bad", compute=raising))
    with pytest.raises(CreditError, match=rf"test_faults\.py:{raising.__code__.co_firstlineno + 1}\)"):
        assign_credit([make_credit_group([1, 0], [[-1], [-1]])], flow)


TOKEN_FAULTS = [
    (constant([1.0]), "has length 1, expected 2"),
    (constant([1.0, float("inf")]), "is inf at position 1"),
    (constant(None), ""),
    (raising, "raised KeyError: 'scale'"),
]


@pytest.mark.parametrize("stage", ["uncertainty", "entropy_transform", "post_process"])
@pytest.mark.parametrize(("compute", "fragment"), TOKEN_FAULTS)
def test_a_faulty_token_stage_is_named_with_its_completion(
    stage: str, compute: Callable[..., Any], fragment: str
) -> None:
    flow = make_flow()
    if stage == "uncertainty":
        flow = replace(flow, uncertainty=UncertaintySpec(name="bad", compute=compute))
    else:
        flow = replace(flow, transform=TransformSpec(name="bad", **{stage: compute}))
    with pytest.raises(CreditError) as caught:
        assign_credit([make_credit_group([1, 0], [[-1, -1], [-2, -2]])], flow)
    text = str(caught.value)
    assert text.startswith("group 0 completion 0: ")
    assert stage in text
    assert "'bad'" in text
    assert fragment in text


def test_a_negative_uncertainty_is_refused() -> None:
    flow = make_flow(uncertainty=UncertaintySpec(name="bad", compute=lambda ctx: ctx.logprobs_T))
    with pytest.raises(CreditError, match=r"completion 1: uncertainty 'bad' is -2\.0 at position 1"):
        assign_credit([make_credit_group([1, 0], [[-0.0], [-0.0, -2.0]])], flow)


WHOLE_FAULTS = [
    (constant([[1.0, 1.0]]), "has 1 entries, expected 2, one per completion"),
    (constant([[1.0, 1.0], [1.0, 1.0]]), "completion 1 has length 2, expected 1"),
    (constant([[1.0, 1.0], [float("nan")]]), "completion 1 is nan at position 0"),
    (constant(None), "is NoneType, expected 2"),
    (constant(3.0), "is float, expected 2"),
    (constant(iter([])), "expected 2"),
    (constant(TransformOutput(token_advs=[])), "has 0 entries, expected 2"),
    (constant(TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": float("nan")})), "metric 'm' is nan"),
    (constant(TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": "text"})), "metric 'm'"),
    (raising, "raised KeyError: 'scale'"),
]


@pytest.mark.parametrize("as_algorithm", [True, False])
@pytest.mark.parametrize(("compute", "fragment"), WHOLE_FAULTS, ids=[fragment for _, fragment in WHOLE_FAULTS])
def test_a_faulty_whole_function_is_named(
    compute: Callable[..., Any],
    fragment: str,
    as_algorithm: bool,
) -> None:
    if as_algorithm:
        flow = make_flow(algorithm=AlgorithmSpec(name="bad", compute_context=compute))
    else:
        flow = make_flow(transform=TransformSpec(name="bad", compute_context=compute))
    with pytest.raises(CreditError) as caught:
        assign_credit([make_credit_group([1, 0], [[-1, -1], [-2]])], flow)
    assert fragment in str(caught.value)
    assert ("algorithm 'bad'" if as_algorithm else "transform 'toy_centre+bad'") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        (
            {"logprobs_G": [np.array([-1.0, np.nan]), np.array([-1.0])]},
            "completion 0: log-probability is nan at position 1",
        ),
        ({"logprobs_G": [np.array([-1.0, -np.inf]), np.array([-1.0])]}, "log-probability is -inf at position 1"),
        ({"logprobs_G": [np.array([-1.0, -1.0])]}, "log-probabilities has 1 entries, expected 2"),
        ({"planning_G": [np.array([True, False])]}, "planning masks has 1 entries, expected 2"),
        ({"planning_G": [np.array([True]), np.array([True])]}, "completion 0: planning mask has length 1, expected 2"),
        ({"rewards_G": np.array([1.0, np.nan])}, "reward is nan at position 1"),
    ],
)
def test_faulty_inputs_are_named(changes: dict[str, Any], fragment: str) -> None:
    group = replace(make_credit_group([1, 0], [[-1, -1], [-1]]), **changes)
    with pytest.raises(CreditError) as caught:
        assign_credit([group], make_flow())
    assert "group 0" in str(caught.value)
    assert fragment in str(caught.value)


def test_missing_entropies_are_told_before_anything_is_computed() -> None:
    flow = make_flow(uncertainty=UncertaintySpec(name="h", compute=lambda ctx: ctx.entropies_T, needs_entropy=True))
    with pytest.raises(CreditError, match="uncertainty 'h' needs entropies"):
        assign_credit([make_credit_group([1, 0], [[-1], [-1]])], flow)
    group = make_credit_group([1, 0], [[-1], [-1]], entropies_G=[np.array([0.5]), np.array([0.7])])
    assert assign_credit([group], flow).uncertainties[0][1].tolist() == [0.7]
