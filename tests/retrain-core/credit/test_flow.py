"""From names and parameters in a configuration to a credit flow; every form that a plugin may choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.credit.checks import as_advantage, as_algorithm, as_transform, as_uncertainty
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.specs import AdvantageContext, AdvantageSpec, AlgorithmSpec, TransformSpec, UncertaintySpec
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from tests.kit.credit_parts import found
from tests.kit.problems import codes_in


class Callable1:
    """An object that is called like a function."""

    def __call__(self, rewards_G: Any) -> Any:
        return 2 * rewards_G


SPEC = AdvantageSpec(name="mine", compute=lambda ctx: ctx.rewards_G * ctx.params["scale"])


@pytest.mark.parametrize(
    "target",
    [
        SPEC,
        lambda: SPEC,
        lambda rewards: 2 * rewards,
        lambda rewards, params: params["scale"] * rewards,
        lambda ctx: ctx.params["scale"] * ctx.rewards_G,
        lambda context: context.params["scale"] * context.rewards_G,
        lambda rewards, extra=3: 2 * rewards,
        lambda rewards, *, extra=3, **more: 2 * rewards,
        lambda: lambda rewards: 2 * rewards,
        Callable1(),
    ],
)
def test_the_forms_of_an_advantage(target: object) -> None:
    spec = as_advantage(found(target))
    assert spec.name == "mine"
    context = AdvantageContext(rewards_G=np.array([1.0, 3.0]), params={"scale": 2.0})
    assert list(spec.compute(context)) == [2.0, 6.0]


def test_the_forms_of_the_other_parts() -> None:
    for convert, spec in (
        (as_transform, TransformSpec(name="mine")),
        (as_uncertainty, UncertaintySpec(name="mine", compute=lambda ctx: ctx.logprobs_T)),
        (as_algorithm, AlgorithmSpec(name="mine", advantage_mode="a", transform_mode="b")),
    ):
        assert convert(found(spec)) is spec
        assert convert(found(lambda spec=spec: spec)) is spec
    for convert in (as_transform, as_algorithm):
        whole = convert(found(lambda ctx: []))
        assert whole.compute_context is not None
        assert (whole.needs_planning, whole.uses_sepa_controller) == (True, True)

    def by_step(step: Any) -> Any:
        return step.rewards_PG

    assert as_advantage(found(by_step)).compute_step is by_step


OTHERS = [3, "text", None, lambda a, b, c: a, lambda: 3]
NOT_ONE = [  # an advantage is one function, and only one by token needs no verdict
    AdvantageSpec(name="a"),
    AdvantageSpec(name="a", compute=lambda ctx: [], compute_step=lambda step: []),
    AdvantageSpec(name="a", compute=lambda ctx: [], compute_tokens=lambda ctx: []),
    AdvantageSpec(name="a", compute=lambda ctx: [], needs_verdict=False),
]


@pytest.mark.parametrize(
    ("convert", "target"),
    [
        *((convert, t) for convert in (as_advantage, as_transform, as_uncertainty, as_algorithm) for t in OTHERS),
        *((as_advantage, spec) for spec in NOT_ONE),
    ],
)
def test_other_forms_are_refused_with_the_owner(convert: Callable[..., Any], target: object) -> None:
    with pytest.raises(PluginError, match="'mine' of my-dist 1") as caught:
        convert(found(target))
    assert codes_in(caught) == ["plugin.wrong-shape"]


def test_a_factory_that_raises_is_named_with_its_line() -> None:
    def make() -> TransformSpec:
        raise ValueError("no such table")

    line = make.__code__.co_firstlineno + 1
    with pytest.raises(PluginError, match=rf"'mine' of my-dist 1 .*\.py:{line}\)") as caught:
        as_transform(found(make))
    assert codes_in(caught) == ["plugin.raised"]


@pytest.fixture
def flow(tables: Mapping[str, TableEntry], toys: Path) -> Callable[..., CreditFlow]:
    """`flow("--key value")`: the flow that a command line names, with the toys installed."""

    def build(arguments: str) -> CreditFlow:
        config, problems = load_config(None, tables=tables, arguments=arguments.split())
        assert problems == []
        return build_flow(config, load_plugins({}))

    return build


def test_names_and_numbers_come_from_the_configuration(flow: Callable[..., CreditFlow]) -> None:
    built = flow(
        "--advantage-mode toy_identity --transform-mode toy_flat --uncertainty-kind toy_nll --batch-norm true "
        "--gtpo-beta 0.7 --hicra-alpha 0.3 --surprisal-mask-rho 0.2 --transform-param cap=1 --advantage-clip 2.5"
    )
    assert built.condition == "toy_raw+toy_flat", "an alias gives the same part"
    assert (built.gtpo_beta, built.hicra_alpha, built.mask_rho) == (0.7, 0.3, 0.2)
    assert (built.batch_norm, built.advantage_clip, built.transform_params) == (True, 2.5, {"cap": 1})
    assert (built.needs_planning, built.needs_entropy, built.controller) == (False, False, "")
    whole = flow("--transform-mode toy_index")
    assert (whole.needs_planning, whole.controller) == (True, "sepa")


@pytest.mark.parametrize("key", ["uncertainty_kind", "uncertainty_metric", "token_uncertainty"])
def test_a_transform_may_have_its_own_uncertainty(key: str, flow: Callable[..., CreditFlow]) -> None:
    built = flow(f"--transform-mode toy_flat --transform-param {key}=toy_entropy")
    assert (built.uncertainty.name, built.needs_entropy, built.transform_params) == ("toy_entropy", True, {})


def test_every_wrong_name_is_reported_at_once(flow: Callable[..., CreditFlow]) -> None:
    with pytest.raises(ConfigError) as caught:
        flow("--advantage-mode gpro --transform-mode gtpo_seppa --uncertainty-kind suprisal")
    for problem, name in zip(caught.value.problems, ("grpo", "gtpo_sepa", "surprisal"), strict=True):
        assert f"did you mean '{name}'?" in str(problem)


def test_parameters_are_checked_against_the_part_that_declared_them(flow: Callable[..., CreditFlow]) -> None:
    with pytest.raises(ConfigError, match="unknown option 'scael'"):
        flow("--advantage-mode grpo --advantage-param scael=std")
    assert flow("--advantage-mode toy_raw --advantage-param anything=1").advantage_params == {"anything": 1}


def test_an_algorithm_mode_fixes_both_modes(flow: Callable[..., CreditFlow]) -> None:
    built = flow("--algorithm-mode grpo_none --advantage-mode maxrl --transform-mode gtpo_sepa")
    assert (built.advantage.name, built.transform.name, built.condition) == ("grpo", "none", "grpo_none")
