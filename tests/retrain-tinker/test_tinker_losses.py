from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, Config, NonFiniteError, TrainBatch, TrainRow, load_plugins
from retrain.run.tables import registered_tables
from retrain_tinker.losses import Datum, PolicyLoss, check_rows
from tests.kit.problems import codes_in
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
    terms, clipped = loss.terms(new, old, np.array([2.0, -3.0]))
    assert terms == pytest.approx([-0.02 * new[0], 12.0 * new[1]])
    assert clipped.tolist() == [False, True]


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


# ---------------------------------------------------------------- rows as the service takes them


def row(prompt: int, actions: list[int], seed: int = 0) -> TrainRow:
    """`actions` are the lengths of sampled stretches, with one token of an environment between two of them."""
    random = np.random.default_rng(seed)
    mask = [False] * prompt
    for number, length in enumerate(actions):
        mask += [True] * length + [False] * (number < len(actions) - 1)
    return TrainRow(
        tokens_T=random.integers(0, 50, len(mask)),
        action_T=np.array(mask),
        logprobs_T=random.normal(size=len(mask)),  # numbers at prompt tokens too, which must not get through
        advantages_T=random.normal(size=len(mask)),
    )


@settings(max_examples=30)
@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
def test_each_position_reads_a_token_and_has_the_numbers_of_the_next_one_if_it_is_an_action(
    prompt: int, actions: list[int], seed: int
) -> None:
    source = row(prompt, actions, seed)
    datum = Datum.of(source)
    assert datum.inputs_T.tolist() == source.tokens_T.tolist()[:-1]
    assert datum.targets_T.tolist() == source.tokens_T.tolist()[1:]
    for found_T, given_T in ((datum.logprobs_T, source.logprobs_T), (datum.advantages_T, source.advantages_T)):
        assert found_T.tolist() == (given_T * source.action_T)[1:].tolist()
    factors_N, logprobs_N = np.random.default_rng(seed).normal(size=(2, sum(actions)))
    other = datum.weighted(factors_N, logprobs_N)
    assert other.logprobs_T[datum.action_T] == pytest.approx(logprobs_N)
    assert other.advantages_T[datum.action_T] == pytest.approx(datum.advantages_T[datum.action_T] * factors_N)
    assert not other.logprobs_T[~datum.action_T].any()
    assert not other.advantages_T[~datum.action_T].any()


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (BackendError, {"logprobs_T": np.zeros(3)}),
        (BackendError, {"action_T": np.ones(4, dtype=bool)}),
        (BackendError, {"action_T": np.zeros(4, dtype=bool)}),
        (NonFiniteError, {"logprobs_T": np.array([0.0, 0.0, np.nan, 0.0])}),
        (NonFiniteError, {"advantages_T": np.array([0.0, 0.0, 0.0, np.inf])}),
    ],
)
def test_rows_that_cannot_be_trained_on_are_refused(kind: type[BackendError], change: dict[str, Any]) -> None:
    zeros, action_T = np.zeros(4), np.array([False, False, True, True])
    fields = {"tokens_T": np.arange(4), "action_T": action_T, "logprobs_T": zeros, "advantages_T": zeros}
    check_rows([TrainRow(**fields)])
    with pytest.raises(kind) as caught:
        check_rows([TrainRow(**(fields | change))])
    assert codes_in(caught) == ["tinker.non-finite-row" if kind is NonFiniteError else "tinker.bad-rows"]
