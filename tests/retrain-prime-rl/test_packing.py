"""Packing: nothing lost, nothing twice, every rank the same number, and the bytes that PRIME-RL 0.8.0 has written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import BackendError, NonFiniteError, TrainBatch, TrainRow
from retrain_prime_rl.packing import (
    Layout,
    MicroBatch,
    ScalarBatch,
    ScalarSample,
    encode,
    pack,
    partition,
    scalar_batch,
)
from tests.prime_rl_stack.wire_check import FIELDS, is_filler, read, rows_of

SEQ_LEN = 32
FIXTURES = Path(__file__).parent / "fixtures"
RANKS = [(FIXTURES / f"rank_{rank}.bin").read_bytes() for rank in (0, 1)]
ROWS = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))["rows"]
decode_micro_batches = partial(msgspec.msgpack.decode, type=list[MicroBatch])


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
def test_every_row_arrives_once_and_whole_and_every_rank_gets_as_many_micro_batches(batch, layout):
    grid = [read(encode(part), seq_len=layout.seq_len) for part in pack(batch, layout)]
    parts = [part for rank in grid for part in rank]
    arrived = [row for part in parts for row in rows_of(part) if any(row.mask)]
    assert sorted(row.tokens[0] for row in arrived) == [100 * number for number in range(len(batch.rows))]
    for got in arrived:
        row = batch.rows[got.tokens[0] // 100]
        assert got.tokens == row.tokens_T.tolist()
        assert got.mask == row.action_T.tolist()
        assert got.advantages == row.advantages_T.tolist()
        assert got.logprobs == row.logprobs_T.tolist()
        assert got.temperature == batch.temperature
    assert all(len(part["input_ids"]) % layout.pad_to_multiple_of == 0 for part in parts)
    assert sum(sum(part["loss_mask"]) for part in parts) == batch.num_actions, "padding counts nowhere"
    assert len({len(rank) for rank in grid}) == 1
    fillers = [part for part in parts if is_filler(part)]
    assert len(fillers) < layout.ranks
    if len(batch.rows) >= layout.ranks:
        assert all(any(not is_filler(part) for part in rank) for rank in grid)
    if fillers:
        assert len(batch.rows) < len(parts)
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
    lengths = [int(n) for n in np.random.default_rng(0).integers(100, 2000, size=2000)]
    assert len(partition(lengths, capacity=8192, multiple_of=8)) <= 1.1 * sum(lengths) / 8192 + 8


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


def train_rows(numbers: list[int]) -> tuple[TrainRow, ...]:
    return tuple(
        TrainRow(
            tokens_T=np.array(ROWS[number]["tokens"]),
            action_T=np.array(ROWS[number]["action"], dtype=bool),
            logprobs_T=np.array(ROWS[number]["logprobs"], dtype=float),
            advantages_T=np.array(ROWS[number]["adv"], dtype=float),
        )
        for number in numbers
    )


@pytest.mark.parametrize(("rank", "numbers", "name"), [(0, [0, 1], "math"), (1, [2], "game")])
def test_our_packing_of_the_same_rows_is_byte_for_byte_what_prime_rl_wrote(rank, numbers, name):
    batch = TrainBatch(step=0, rows=train_rows(numbers), temperature=ROWS[numbers[0]]["T"])
    (micro_batches,) = pack(batch, Layout(seq_len=10, env_name=name))
    assert encode(micro_batches) == RANKS[rank]


def test_the_three_rows_go_to_the_ranks_and_fields_that_prime_rl_gave_them():
    batch = TrainBatch(step=0, rows=train_rows([0, 1, 2]), temperature=0.7)
    grid = pack(batch, Layout(seq_len=10, ranks=2))
    theirs = [decode_micro_batches(payload) for payload in RANKS]
    assert [encode(part) for part in theirs] == RANKS
    assert [[part.input_ids for part in rank] for rank in grid] == [[p.input_ids for p in rank] for rank in theirs]
    assert tuple(field.name for field in msgspec.structs.fields(MicroBatch)) == FIELDS
    assert len(msgspec.msgpack.decode(RANKS[0])[0]) == len(FIELDS)
    for cut in (1, 40, 200):  # a torn payload
        with pytest.raises(msgspec.DecodeError):
            decode_micro_batches(RANKS[0][:-cut])


# ---------------------------------------------------------------- the older wire: one advantage per sample


def test_a_batch_of_the_older_wire_is_no_micro_batch():
    sample = ScalarSample([1], [False], [2], [True], [-0.5], [1.0], advantage=0.5)
    payload = encode(ScalarBatch(examples=[sample], step=3))
    assert msgspec.msgpack.decode(payload, type=ScalarBatch).examples[0].advantage == 0.5
    assert msgspec.msgpack.decode(payload) == [[[[1], [False], [2], [True], [-0.5], [1.0], None, 0.5]], 3]
    with pytest.raises(msgspec.ValidationError):
        decode_micro_batches(payload)


def test_prompt_and_completion_are_cut_before_the_first_action(make_batch):
    batch = make_batch([6, 9], varying=False)
    sent = scalar_batch(batch, step=4, seq_len=32)
    assert sent.step == 4
    for row, sample in zip(batch.rows, sent.examples, strict=True):
        assert sample.prompt_ids + sample.completion_ids == row.tokens_T.tolist()
        assert not any(sample.prompt_mask)
        assert all(sample.completion_mask)
        assert sample.completion_logprobs == row.logprobs_T[row.action_T].tolist()
        assert sample.completion_temperatures == [0.7] * len(sample.completion_ids)
        assert sample.advantage == 0.5


def test_tokens_of_an_environment_are_masked_inside_the_completion():
    action_T = np.array([False, True, True, False, True])
    row = TrainRow(
        tokens_T=np.array([51, 61, 62, 52, 63]),
        action_T=action_T,
        logprobs_T=np.array([0.0, -0.5, -0.25, -9.0, -1.0]),
        advantages_T=np.where(action_T, -1.5, 0.0),
    )
    (sample,) = scalar_batch(TrainBatch(step=0, rows=(row,), temperature=1.0), step=0, seq_len=8).examples
    assert sample.completion_mask == [True, True, False, True]
    assert sample.completion_logprobs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.advantage == -1.5


def test_the_older_wire_refuses_credit_that_varies_a_row_that_would_be_cut_and_bad_numbers(make_batch):
    with pytest.raises(BackendError, match=r"(?s)row 0.*wire = \"per_token\""):
        scalar_batch(make_batch([6, 6]), step=0, seq_len=32)
    with pytest.raises(BackendError, match="would truncate it"):
        scalar_batch(make_batch([6, 9], varying=False), step=0, seq_len=8)
    batch = make_batch([6], varying=False)
    rounded = replace(batch.rows[0], advantages_T=batch.rows[0].advantages_T + np.array([0, 0, 0, 0, 0, 5e-7]))
    assert scalar_batch(replace(batch, rows=(rounded,)), step=0, seq_len=8).examples[0].advantage == 0.5
    row = replace(batch.rows[0], logprobs_T=np.full(6, np.nan))
    with pytest.raises(NonFiniteError):
        scalar_batch(replace(batch, rows=(row,)), step=0, seq_len=8)
