from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, TrainRow
from retrain_local.training.packs import Pack, check_rows, pack_rows, share_rows
from tests.kit.problems import codes_in

CPU = torch.device("cpu")


def row(tokens: list[int], action: list[int], start: float = 0.0) -> TrainRow:
    values_T = start + np.arange(len(tokens), dtype=np.float64)
    action_T = np.array(action, dtype=bool)
    return TrainRow(
        tokens_T=np.array(tokens), action_T=action_T, logprobs_T=-values_T, advantages_T=np.where(action_T, values_T, 0)
    )


@st.composite
def some_rows(draw: st.DrawFn) -> list[TrainRow]:
    """Groups that share a prompt, followed by actions and, in between, tokens of an environment."""
    rows: list[TrainRow] = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=9))
        for _ in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
            tokens = [*prompt, *(draw(st.integers(0, 99)) for _ in rest)]
            rows.append(row(tokens, [0] * len(prompt) + rest, start=1000.0 * len(rows)))
    return rows


def past(pack: Pack, place: int) -> list[int]:
    """The tokens that the one at `place` of the packed row sees, in the order of their positions."""
    spans = pack.spans
    own = next(s for s in range(len(spans.lengths)) if spans.starts[s] <= place < spans.starts[s + 1])
    prefix = spans.prefixes[own]
    before = pack.ids_N[spans.starts[prefix] : spans.starts[prefix + 1]].tolist() if prefix >= 0 else []
    return [*before, *pack.ids_N[spans.starts[own] : place + 1].tolist()]


@given(some_rows(), st.integers(1, 120), st.booleans())
@settings(max_examples=50, deadline=None)
def test_every_action_token_appears_once_behind_its_own_past(rows: list[TrainRow], budget: int, share: bool) -> None:
    seen: list[float] = []
    for pack in pack_rows(rows, device=CPU, max_tokens=budget, share=share):
        assert pack.spans.num_tokens == len(pack.ids_N) == len(pack.positions_N)
        assert pack.spans.num_tokens <= budget or len(pack.rows) == 1
        for place, token, old, credit in zip(
            pack.sources.index_M.tolist(),
            pack.tokens_M.tolist(),
            pack.behaviour_logprobs_M.tolist(),
            pack.advantages_M.tolist(),
            strict=True,
        ):
            number, at = divmod(round(-old), 1000)
            assert number in pack.rows
            assert token == rows[number].tokens_T[at]
            assert past(pack, place) == rows[number].tokens_T[:at].tolist()
            assert pack.positions_N[place] == at - 1
            assert credit == -old
            seen.append(-old)
    wanted = [1000.0 * n + at for n, r in enumerate(rows) for at in np.flatnonzero(r.action_T).tolist()]
    assert sorted(seen) == wanted


def test_a_prompt_stands_once_in_a_pack_and_what_is_not_learned_from_is_left_out() -> None:
    def packed(rows: list[TrainRow], max_tokens: int = 100, share: bool = True) -> list[Pack]:
        return pack_rows(rows, device=CPU, max_tokens=max_tokens, share=share)

    group = [row([1, 2, 3, n, n], [0, 0, 0, 1, 1]) for n in range(4, 8)]
    (pack,) = packed(group)
    assert (pack.spans.lengths, pack.spans.prefixes) == ((3, 1, 1, 1, 1), (-1, 0, 0, 0, 0))
    (apart,) = packed(group, share=False)
    assert apart.spans.lengths == (4, 4, 4, 4)
    first, second = packed(group, max_tokens=5)
    assert first.spans.lengths == second.spans.lengths == (3, 1, 1), "a group that is cut has its prompt in each pack"
    assert (first.rows, second.rows) == ((0, 1), (2, 3))
    (pack,) = packed([row([1, 2, 9], [0, 0, 1]), row([1, 2, 8], [0, 0, 1])])
    assert pack.spans.lengths == (2,), "a row whose only action is its first has no segment"
    assert (pack.sources.index_M.tolist(), sorted(pack.tokens_M.tolist())) == ([1, 1], [8, 9])
    rows = [row([1, 2], [0, 0]), row([1, 2, 3, 4, 5], [0, 1, 0, 0, 0])]
    (pack,) = packed(rows)
    assert (pack.ids_N.tolist(), pack.rows) == ([1], (1,)), "without actions, and behind the last one"
    assert packed(rows[:1]) == []


def broken(**changes: object) -> TrainRow:
    good = {
        "tokens_T": [1, 2, 3],
        "action_T": [False, True, True],
        "logprobs_T": [0, -1, -1],
        "advantages_T": [0, 1, 1],
    }
    return TrainRow(**{name: np.array(value) for name, value in (good | changes).items()})


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"tokens_T": [1, 2]}, "lengths", "differ in length"),
        ({"advantages_T": [0, 1, 1, 1]}, "lengths", "differ in length"),
        ({"engine_logprobs_T": [0, 1]}, "lengths", "differ in length"),
        ({"tokens_T": [1, 2, 100]}, "unknown-token", "100"),
        ({"tokens_T": [1, -2, 3]}, "unknown-token", "100"),
        ({"action_T": [True, True, True]}, "first-action", "its first token"),
        ({"logprobs_T": [0, -1, -np.inf]}, "non-finite", "the log-probability of token 2 is -inf"),
        ({"logprobs_T": [0, np.nan, -1]}, "non-finite", "the log-probability of token 1 is nan"),
        ({"advantages_T": [0, np.inf, 1]}, "non-finite", "advantage of token 1 is inf"),
        ({"engine_logprobs_T": [0, np.nan, 1]}, "non-finite", "engine's log-probability of token 1 is nan"),
        ({"reference_logprobs_T": [0, -1, np.nan]}, "non-finite", "reference's log-probability of token 2 is nan"),
        ({"reference_logprobs_T": [0, -1], "kl_coef": 0.1}, "no-reference", "reference"),
        ({"kl_coef": 0.1}, "no-reference", "reference"),
    ],
)
def test_broken_rows_are_named(changes: dict[str, object], code: str, named: str) -> None:
    with pytest.raises(BackendError, match=f"row 1.*{named}") as caught:
        check_rows([broken(), broken(**changes)], 100)
    assert codes_in(caught) == [f"backend.row-{code}"]
    check_rows([broken(logprobs_T=[np.nan, -1, -1])], 100)  # numbers at prompt tokens do not matter


@given(some_rows(), st.integers(1, 120), st.sampled_from([1, 2, 3]))
@settings(max_examples=40, deadline=None)
def test_packs_are_about_as_large_as_each_other(rows: list[TrainRow], budget: int, multiple: int) -> None:
    packs = pack_rows(rows, device=CPU, max_tokens=budget, multiple=multiple)
    fewest = pack_rows(rows, device=CPU, max_tokens=budget)
    assert len(fewest) <= len(packs) <= -(-len(fewest) // multiple) * multiple
    largest = max((pack.spans.num_tokens for pack in packs), default=0)
    if len(packs) > 1 and largest > 1:
        smaller = pack_rows(rows, device=CPU, max_tokens=largest - 1)
        wanted = -(-len(fewest) // multiple) * multiple
        assert len(smaller) > wanted or max(pack.spans.num_tokens for pack in smaller) == largest


def counted(prompt: int, actions: int, first: int = 0) -> TrainRow:
    """A prompt that begins with the token `first`, and so many sampled tokens."""
    return row([first, *[0] * (prompt + actions - 1)], [0] * prompt + [1] * actions)


def cost(rows: list[TrainRow], share: list[int]) -> int:
    """Tokens that a rank computes: every prompt once."""
    prompts = {rows[n].tokens_T[: int(np.argmax(rows[n].action_T))].tobytes() for n in share}
    return sum(len(p) // 8 for p in prompts) + sum(int(rows[n].action_T.sum()) for n in share)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_computed_once_and_tokens_are_balanced(size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [
        counted(int(prompt), int(actions), first=group)
        for group, prompt in enumerate(rng.integers(5, 40, 12))
        for actions in rng.integers(1, 60, rng.integers(1, 9))
    ]
    shares = share_rows(rows, size)
    assert sorted(n for share in shares for n in share) == list(range(len(rows)))
    costs = [cost(rows, share) for share in shares]
    longest = max(len(each.tokens_T) for each in rows)
    assert max(costs) <= sum(costs) / size + longest


def test_a_prompt_stays_on_one_rank_where_that_is_even_and_ranks_may_have_no_rows() -> None:
    rows = [counted(30, 10, first=group) for group in (0, 1) for _ in range(4)]
    assert sorted(map(sorted, share_rows(rows, 2))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert share_rows([counted(3, 2)], 3) == [[0], [], []]
    assert share_rows([counted(3, 0), counted(3, 2)], 2) == [[1], []], "a row without an action is on no rank"
    assert share_rows([], 2) == [[], []]
