"""From a configuration to a credit flow, in every form that a plugin may choose; text and rewards of single tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from retrain.advantages import compute_composable_advantages
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.checks import as_advantage, as_algorithm, as_transform, as_uncertainty
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.specs import (
    AdvantageContext,
    AdvantageSpec,
    AlgorithmSpec,
    TransformContext,
    TransformSpec,
    UncertaintySpec,
)
from retrain.inspect.credit_command import replay
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.contracts.algorithm import Needs
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Group
from retrain.records.run import StoredStep
from retrain.testing import conformance
from retrain.testing.toys import scored_groups
from tests.kit.credit_parts import found, make_credit_group, make_flow
from tests.kit.problems import codes_in

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
        functools.partial(lambda factor, rewards: factor * rewards, 2),
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
    built = flow("--algorithm-mode grpo_none --advantage-mode maxrl --transform-mode gtpo_sepa")
    assert (built.advantage.name, built.transform.name, built.condition) == ("grpo", "none", "grpo_none")
    for key in ("uncertainty_kind", "uncertainty_metric", "token_uncertainty"):
        built = flow(f"--transform-mode toy_flat --transform-param {key}=toy_entropy")
        assert (built.uncertainty.name, built.needs_entropy, built.transform_params) == ("toy_entropy", True, {})


def test_parameters_are_checked_against_the_part_that_declared_them(flow: Callable[..., CreditFlow]) -> None:
    with pytest.raises(ConfigError, match="unknown option 'scael'"):
        flow("--advantage-mode grpo --advantage-param scael=std")
    assert flow("--advantage-mode toy_raw --advantage-param anything=1").advantage_params == {"anything": 1}


WORDS = {1: "\\bo", 2: "xed{4", 3: "2}", 4: " so", 5: "é"}


class Tokenizer:
    """Decodes a word per id; an id outside its vocabulary is an error."""

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(WORDS[int(token)] for token in tokens)


def group_of(*ids_G: list[int]) -> Group:
    """A group with these sampled tokens and rewards 1, 0, 1, ..."""
    rewards = [float(number % 2 == 0) for number in range(len(ids_G))]
    (group,) = scored_groups([make_credit_group(rewards, [[-1.0] * len(ids) for ids in ids_G])])
    pairs = zip(group.completions, ids_G, strict=True)
    completions = tuple(replace(c, tokens_T=np.array([9, 9, *ids], dtype=np.int64)) for c, ids in pairs)
    return replace(group, completions=completions)


def seen_by(flow: CreditFlow, group: Group, tokenizer: Any) -> list[TransformContext]:
    seen: list[TransformContext] = []

    def credit(ctx: TransformContext) -> Any:
        seen.append(ctx)
        return [np.zeros(len(lp)) for lp in ctx.logprobs_G]

    if flow.algorithm:
        flow = replace(flow, algorithm=replace(flow.algorithm, compute_context=credit))
    else:
        flow = replace(flow, transform=replace(flow.transform, compute_context=credit))
    CreditAlgorithm(flow=flow, tokenizer=tokenizer).assign(0, [group])
    return seen


@pytest.mark.parametrize("spec", [TransformSpec, AlgorithmSpec])
def test_a_part_that_asks_sees_the_sampled_tokens_and_their_texts(spec: Any) -> None:
    part = spec(name="t", needs_text=True)
    flow = make_flow(**({"transform": part} if spec is TransformSpec else {"algorithm": part}))
    (ctx,) = seen_by(flow, group_of([1, 2, 3], [4]), Tokenizer())
    assert ctx.tokens_G is not None
    assert [tokens.tolist() for tokens in ctx.tokens_G] == [[1, 2, 3], [4]]  # the prompt's are not among them
    assert ctx.texts_G == [["\\bo", "xed{4", "2}"], [" so"]]
    assert ctx.token_rewards_G is None


def test_rewards_of_single_tokens_reach_a_part_that_asks() -> None:
    group = group_of([1, 2], [3])
    first = replace(group.completions[0], rewards_T=np.array([7.0, 7.0, 0.5, -0.25]))
    flow = make_flow(transform=TransformSpec(name="t", needs_token_rewards=True))
    (ctx,) = seen_by(flow, replace(group, completions=(first, group.completions[1])), None)
    assert ctx.token_rewards_G is not None
    assert [rewards.tolist() for rewards in ctx.token_rewards_G] == [[0.5, -0.25], [0.0]]
    assert (ctx.tokens_G, ctx.texts_G) == (None, None), "nothing is decoded unless a part asks"
    assert CreditAlgorithm(flow=flow).needs == Needs(token_rewards=True)  # for the part that sets them
    with pytest.raises(ConfigError, match="takes rewards of single tokens: a run does not store them"):
        replay(StoredStep(step=3, metrics={}, groups=()), flow, None, sepa_lambda=0.0)


DIGITS = """
import numpy as np

from retrain.advantages import TransformOutput, TransformSpec
from retrain.api import PluginSpec


def weights(texts):
    weights_T = np.where([any(map(str.isdigit, text)) for text in texts], 4.0, 1.0)
    return weights_T / weights_T.mean() if texts else weights_T


def credit(ctx):
    pairs = zip(ctx.advantages_G, ctx.texts_G, strict=True)
    return TransformOutput(token_advs=[advantage * weights(texts) for advantage, texts in pairs])


SPEC = TransformSpec(name="digits", compute_context=credit, needs_text=True)
PLUGIN = PluginSpec(name="digits", summary="Four times the credit for tokens with a digit.", factory=SPEC)
"""


def test_a_transform_that_reads_the_text_conforms_and_credits_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "credit_for_digits.py").write_text(DIGITS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    checks = conformance("transform", "credit_for_digits.PLUGIN")
    assert len(checks) > 5
    for check in checks:
        check()
    texts = ["The", " answer", " is", " \\bo", "xed{4", "2", "", "}", "."]
    result = compute_composable_advantages(
        [1.0, 0.0],
        [[-1.0] * len(texts), [-1.0, -1.0]],
        advantage_mode="grpo",
        transform_mode="credit_for_digits.PLUGIN",
        texts_G=[texts, ["no", " answer"]],
    )
    expected = np.array([1, 1, 1, 1, 4, 4, 1, 1, 1]) / 15 * 9 * 0.5
    assert_allclose(result.token_advs[0], expected)
    assert_array_equal(result.token_advs[1], [-0.5, -0.5])
