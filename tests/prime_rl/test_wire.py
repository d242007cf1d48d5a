"""Batches that are sent here arrive in PRIME-RL's own types, field by field, and are padded as it pads."""

from __future__ import annotations

import numpy as np
import pytest

from retrain.api import TrainBatch, TrainRow
from retrain_prime_rl.packing import Layout, encode, pack
from tests.prime_rl.checkout import NEEDS_CHECKOUT, theirs

TYPES = ("prime_rl.transports.rollouts.types", "prime_rl.transport.types")  # the latter before v0.8.1.dev44

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]


def make_batch(lengths: tuple[int, ...]) -> TrainBatch:
    """Rows whose second half was sampled, with an advantage for each token."""
    stream = np.random.default_rng(0)
    rows = []
    for length in lengths:
        action_T = np.arange(length) >= length // 2
        rows.append(
            TrainRow(
                tokens_T=stream.integers(2, 60, length),
                action_T=action_T,
                logprobs_T=np.where(action_T, -stream.exponential(size=length), 0.0),
                advantages_T=np.where(action_T, stream.normal(size=length), 0.0),
            )
        )
    return TrainBatch(step=0, rows=tuple(rows), temperature=0.7)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("padding", [1, 8])
def test_every_field_arrives_in_their_type(ranks, padding):
    msgspec, types = theirs("msgspec"), theirs(*TYPES)
    layout = Layout(seq_len=24, ranks=ranks, pad_to_multiple_of=padding)
    sent = pack(make_batch((6, 9, 5, 11, 7)), layout)
    for ours in sent:
        arrived = msgspec.msgpack.decode(encode(ours), type=list[types.MicroBatch])
        assert [msgspec.structs.asdict(each) for each in arrived] == [msgspec.structs.asdict(each) for each in ours]
        assert msgspec.msgpack.encode(arrived) == encode(ours)


def test_padding_is_theirs():
    msgspec, types = theirs("msgspec"), theirs(*TYPES)
    batch = make_batch((6, 9, 5, 11, 7))
    ((*plain,),) = pack(batch, Layout(seq_len=64))
    ((*padded,),) = pack(batch, Layout(seq_len=64, pad_to_multiple_of=8))
    for ours, bare in zip(padded, plain, strict=True):
        arrived = msgspec.msgpack.decode(encode([bare]), type=list[types.MicroBatch])[0]
        by_them = theirs("prime_rl.trainer.batch").pad_micro_batch(arrived, 8)
        assert len(by_them.input_ids) % 8 == 0
        assert msgspec.structs.asdict(ours) == msgspec.structs.asdict(by_them)
