from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import BackendError, NonFiniteError, TrainRow
from retrain_tinker.losses import Datum, Reduction, check_rows, scales


def row(prompt: int, actions: list[int], seed: int = 0) -> TrainRow:
    """`actions` are the lengths of stretches that the policy sampled, with one token of somebody else after each."""
    random = np.random.default_rng(seed)
    mask = [False] * prompt
    for number, length in enumerate(actions):
        mask += [True] * length + [False] * (number < len(actions) - 1)
    action_T = np.array(mask)
    return TrainRow(
        tokens_T=random.integers(0, 50, len(mask)),
        action_T=action_T,
        logprobs_T=random.normal(size=len(mask)),  # numbers at prompt tokens too, which must not get through
        advantages_T=random.normal(size=len(mask)),
    )


def test_a_datum_reads_a_token_and_predicts_the_next_one() -> None:
    datum = Datum.of(
        TrainRow(
            tokens_T=np.array([7, 8, 9, 2]),
            action_T=np.array([False, False, True, True]),
            logprobs_T=np.array([0.0, 0.0, -0.5, -0.25]),
            advantages_T=np.array([0.0, 0.0, 1.0, -2.0]),
        )
    )
    assert datum.inputs_T.tolist() == [7, 8, 9]
    assert datum.targets_T.tolist() == [8, 9, 2]
    assert datum.logprobs_T.tolist() == [0.0, -0.5, -0.25]
    assert datum.advantages_T.tolist() == [0.0, 1.0, -2.0]


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(0, 99))
def test_every_action_keeps_its_own_numbers_and_nothing_else_gets_through(
    prompt: int, actions: list[int], seed: int
) -> None:
    given_row = row(prompt, actions, seed)
    datum = Datum.of(given_row)
    assert len(datum.inputs_T) == len(datum.targets_T) == len(given_row.tokens_T) - 1
    for position in range(len(given_row.tokens_T)):
        if given_row.action_T[position]:
            at = position - 1
            assert datum.inputs_T[at] == given_row.tokens_T[position - 1]
            assert datum.targets_T[at] == given_row.tokens_T[position]
            assert datum.logprobs_T[at] == given_row.logprobs_T[position]
            assert datum.advantages_T[at] == given_row.advantages_T[position]
    assert not datum.logprobs_T[~datum.action_T].any()
    assert not datum.advantages_T[~datum.action_T].any()


@pytest.mark.parametrize("reduction", ["token_sum", "sequence_mean"])
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


def test_weighting_touches_action_tokens_alone() -> None:
    datum = Datum.of(row(2, [2, 1]))
    other = datum.weighted(np.array([2.0, 3.0, 4.0]), np.array([-1.0, -2.0, -3.0]))
    assert other.logprobs_T[datum.action_T].tolist() == [-1.0, -2.0, -3.0]
    assert other.advantages_T[datum.action_T] == pytest.approx(datum.advantages_T[datum.action_T] * [2.0, 3.0, 4.0])
    assert not other.logprobs_T[~datum.action_T].any()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"logprobs_T": np.zeros(3)}, BackendError, "differ in length"),
        ({"action_T": np.array([True, True, True, True])}, BackendError, "no token precedes its first action"),
        ({"action_T": np.zeros(4, dtype=bool)}, BackendError, "no row of the batch has an action"),
        ({"logprobs_T": np.array([0.0, 0.0, np.nan, 0.0])}, NonFiniteError, "log-probability of token 2 is nan"),
        ({"advantages_T": np.array([0.0, 0.0, 0.0, np.inf])}, NonFiniteError, "advantage of token 3 is inf"),
    ],
)
def test_rows_that_would_train_nonsense_are_refused(change: dict[str, object], kind: type, words: str) -> None:
    fields = {
        "tokens_T": np.arange(4),
        "action_T": np.array([False, False, True, True]),
        "logprobs_T": np.zeros(4),
        "advantages_T": np.zeros(4),
    }
    with pytest.raises(kind, match=words):
        check_rows([TrainRow(**(fields | change))])  # type: ignore[arg-type]
