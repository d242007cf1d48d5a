from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import Config, TrainBatch, TrainRow, load_plugins
from retrain.run.tables import registered_tables
from retrain_tinker.losses import PolicyLoss
from tests.kit.scored_tokens import scored

torch = pytest.importorskip("torch", reason="the losses are compared with those of retrain-local")
local = pytest.importorskip("retrain_local.training.step_loss", reason="they are compared with retrain-local's")
PLUGINS = load_plugins()
TABLE = registered_tables(PLUGINS)["algorithm"].model  # with the keys of the losses
NUMBERS = st.floats(-3.0, 0.0)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.floats(-2.0, 2.0)), min_size=1, max_size=12)
ALGORITHMS = st.fixed_dictionaries(
    {"loss": st.sampled_from(["importance_sampling", "ppo"])},
    optional={"clip_eps": st.sampled_from([0.1, 0.3]), "clip_eps_high": st.sampled_from([0.1, 0.3])},
)
WEIGHTS = (
    st.just({})
    | st.builds(dict, tis_cap=st.floats(0.5, 2.0))
    | st.builds(
        dict,
        is_bounds=st.sampled_from([[0.5, 2.0], [0.9, 1.5]]),
        is_level=st.sampled_from(["token", "sequence", "geometric"]),
        is_mode=st.sampled_from(["truncate", "mask"]),
    )
)


def config(**algorithm: object) -> Config:
    return Config(tables={"algorithm": TABLE(**algorithm)})


@settings(max_examples=100)
@given(algorithm=ALGORITHMS, weight=WEIGHTS, tokens=TOKENS)
def test_a_loss_is_the_one_of_the_local_backend(
    algorithm: dict[str, object], weight: dict[str, object], tokens: list[tuple[float, ...]]
) -> None:
    if algorithm["loss"] != "ppo":
        algorithm = {"loss": algorithm["loss"]}
    given_config = config(**algorithm, **weight)
    new, old, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    loss = PolicyLoss.of(given_config)
    factors, cut = loss.importance(new, old)
    terms, clipped = loss.terms(new, new if loss.is_bounds else old, advantages * factors)
    tensors = [torch.tensor(values, dtype=torch.float64) for values in (new, old, advantages)]
    wanted, wanted_clipped = local.PolicyLoss.of(given_config, PLUGINS).of_pack(
        tensors[0], scored(*tensors[1:]), len(new)
    )
    assert terms.mean() == pytest.approx(float(wanted), abs=1e-9)
    assert int((cut | clipped).sum()) == int(wanted_clipped)


def test_cispo_bounds_its_weight_only_from_above() -> None:
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
    new, old = np.log(ratios) - 1.0, np.full(4, -1.0)
    plain, clipped = (PolicyLoss(kind=kind).terms(new, old, advantages)[0] for kind in ("importance_sampling", "ppo"))
    assert plain == pytest.approx([-1.491825, 0.670320, 2.718282, -2.0], abs=1e-6)
    assert clipped == pytest.approx([-1.2, 0.8, 2.718282, -2.0], abs=1e-6)


@settings(max_examples=30)
@given(
    kind=st.sampled_from(["importance_sampling", "ppo", "cispo", "likelihood"]),
    tokens=TOKENS,
    scale=st.floats(1e-3, 1e3),
)
def test_losses_are_proportional_to_the_advantage(kind: str, tokens: list[tuple[float, ...]], scale: float) -> None:
    new, old, advantages = (np.array(column) for column in zip(*tokens, strict=True))
    loss = PolicyLoss.of(config(loss=kind))
    assert loss.terms(new, old, scale * advantages)[0] == pytest.approx(scale * loss.terms(new, old, advantages)[0])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@settings(max_examples=25)
@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), num_masked=st.integers(0, 3))
def test_the_denominators_are_those_of_the_local_backend(aggregation: str, counts: list[int], num_masked: int) -> None:
    """Each row's terms are divided as there, where a mean over sequences also divides by the tokens of each."""
    given_config = config(aggregation=aggregation)
    numbers = [np.arange(count + 1) for count in counts]
    rows = tuple(TrainRow(tokens_T=n, action_T=n > 0, logprobs_T=0.0 * n, advantages_T=0.0 * n) for n in numbers)
    batch = TrainBatch(step=0, rows=rows, temperature=1.0, num_masked=num_masked)
    wanted = local.PolicyLoss.of(given_config, PLUGINS).denominator(batch)
    found = PolicyLoss.of(given_config).denominators(counts, num_masked)
    assert found == [wanted * (n if aggregation == "sequence_mean" else 1) for n in counts]
