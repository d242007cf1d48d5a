from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, TrainRow
from retrain_local import microbatch
from retrain_local.microbatch import check_rows, micro_batches

CPU = torch.device("cpu")


def row(tokens: list[int], action: list[int], start: float = 0.0) -> TrainRow:
    values_T = start + np.arange(len(tokens), dtype=np.float64)
    action_T = np.array(action, dtype=bool)
    return TrainRow(
        tokens_T=np.array(tokens), action_T=action_T, logprobs_T=-values_T, advantages_T=np.where(action_T, values_T, 0)
    )


@st.composite
def some_rows(draw: st.DrawFn) -> list[TrainRow]:
    rows = []
    for index in range(draw(st.integers(1, 8))):
        tokens = draw(st.lists(st.integers(0, 99), min_size=2, max_size=30))
        action = [0, *draw(st.lists(st.integers(0, 1), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        rows.append(row(tokens, action, start=1000.0 * index))
    return rows


@given(some_rows(), st.sampled_from([None, 1, 2, 7]), st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_every_action_token_appears_once_behind_its_own_past(
    rows: list[TrainRow], parts: int | None, budget: int
) -> None:
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(microbatch.TOKEN_BUDGET, "cpu", budget)
        cut = (
            micro_batches(rows, device=CPU, vocabulary=100, parts=parts) if any(r.action_T.any() for r in rows) else []
        )
    by_start = {int(-r.logprobs_T[0]): r for r in rows}
    for part in cut:
        assert parts is not None or part.ids_BT.shape[0] == 1 or part.ids_BT.numel() <= budget
        for at, column, token, old in zip(
            part.rows_N.tolist(),
            part.columns_N.tolist(),
            part.tokens_N.tolist(),
            part.old_logprobs_N.tolist(),
            strict=True,
        ):
            place = int(-old) % 1000
            source = by_start[int(-old) - place]
            assert column == place - 1
            assert token == source.tokens_T[place]
            assert part.ids_BT[at, :place].tolist() == source.tokens_T[:place].tolist()
            seen.append(-old)
    assert sorted(seen) == sorted(value for r in rows for value in -r.logprobs_T[r.action_T])


def test_wide_vocabularies_are_cut_finer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row([1, 2, 3, 4], [0, 1, 1, 1]) for _ in range(6)]
    monkeypatch.setattr(microbatch, "LOGIT_BUDGET", 700)
    assert len(micro_batches(rows, device=CPU, vocabulary=100)) == 3


def test_rows_without_actions_are_left_out() -> None:
    (part,) = micro_batches([row([1, 2], [0, 0]), row([1, 2], [0, 1])], device=CPU, vocabulary=100)
    assert part.ids_BT.shape == (1, 1)


def broken(**changes: object) -> TrainRow:
    good = {
        "tokens_T": [1, 2, 3],
        "action_T": [False, True, True],
        "logprobs_T": [0, -1, -1],
        "advantages_T": [0, 1, 1],
    }
    return TrainRow(**{name: np.array(value) for name, value in (good | changes).items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_T": [1, 2]}, "differ in length"),
        ({"advantages_T": [0, 1, 1, 1]}, "differ in length"),
        ({"tokens_T": [1, 2, 100]}, "outside the model's 100"),
        ({"tokens_T": [1, -2, 3]}, "outside the model's 100"),
        ({"action_T": [True, True, True]}, "nothing stands before it"),
        ({"logprobs_T": [0, -1, -np.inf]}, "log-probability of token 2 is -inf"),
        ({"logprobs_T": [0, np.nan, -1]}, "log-probability of token 1 is nan"),
        ({"advantages_T": [0, np.inf, 1]}, "advantage of token 1 is inf"),
    ],
)
def test_broken_rows_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        check_rows([broken(), broken(**changes)], 100)


def test_numbers_at_prompt_tokens_do_not_matter() -> None:
    check_rows([broken(logprobs_T=[np.nan, -1, -1])], 100)
