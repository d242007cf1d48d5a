"""The wire types against what PRIME-RL 0.8.0 itself has written."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from retrain.api import TrainBatch, TrainRow
from retrain_prime_rl.packing import (
    Layout,
    MicroBatch,
    ScalarBatch,
    ScalarSample,
    encode,
    pack,
)
from tests.prime_rl_stack.wire_check import FIELDS

FIXTURES = Path(__file__).parent / "fixtures"
RANKS = [(FIXTURES / f"rank_{rank}.bin").read_bytes() for rank in (0, 1)]
ROWS = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))["rows"]

decode_micro_batches = partial(msgspec.msgpack.decode, type=list[MicroBatch])
decode_scalar_batch = partial(msgspec.msgpack.decode, type=ScalarBatch)


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


@pytest.mark.parametrize("payload", RANKS, ids=["rank_0", "rank_1"])
def test_what_prime_rl_wrote_decodes_and_encodes_byte_for_byte(payload):
    assert encode(decode_micro_batches(payload)) == payload


@pytest.mark.parametrize(("rank", "numbers", "name"), [(0, [0, 1], "math"), (1, [2], "game")])
def test_our_packing_of_the_same_rows_is_byte_for_byte_what_prime_rl_wrote(rank, numbers, name):
    batch = TrainBatch(step=0, rows=train_rows(numbers), temperature=ROWS[numbers[0]]["T"])
    (micro_batches,) = pack(batch, Layout(seq_len=10, env_name=name))
    assert encode(micro_batches) == RANKS[rank]


def test_the_three_rows_go_to_the_ranks_that_prime_rl_gave_them():
    batch = TrainBatch(step=0, rows=train_rows([0, 1, 2]), temperature=0.7)
    grid = pack(batch, Layout(seq_len=10, ranks=2))
    theirs = [decode_micro_batches(payload) for payload in RANKS]
    assert [[part.input_ids for part in rank] for rank in grid] == [[p.input_ids for p in rank] for rank in theirs]


def test_the_fields_stand_in_the_order_of_the_description():
    assert tuple(field.name for field in msgspec.structs.fields(MicroBatch)) == FIELDS
    assert len(msgspec.msgpack.decode(RANKS[0])[0]) == len(FIELDS)


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_torn_payload_is_no_batch(cut):
    with pytest.raises(msgspec.DecodeError):
        decode_micro_batches(RANKS[0][:-cut])


def test_a_batch_of_the_older_wire_is_no_micro_batch():
    sample = ScalarSample([1], [False], [2], [True], [-0.5], [1.0], advantage=0.5)
    payload = encode(ScalarBatch(examples=[sample], step=3))
    assert decode_scalar_batch(payload).examples[0].advantage == 0.5
    assert msgspec.msgpack.decode(payload) == [[[[1], [False], [2], [True], [-0.5], [1.0], None, 0.5]], 3]
    with pytest.raises(msgspec.ValidationError):
        decode_micro_batches(payload)
