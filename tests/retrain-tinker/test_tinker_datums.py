from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, NonFiniteError, TrainRow
from retrain_tinker.losses import Datum, Reduction, check_rows, scales
from tests.kit.problems import codes_in


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


@pytest.mark.parametrize("reduction", ["token_sum", "sequence_mean"])
@settings(max_examples=30)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6), seed=st.integers(0, 99)
)
def test_scaled_advantages_give_the_mean_over_action_tokens(
    reduction: Reduction, shapes: list[tuple[int, int]], seed: int
) -> None:
    rows = [row(prompt, [actions], seed + i) for i, (prompt, actions) in enumerate(shapes)]
    datums = [Datum.of(each) for each in rows]
    wanted = np.concatenate([each.advantages_T[each.action_T] for each in rows]).mean()
    actions = [sum(int(each.action_T.sum()) for each in rows)] * len(rows)
    per_row = [d.advantages_T * factor for d, factor in zip(datums, scales(datums, reduction, actions), strict=True)]
    found = sum(t.sum() for t in per_row) if reduction == "token_sum" else np.mean([t.mean() for t in per_row])
    assert found == pytest.approx(wanted, abs=1e-12)


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
