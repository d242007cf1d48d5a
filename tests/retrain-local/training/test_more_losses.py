"""The losses of 2025-26 on the vectors of `loss_vectors.json`, and their edges.

The vectors are the numbers of TRL 1.16 and verl where these have the loss; otherwise they follow the papers' formulas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import Config, LossTrial, LossValue, Seeds, TrainBatch, TrainRow, load_plugins
from retrain.run.tables import registered_tables
from retrain_local.training.packs import ActionTokens
from retrain_local.training.regularisers import Columns
from retrain_local.training.step_loss import PolicyLoss, evaluate_loss
from tests.kit import __file__ as kit

VECTORS = json.loads(Path(kit).with_name("loss_vectors.json").read_text(encoding="utf-8"))
PLUGINS = load_plugins()
TABLE = registered_tables(PLUGINS)["algorithm"].model
KEYS: dict[str, Any] = {  # the settings of each loss of the vectors
    "sapo": {},
    "gmpo": {},
    "vespo": {},
    "luspo": {"clip_eps": 0.2, "clip_eps_high": 0.2},
    "dppo_tv": {},
    "dppo_kl": {"loss_params": {"divergence": 0.3}},
    "m2po": {},
    "dro": {},
    "ppo + off_policy_mask": {"loss": "ppo", "off_policy_mask": 0.1},
}
CASES = [(name, case) for name in KEYS for case in VECTORS["sets"]]


def config_of(name: str, **more: Any) -> Config:
    return Config(tables={"algorithm": TABLE(**{"loss": name, **KEYS.get(name, {}), **more})})


def batch_of(olds: Any, masks: Any, credit_S: Any, **more: Any) -> TrainBatch:
    """Rows of one prompt token and then these tokens, of which the masked ones are the environment's."""
    rows = []
    for old, mask, credit in zip(olds, masks, credit_S, strict=True):
        action_T = np.array([False, *map(bool, mask)])
        logprobs_T, advantages_T = np.array([0.0, *old]), action_T * np.array([0.0, *np.broadcast_to(credit, len(old))])
        row = TrainRow(
            tokens_T=np.arange(len(old) + 1), action_T=action_T, logprobs_T=logprobs_T, advantages_T=advantages_T
        )
        rows.append(row)
    return TrainBatch(step=0, rows=tuple(rows), temperature=1.0, **more)


def value_of(name: str, batch: TrainBatch, news: Any, packs: Any = (), **more: Any) -> LossValue:
    logprobs = [np.array([0.0, *new]) for new in news]
    trial = LossTrial(batch=batch, logprobs=logprobs, packs=packs or [range(len(news))])
    return evaluate_loss(config_of(name, **more), PLUGINS, trial)


def of_case(name: str, case: str, **more: Any) -> LossValue:
    given = VECTORS["sets"][case]
    return value_of(name, batch_of(given["old"], given["mask"], given["A"]), given["new"], **more)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_value_and_gradient_are_those_of_the_vectors(name: str, case: str) -> None:
    wanted = VECTORS["losses"][name]["cases"][case]
    found = of_case(name, case)
    # the vectors have nine decimals
    assert found.loss == pytest.approx(wanted["loss"], abs=1e-9)
    for gradient_T, slopes in zip(found.gradients, wanted["gradient"], strict=True):
        assert gradient_T[1:] == pytest.approx(slopes[: len(gradient_T) - 1], abs=1e-9)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_float32_agrees_to_its_precision(name: str, case: str) -> None:
    given, wanted = VECTORS["sets"][case], VECTORS["losses"][name]["cases"][case]
    loss, batch = PolicyLoss.of(config_of(name), PLUGINS), batch_of(given["old"], given["mask"], given["A"])
    news = [np.array([0.0, *new]) for new in given["new"]]
    tokens = ActionTokens.of(range(len(news)), batch.rows)
    new_M = torch.tensor(np.concatenate([new[row.action_T] for new, row in zip(news, batch.rows, strict=True)]))
    new_M = new_M.float().requires_grad_()
    dropped = loss.marked(batch, news, Seeds(0)).dropped
    columns = Columns(dropped_M=torch.from_numpy(np.concatenate(dropped)))
    value, _ = loss.of_pack(new_M, tokens, loss.denominator(batch), columns=columns)
    (gradient_M,) = torch.autograd.grad(value, new_M)
    slopes = np.concatenate(
        [
            np.array([0.0, *slopes])[: len(row.action_T)][row.action_T]
            for slopes, row in zip(wanted["gradient"], batch.rows, strict=True)
        ]
    )
    assert value.item() == pytest.approx(wanted["loss"], abs=1e-5, rel=1e-5)
    assert gradient_M.numpy() == pytest.approx(slopes, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in KEYS if name != "dro"])
def test_without_credit_there_is_neither_loss_nor_gradient(name: str) -> None:
    found = of_case(name, "zero")
    assert found.loss == 0.0
    assert not np.concatenate(found.gradients).any()


@pytest.mark.parametrize("name", KEYS)
def test_a_row_without_actions_is_in_no_mean(name: str) -> None:
    given = VECTORS["sets"]["far"]
    whole = of_case(name, "far")
    batch = batch_of([*given["old"], [-1.0, -2.0]], [*given["mask"], [0, 0]], [*given["A"], 3.0])
    found = value_of(name, batch, [*given["new"], [-0.1, -0.2]])
    assert found.loss == pytest.approx(whole.loss, rel=1e-12)
    assert not found.gradients[-1].any()


@pytest.mark.parametrize("name", KEYS)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str) -> None:
    """Clips, gates, masks and phi do nothing while the ratios are 1."""
    given = VECTORS["sets"]["far"]
    found = value_of(name, batch_of(given["old"], given["mask"], given["A"]), given["old"])
    assert found.clipped == 0
    by_sequence = PolicyLoss.of(config_of(name), PLUGINS).aggregation == "sequence_mean" and name != "luspo"
    tokens = sum(map(len, given["old"]))
    for gradient_T, credit in zip(found.gradients, given["A"], strict=True):
        weight = len(given["old"]) * (len(gradient_T) - 1) if by_sequence else tokens
        weight = len(given["old"]) if name == "luspo" else weight
        assert gradient_T[1:] == pytest.approx(np.full(len(gradient_T) - 1, -credit / weight))


@pytest.mark.parametrize("name", KEYS)
def test_packs_change_nothing(name: str) -> None:
    """A selection over the step, such as m2po's, included."""
    given = VECTORS["sets"]["far"]
    batch, whole = batch_of(given["old"], given["mask"], given["A"]), of_case(name, "far")
    for packs in ([[0], [1], [2]], [[2, 0], [1]]):
        found = value_of(name, batch, given["new"], packs)
        assert found.loss == pytest.approx(whole.loss, rel=1e-12)
        assert np.concatenate(found.gradients) == pytest.approx(np.concatenate(whole.gradients), rel=1e-12)
        assert found.clipped == whole.clipped


@pytest.mark.parametrize(
    ("moves", "tau", "kept"),
    [
        ([0.1, -0.1, 0.1], 0.04, 3),
        ([0.1, 0.3, -0.2], 0.04, 2),  # 0.14 / 3 is above, 0.05 / 2 below
        ([3.0, -2.0, 2.5], 0.04, 1),  # none is below, and one stays
        ([0.0, 0.0, 0.0], 1e-9, 3),
        ([25.0, 30.0, 0.1], 0.04, 1),
        ([0.3, -0.3, 0.0], 0.04, 1),  # 0.09 / 2 is above; equal ones go together
        ([0.25, -0.25, 0.0, 0.1], 0.04, 4),
        ([0.3, -0.3, 0.1, 0.0], 0.04, 2),
        ([0.3, -0.3], 0.04, 2),  # all are the smallest
        ([0.5], 0.04, 1),
    ],
)
def test_m2po_drops_the_fewest_tokens_and_never_all(moves: list[float], tau: float, kept: int) -> None:
    old = [-40.0] * len(moves)
    found = value_of(
        "m2po",
        batch_of([old], [[1] * len(old)], [1.0]),
        [np.add(old, moves)],
        loss_params={"tau": tau},
    )
    slopes = found.gradients[0][1:]
    assert np.count_nonzero(slopes) == kept
    assert found.clipped == len(moves) - kept
    assert np.abs(moves)[slopes != 0.0].max() <= np.abs(moves)[slopes == 0.0].min(initial=np.inf)


def test_m2po_looks_at_the_whole_step_and_not_at_a_pack() -> None:
    """The second row by itself would keep its only token."""
    batch = batch_of([[-1.0, -1.0, -1.0], [-1.0]], [[1, 1, 1], [1]], [1.0, 1.0])
    found = value_of("m2po", batch, [[-1.0, -1.0, -0.9], [-0.2]], [[0], [1]])
    assert not found.gradients[1].any()
    assert np.count_nonzero(found.gradients[0]) == 3


def test_the_mask_of_stale_completions_compares_with_the_sampler() -> None:
    """`engine_logprobs_T` are the sampler's where `logprobs_T` were recomputed; the denominator keeps the tokens."""
    olds, credit = [[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]], [-1.0, 1.0, -1.0]
    batch = batch_of(olds, [[1, 1]] * 3, credit)
    engine = [np.array([0.0, -0.5, -0.5]), np.array([0.0, -0.5, -0.5]), np.array([0.0, -1.0, -1.0])]
    rows = [
        TrainRow(
            tokens_T=row.tokens_T,
            action_T=row.action_T,
            logprobs_T=row.logprobs_T,
            advantages_T=row.advantages_T,
            engine_logprobs_T=engine_T,
        )
        for row, engine_T in zip(batch.rows, engine, strict=True)
    ]
    found = value_of(
        "importance_sampling",
        TrainBatch(step=0, rows=tuple(rows), temperature=1.0),
        olds,
        off_policy_mask=0.4,
    )
    assert [gradient_T[1:].tolist() for gradient_T in found.gradients] == [
        [0.0, 0.0],
        pytest.approx([-1 / 6] * 2),
        pytest.approx([1 / 6] * 2),
    ]
    assert found.clipped == 2


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize(("gap", "base"), [(700.0, -701.0), (-700.0, -1.0), (30.0, -31.0), (0.0, 0.0)])
def test_extremes_stay_finite(name: str, gap: float, base: float) -> None:
    """In float32, as training computes, for advantages of both signs."""
    loss = PolicyLoss.of(config_of(name), PLUGINS)
    batch = batch_of([[base, base], [base, -1.0]], [[1, 1], [1, 1]], [1.0, -1.0])
    new_M = torch.tensor([base + gap, base + gap, base + gap, -1.0], requires_grad=True)
    value, _ = loss.of_pack(new_M, ActionTokens.of(range(2), batch.rows), 4)
    (gradient_M,) = torch.autograd.grad(value, new_M)
    assert torch.isfinite(value)
    assert torch.isfinite(gradient_M).all()
