from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import Config, TrainBatch, TrainRow, load_plugins
from retrain.run.tables import registered_tables
from retrain_tinker.losses import PolicyLoss
from tests.kit.scored_tokens import scored
from tests.kit.shared import first_or_long

torch = pytest.importorskip("torch", reason="the losses are compared with those of retrain-local")
local = pytest.importorskip("retrain_local.training.step_loss", reason="they are compared with retrain-local's")
PLUGINS = load_plugins()
TABLE = registered_tables(PLUGINS)["algorithm"].model  # with the keys of the losses
NUMBERS = st.floats(-3.0, 0.0)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.floats(-2.0, 2.0)), min_size=1, max_size=12)


def config(**algorithm: object) -> Config:
    return Config(tables={"algorithm": TABLE(**algorithm)})


@pytest.mark.parametrize(
    "algorithm",
    first_or_long(
        [
            {"loss": "importance_sampling"},
            {"loss": "importance_sampling", "tis_cap": 1.5},
            {"loss": "ppo"},
            {"loss": "ppo", "clip_eps": 0.1, "clip_eps_high": 0.3},
            {"loss": "ppo", "tis_cap": 2.0},
            {"loss": "ppo", "is_bounds": [0.5, 2.0], "is_mode": "mask"},
            {"loss": "importance_sampling", "is_bounds": [0.5, 2.0], "is_level": "sequence"},
            {"loss": "ppo", "is_bounds": [0.9, 1.5], "is_level": "geometric", "is_mode": "mask"},
            {"loss": "ppo", "clip_eps": 0.3},
        ]
    ),
    ids=str,
)
@given(tokens=TOKENS)
def test_a_loss_is_the_one_of_the_local_backend(algorithm: dict[str, object], tokens: list[tuple[float, ...]]) -> None:
    new, old, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    loss = PolicyLoss.of(config(**algorithm))
    factors, cut = loss.importance(new, old)
    terms, clipped = loss.terms(new, new if loss.is_bounds else old, advantages * factors)
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (new, old, advantages)]
    pack = scored(*tensors[1:])
    wanted, wanted_clipped = local.PolicyLoss.of(config(**algorithm), PLUGINS).of_pack(tensors[0], pack, len(new))
    assert terms.mean() == pytest.approx(float(wanted), abs=1e-9)
    assert int((cut | clipped).sum()) == int(wanted_clipped)


def test_cispo_bounds_its_weight_from_above_alone() -> None:
    loss = PolicyLoss.of(config(loss="cispo"))
    assert loss.service_config == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    old = np.array([-2.0, -2.0])
    new = old + np.log([0.01, 9.0])
    terms, clipped = loss.terms(new, old, np.array([1.0, 1.0]))
    assert terms == pytest.approx([-0.01 * new[0], -4.0 * new[1]])
    assert clipped.tolist() == [False, True]


def test_the_reference_vectors_of_the_literature() -> None:
    """Ratios, advantages and losses as published for importance sampling and for PPO with 0.8 and 1.2."""
    ratios, advantages = np.array([1.491825, 0.670320, 2.718282, 1.0]), np.array([1.0, -1.0, -1.0, 2.0])
    old = np.full(4, -1.0)
    new = old + np.log(ratios)
    plain = PolicyLoss(kind="importance_sampling").terms(new, old, advantages)[0]
    assert plain == pytest.approx([-1.491825, 0.670320, 2.718282, -2.0], abs=1e-6)
    clipped = PolicyLoss(kind="ppo").terms(new, old, advantages)[0]
    assert clipped == pytest.approx([-1.2, 0.8, 2.718282, -2.0], abs=1e-6)
    assert clipped.sum() == pytest.approx(0.318282, abs=1e-6)


@pytest.mark.parametrize("kind", first_or_long(["importance_sampling", "ppo", "cispo"]))
@given(tokens=TOKENS, scale=st.floats(1e-3, 1e3))
def test_losses_are_proportional_to_the_advantage(kind: str, tokens: list[tuple[float, ...]], scale: float) -> None:
    new, old, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    loss = PolicyLoss.of(config(loss=kind))
    assert loss.terms(new, old, scale * advantages)[0] == pytest.approx(scale * loss.terms(new, old, advantages)[0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), num_masked=st.integers(0, 3))
def test_the_denominators_are_those_of_the_local_backend(aggregation: str, counts: list[int], num_masked: int) -> None:
    """Each row's terms are divided as there, where a mean over sequences also divides by the tokens of each."""
    given_config = config(aggregation=aggregation)
    rows = [
        TrainRow(
            tokens_T=np.arange(n + 1),
            action_T=np.arange(n + 1) > 0,
            logprobs_T=np.zeros(n + 1),
            advantages_T=np.zeros(n + 1),
        )
        for n in counts
    ]
    batch = TrainBatch(step=0, rows=tuple(rows), temperature=1.0, num_masked=num_masked)
    wanted = local.PolicyLoss.of(given_config, PLUGINS).denominator(batch)
    found = PolicyLoss.of(given_config).denominators(counts, num_masked)
    assert found == [wanted * (n if aggregation == "sequence_mean" else 1) for n in counts]
