"""The losses: documented vectors, gradients, averages over the whole step, weights of the mismatch with the sampler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain.api import Config, LossClip, LossContext, LossSpec, PluginError, TrainBatch, TrainRow, load_plugins
from retrain.kernel.config.schema import AlgorithmTable
from retrain_local.training.loss_formulas import CISPO, GSPO, IMPORTANCE_SAMPLING, PPO
from retrain_local.training.step_loss import Mismatch, PolicyLoss
from tests.kit.scored_tokens import scored

NEW, OLD, CREDIT = [-0.6, -0.9, -1.0, -0.1], [-1.0, -0.5, -2.0, -0.1], [1.0, -1.0, -1.0, 2.0]
IS_GRADIENT = [-1.491825, 0.670320, 2.718282, -2.0]
SPECS = {spec.name: spec for spec in (IMPORTANCE_SAMPLING, PPO, CISPO, GSPO)}
TIS = Mismatch(high=2.0)
OLDS = ([-1.0, -0.5], [-2.0, -0.1, -0.7], [-0.3])  # three sequences, of losses/README.md
NEWS = ([-0.6, -0.9], [-1.0, -0.1, -0.8], [-0.35])


def loss_named(name: str, eps: float = 0.0, eps_high: float = 0.0, dual: float = 0.0, **rest: Any) -> PolicyLoss:
    """A loss with its own clips and average, or with these."""
    spec = SPECS[name]
    given = {"aggregation": spec.aggregation, **rest}
    return PolicyLoss(spec=spec, clip=spec.clip.resolved(eps, eps_high, dual), **given)


def total_of(
    loss: PolicyLoss, new: Any = NEW, engine: Any = None, old: Any = OLD, is_fixed: bool = False
) -> tuple[float, Tensor, int]:
    """Sum of the loss of four tokens of one sequence, gradient of it, clipped tokens."""
    new_M = torch.tensor(new, requires_grad=True)
    value, clipped = loss.of_pack(new_M, scored(old, CREDIT, engine=engine), 1, is_fixed=is_fixed)
    value.backward()
    return value.item(), new_M.grad, int(clipped)


def batch_of(credit_S: Any, num_masked: int = 0) -> TrainBatch:
    """The rows behind `OLDS`, each with a prompt of one token."""
    rows = []
    for old, credit in zip(OLDS, credit_S, strict=True):
        count = len(old)
        at = {"logprobs_T": np.array([0.0, *old]), "advantages_T": np.array([0.0, *np.broadcast_to(credit, count)])}
        rows.append(TrainRow(tokens_T=np.arange(count + 1), action_T=np.arange(count + 1) > 0, **at))
    return TrainBatch(step=0, rows=tuple(rows), temperature=1.0, num_masked=num_masked)


def step_of(
    loss: PolicyLoss, credit_S: Any = (1.0, -1.0, 0.5), cuts: Any = ((0, 1, 2),), num_masked: int = 0, news: Any = NEWS
) -> tuple[float, list[list[float]], int]:
    """Loss, gradient by sequence and clipped tokens of a step whose sequences are cut into these packs, in float64."""
    denominator = loss.denominator(batch_of(credit_S, num_masked))
    total, count, gradients = 0.0, 0, [[0.0]] * len(OLDS)
    for rows in cuts:
        counts = [len(OLDS[r]) for r in rows]
        columns = [
            (news[r], OLDS[r], [credit_S[r]] * n, [i] * n) for i, (r, n) in enumerate(zip(rows, counts, strict=True))
        ]
        new, old, credit, numbers = (np.concatenate(column) for column in zip(*columns, strict=True))
        new_M = torch.tensor(new, requires_grad=True)
        value, clipped = loss.of_pack(
            new_M, scored(old, credit, numbers, [-1.0] * sum(counts)), denominator, is_fixed=True
        )
        (gradient_M,) = torch.autograd.grad(value, new_M)
        total, count = total + value.item(), count + int(clipped)
        ends = np.cumsum(counts)[:-1]
        for r, part in zip(rows, np.split(gradient_M.numpy(), ends), strict=True):
            gradients[r] = part.tolist()
    return total, gradients, count


@pytest.mark.parametrize(
    ("loss", "total", "clipped"),
    [
        (loss_named("importance_sampling"), -0.103223, 0),
        (loss_named("ppo"), 0.318282, 2),
        (loss_named("ppo", 0.2, 0.28), 0.238282, 2),
        (loss_named("cispo"), -2.226475, 0),
    ],
)
def test_documented_vectors(loss: PolicyLoss, total: float, clipped: int) -> None:
    value, _, count = total_of(loss)
    assert value == pytest.approx(total, abs=2e-6)
    assert count == clipped


@pytest.mark.parametrize(
    ("loss", "credit_S", "wanted"),
    [
        (loss_named("importance_sampling"), (1.0, -1.0, 0.5), 0.330893),
        (loss_named("importance_sampling", aggregation="sequence_mean"), (1.0, -1.0, 0.5), -0.005216),
        (loss_named("importance_sampling", aggregation="constant", max_tokens=4), (1.0, -1.0, 0.5), 0.165447),
        (loss_named("gspo"), (1.0, -1.0, 0.5), -0.041919),
        (loss_named("gspo"), (1.0, 1.0, -0.5), -0.500183),
        (loss_named("cispo", eps_high=1.2), (1.0, -1.0, 0.5), -0.089019),
    ],
)
def test_vectors_of_whole_steps(loss: PolicyLoss, credit_S: Any, wanted: float) -> None:
    assert step_of(loss, credit_S)[0] == pytest.approx(wanted, abs=1e-6)


def test_gspo_weighs_a_sequence_as_a_whole() -> None:
    def terms(credit_S: Any) -> list[float]:  # by sequence: the gradient of nothing else than the term itself
        seen = []
        for row, credit in enumerate(credit_S):
            pack = scored(np.array(OLDS[row]), np.full(len(OLDS[row]), credit))
            seen.append(-loss_named("gspo").of_pack(torch.tensor(np.array(NEWS[row])), pack, 1)[0].item())
        return seen

    assert terms((1.0, -1.0, 0.5)) == pytest.approx([1.0, -1.349859, 0.475615], abs=1e-6)
    assert terms((1.0, 1.0, -0.5)) == pytest.approx([1.0, 1.0004, -0.49985], abs=1e-6)


def test_dual_clip_bounds_the_terms_of_bad_tokens() -> None:
    ratios, credit = [4.481689, 0.67032, 1.105171, 12.182494], [-1.0, -1.0, 1.0, -1.0]
    new_M = torch.tensor(np.log(ratios), requires_grad=True)
    pack = scored(np.zeros(4), np.array(credit))
    loss = loss_named("ppo", dual=3.0)
    terms = [-loss.of_pack(new_M[i : i + 1], scored([0.0], [credit[i]]), 1)[0].item() for i in range(4)]
    assert terms == pytest.approx([-3.0, -0.8, 1.105171, -3.0], abs=1e-6)
    value, clipped = loss.of_pack(new_M, pack, 1)
    value.backward()
    assert new_M.grad.tolist() == pytest.approx([0.0, 0.0, -1.105171, 0.0], abs=1e-6)
    assert int(clipped) == 3


CAPPED, LATER = [1.491825, 0.670320, 2.0, 1.0], [0.1, -0.3, 0.05, 0.0]  # weights of TIS; moves of a later update


def capped(moves: Any = 0.0) -> list[float]:
    """The gradient of a loss whose mismatch is capped at 2, once the policy has moved."""
    return (-np.array(CAPPED) * np.exp(moves) * np.array(CREDIT)).tolist()


@pytest.mark.parametrize(
    ("loss", "given", "wanted", "clipped"),
    [
        (loss_named("importance_sampling"), {}, IS_GRADIENT, 0),
        (loss_named("cispo"), {}, IS_GRADIENT, 0),
        (loss_named("ppo"), {}, [0.0, 0.0, 2.718282, -2.0], 2),
        (loss_named("cispo", eps_high=2.0), {}, [-1.491825, 0.670320, 2.0, -2.0], 1),
        *((loss_named(name, mismatch=TIS), {}, capped(), 1) for name in ("importance_sampling", "ppo", "cispo")),
        *(  # recomputed log-probabilities: the mismatch is with the engine
            (loss_named(name, mismatch=TIS), {"engine": OLD, "old": NEW, "is_fixed": is_fixed}, capped(), 1)
            for name in ("importance_sampling", "ppo", "cispo")
            for is_fixed in (False, True)
        ),
        (  # a later update: the weight is still the mismatch before the first, the ratio only that of the updates
            loss_named("importance_sampling", mismatch=TIS),
            {"new": np.add(NEW, LATER).tolist(), "engine": OLD, "old": NEW, "is_fixed": True},
            capped(LATER),
            1,
        ),
        *(
            (loss_named(name), {"new": OLD}, [-each for each in CREDIT], 0)
            for name in ("importance_sampling", "ppo", "cispo")
        ),
    ],
)
def test_gradients_of_four_tokens(loss: PolicyLoss, given: dict[str, Any], wanted: list[float], clipped: int) -> None:
    _, gradient, count = total_of(loss, **given)
    torch.testing.assert_close(gradient, torch.tensor(wanted), atol=1e-5, rtol=0)
    assert count == clipped


def test_without_a_cap_the_engines_own_numbers_count_for_nothing() -> None:
    loss = loss_named("importance_sampling")
    assert total_of(loss)[0] == total_of(loss, engine=[-3.0] * 4)[0]


LOGS = ([0.1, 0.2], [1.2, 0.9], [-0.05])
TOKENS, PRODUCTS, ROOTS = (
    [1.105171, 1.221403, 3.320117, 2.459603, 0.951229],
    [1.349859, 1.349859, 8.16617, 8.16617, 0.951229],
    [1.161834, 1.161834, 2.857651, 2.857651, 0.951229],
)


@pytest.mark.parametrize(
    ("level", "mode", "bounds", "factors"),
    [
        ("token", "truncate", (1.0, 3.0), [1.105171, 1.221403, 3.0, 2.459603, 1.0]),
        ("token", "mask", (1.0, 3.0), [1.105171, 1.221403, 0.0, 2.459603, 0.0]),
        ("sequence", "truncate", (0.0, 1e9), PRODUCTS),
        ("sequence", "mask", (0.0, 2.0), [1.349859, 1.349859, 0.0, 0.0, 0.951229]),
        ("geometric", "truncate", (0.0, 1e9), ROOTS),
        ("geometric", "mask", (1.0, 2.0), [1.161834, 1.161834, 0.0, 0.0, 0.0]),
    ],
)
def test_importance_weights_by_level_and_mode(level: str, mode: str, bounds: Any, factors: list[float]) -> None:
    sampler = -np.concatenate(LOGS)
    new_M = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    pack = scored(np.zeros(5), np.ones(5), [0, 0, 1, 1, 2], engine=sampler)
    mismatch = Mismatch(level=level, mode=mode, low=bounds[0], high=bounds[1])
    value, clipped = loss_named("importance_sampling", mismatch=mismatch).of_pack(new_M, pack, 5, is_fixed=True)
    value.backward()
    assert (-5 * new_M.grad).tolist() == pytest.approx(factors, abs=1e-6)  # the denominator is left as it is
    whole = {"token": TOKENS, "sequence": PRODUCTS, "geometric": ROOTS}[level]
    assert int(clipped) == sum(not bounds[0] <= weight <= bounds[1] for weight in whole)


def test_on_policy_gspo_has_the_gradient_of_reinforce() -> None:
    """Of the mean over sequences of their mean over tokens; advantages are one per sequence there."""
    _, gradients, clipped = step_of(loss_named("gspo"), news=OLDS)
    wanted = [np.full(len(old), -credit / len(old) / 3) for old, credit in zip(OLDS, (1.0, -1.0, 0.5), strict=True)]
    assert np.concatenate(gradients) == pytest.approx(np.concatenate(wanted))
    assert clipped == 0


def test_settings_follow_the_configuration() -> None:
    plugins = load_plugins()

    def of(**values: object) -> PolicyLoss:
        return PolicyLoss.of(Config(tables={"algorithm": AlgorithmTable.model_validate(values)}), plugins)

    assert of().spec is IMPORTANCE_SAMPLING
    assert of().mismatch is None
    assert of(loss="ppo").clip == LossClip(eps=0.2, eps_high=0.2)
    assert of(loss="ppo", clip_eps=0.1, clip_eps_high=0.28).clip == LossClip(eps=0.1, eps_high=0.28)
    assert of(loss="ppo", clip_eps=0.3).clip == LossClip(eps=0.3, eps_high=0.3)
    assert of(loss="cispo").clip.eps_high == 4.0
    assert of(loss="cispo", clip_eps=0.2).clip.eps_high == 4.0  # as every earlier run wrote it down
    assert of(loss="cispo", clip_eps_high=5.0, tis_cap=2.0).clip.eps_high == 5.0
    assert of(loss="cispo", clip_eps_high=5.0, tis_cap=2.0).mismatch == TIS
    assert of(loss="gspo").clip == LossClip(eps=3e-4, eps_high=4e-4)
    assert (of(loss="gspo").aggregation, of(loss="ppo").aggregation) == ("sequence_mean", "token_mean")


def test_tokens_without_credit_stay_in_the_denominator() -> None:
    new, credit = torch.tensor([0.4, -0.4, 1.0, 0.0]), torch.tensor([1.0, 0.0, -1.0, 2.0])
    value, _ = loss_named("importance_sampling").of_pack(new, scored(torch.zeros(4), credit), 4)
    assert value.item() == pytest.approx(-0.193386, abs=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "gspo"])
def test_log_ratio_is_clamped(name: str) -> None:
    value, _ = loss_named(name).of_pack(torch.tensor([0.0]), scored([-500.0], [-1.0]), 1)
    assert value.item() == pytest.approx(torch.tensor(20.0).exp().item())


@pytest.mark.parametrize(
    ("aggregation", "denominators"), [("token_mean", (6, 6)), ("sequence_mean", (3, 5)), ("constant", (21, 35))]
)
def test_masked_sequences_count_where_the_loss_divides_by_sequences(aggregation: str, denominators: Any) -> None:
    loss = loss_named("importance_sampling", aggregation=aggregation, max_tokens=7)
    found = [loss.denominator(batch_of((1.0, 1.0, 1.0), num_masked)) for num_masked in (0, 2)]
    assert tuple(found) == denominators


CUTS = (((0,), (1,), (2,)), ((2, 0), (1,)), ((1, 2, 0),))
NUMBERS = st.floats(-2.0, 0.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("name", sorted(SPECS))
@settings(max_examples=15)
@given(numbers=st.lists(NUMBERS, min_size=6, max_size=6), credit_S=st.tuples(*[st.floats(-2.0, 2.0)] * 3))
def test_packs_and_order_change_nothing(name: str, aggregation: str, numbers: list[float], credit_S: Any) -> None:
    news = (numbers[:2], numbers[2:5], numbers[5:])
    loss = loss_named(name, aggregation=aggregation, max_tokens=9, dual=3.0 if name == "ppo" else 0.0)
    loss = replace(loss, mismatch=Mismatch(level="geometric", low=0.5, high=2.0))
    total, gradients, clipped = step_of(loss, credit_S, news=news)
    for cuts in CUTS:
        value, parts, count = step_of(loss, credit_S, cuts, news=news)
        assert value == pytest.approx(total, rel=1e-6, abs=1e-12)
        assert np.concatenate(parts) == pytest.approx(np.concatenate(gradients), rel=1e-6, abs=1e-12)
        assert count == clipped


def test_a_loss_of_another_shape_is_refused_by_name() -> None:
    def averaged(ctx: LossContext) -> Tensor:
        terms_M: Tensor = ctx.ratios_M * ctx.advantages_M
        return terms_M.mean()

    loss = PolicyLoss(spec=LossSpec(name="averaged", compute=averaged))
    with pytest.raises(PluginError, match=r"loss 'averaged' returned terms of shape \(\), expected \(4,\)"):
        total_of(loss)
