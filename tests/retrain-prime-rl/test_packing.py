"""Packing: nothing lost, nothing twice, every rank the same number, always the same result."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import BackendError, NonFiniteError, TrainBatch, TrainRow
from retrain_prime_rl.packing import Layout, encode, pack, partition
from tests.prime_rl_stack.wire_check import is_filler, read, rows_of

SEQ_LEN = 32


@st.composite
def batches(draw: st.DrawFn) -> TrainBatch:
    """Rows of any length and any action mask, with numbers that tell every token from every other."""
    rows = []
    for number, length in enumerate(draw(st.lists(st.integers(2, SEQ_LEN), min_size=1, max_size=40))):
        action_T = np.array(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        action_T[0], action_T[-1] = False, True
        places_T = 100.0 * number + np.arange(length)
        rows.append(
            TrainRow(
                tokens_T=places_T.astype(np.int64),
                action_T=action_T,
                logprobs_T=np.where(action_T, -1e-4 * (1 + places_T), 0.0),
                advantages_T=np.where(action_T, 1 + places_T, 0.0),
            )
        )
    return TrainBatch(step=0, rows=tuple(rows), temperature=draw(st.sampled_from([0.5, 0.7, 1.0])))


layouts = st.builds(
    Layout,
    seq_len=st.sampled_from([SEQ_LEN, 2 * SEQ_LEN, 8 * SEQ_LEN]),
    ranks=st.integers(1, 5),
    pad_to_multiple_of=st.sampled_from([1, 2, 8, 32]),
)


@given(batches(), layouts)
def test_every_row_arrives_exactly_once_and_whole(batch, layout):
    grid = [read(encode(part), seq_len=layout.seq_len) for part in pack(batch, layout)]
    arrived = [row for rank in grid for part in rank for row in rows_of(part) if any(row.mask)]
    assert sorted(row.tokens[0] for row in arrived) == [100 * number for number in range(len(batch.rows))]
    for got in arrived:
        row = batch.rows[got.tokens[0] // 100]
        assert got.tokens == row.tokens_T.tolist()
        assert got.mask == row.action_T.tolist()
        assert got.advantages == row.advantages_T.tolist()
        assert got.logprobs == row.logprobs_T.tolist()
        assert got.temperature == batch.temperature


@given(batches(), layouts)
def test_every_rank_gets_as_many_micro_batches_and_fillers_only_where_rows_are_few(batch, layout):
    grid = [read(encode(part), seq_len=layout.seq_len) for part in pack(batch, layout)]
    assert len({len(rank) for rank in grid}) == 1
    fillers = [part for rank in grid for part in rank if is_filler(part)]
    assert len(fillers) < layout.ranks
    if len(batch.rows) >= layout.ranks:
        assert all(any(not is_filler(part) for part in rank) for rank in grid)
    if fillers:
        assert len(batch.rows) < sum(len(rank) for rank in grid)


@given(batches(), layouts)
def test_lengths_are_multiples_of_the_padding_and_padding_counts_nowhere(batch, layout):
    grid = [read(encode(part), seq_len=layout.seq_len) for part in pack(batch, layout)]
    parts = [part for rank in grid for part in rank]
    assert all(len(part["input_ids"]) % layout.pad_to_multiple_of == 0 for part in parts)
    assert sum(sum(part["loss_mask"]) for part in parts) == batch.num_actions


@given(batches(), layouts)
def test_packing_the_same_rows_again_gives_the_same_bytes(batch, layout):
    again = TrainBatch(step=7, rows=batch.rows, temperature=batch.temperature)
    assert [encode(part) for part in pack(batch, layout)] == [encode(part) for part in pack(again, layout)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 6))
def test_bins_hold_every_place_once_and_are_not_many_more_than_needed(lengths, ranks):
    bins = partition(lengths, capacity=50, multiple_of=ranks)
    assert sorted(place for part in bins for place in part) == list(range(len(lengths)))
    assert max(sum(lengths[place] for place in part) for part in bins) <= 50
    assert len(bins) % ranks == 0
    # two of the fullest-first bins that could be one would mean twice the lower bound
    assert len(bins) <= 2 * -(-sum(lengths) // 50) + ranks
    assert all(not part for part in bins[sum(bool(part) for part in bins) :])


def test_the_load_is_shared_out_evenly(make_batch):
    batch = make_batch([12, 11, 9, 8, 8, 6, 5, 5])
    grid = pack(batch, Layout(seq_len=64, ranks=4))
    assert sorted(sum(len(part.input_ids) for part in rank) for rank in grid) == [15, 16, 16, 17]


def test_many_rows_are_packed_in_reasonable_work(make_batch):
    lengths = [int(n) for n in np.random.default_rng(0).integers(100, 2000, size=2000)]
    bins = partition(lengths, capacity=8192, multiple_of=8)
    assert len(bins) <= 1.1 * sum(lengths) / 8192 + 8


def test_a_row_that_does_not_fit_is_refused_with_the_way_out(make_batch):
    with pytest.raises(BackendError) as caught:
        pack(make_batch([4, 33]), Layout(seq_len=32))
    assert "33 tokens" in str(caught.value)
    assert "seq_len" in str(caught.value)


@pytest.mark.parametrize("field", ["logprobs_T", "advantages_T"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_none_is_never_sent(make_batch, field, value):
    batch = make_batch([6, 6])
    numbers = getattr(batch.rows[1], field).copy()
    numbers[-1] = value
    rows = (batch.rows[0], replace(batch.rows[1], **{field: numbers}))
    with pytest.raises(NonFiniteError, match="row 1"):
        pack(replace(batch, rows=rows), Layout(seq_len=32))


def test_what_stands_outside_of_actions_does_not_travel(make_batch):
    batch = make_batch([6])
    row = replace(batch.rows[0], logprobs_T=np.full(6, -1.0), advantages_T=np.full(6, 2.0))
    ((part,),) = pack(replace(batch, rows=(row,)), Layout(seq_len=8))
    outside = [n for n, is_action in enumerate(row.action_T) if not is_action]
    assert [part.advantages[n] for n in outside] == [part.inference_logprobs[n] for n in outside] == [0.0] * 3
