"""Waits of the host, launches and copies, counted for each segment, pack, token and layer.

Each count is the growth between two runs that differ in the number of these only. A change that lowers one lowers the
number here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import pytest

from tests.fake_gpu.conftest import MakeFolder
from tests.kit.fake_gpu.backends import Load, OnCard, on_card

pytestmark = pytest.mark.fake_gpu
SEGMENT = 8  # tokens between two checks for finished rows
WAITS_OF_A_SEGMENT = {"sampling/decode.py Batch.drawn: copy cuda to cpu": 1}
WAITS_OF_A_PACK = {
    "training/packs.py joined: copy cpu to cuda": 7,
    "attention/varlen.py _ends: copy cpu to cuda": 2,
}
# Rows that are picked equally often take two copies, and a pack of other rows has other counts.
MOST_WAITS_OF_PICKS = "attention/packed.py Picks.__init__: copy cpu to cuda", 10
WAITS_OF_A_STEP = {
    "training/trainer.py Trainer._accumulate_own: item": 2,
    "training/trainer.py Trainer._accumulate_own: copy cuda to cpu": 1,
    "training/trainer.py Trainer._update: item": 1,
}
DECODED_LAYER = {"triton _add_norm": 2, "mm": 4, "addmm_": 2} | dict.fromkeys(
    ("triton _heads", "triton attend", "triton _swiglu"), 1
)
LAUNCHES_OF_A_TRAINED_LAYER = 112
# Of each of the four products A and B, which are scaled and rounded.
PUBLISHED_LAYER = {"copy_": 8, "mul": 4, "_to_copy": 4}


def growth(more: Mapping[str, int], fewer: Mapping[str, int], units: int = 1) -> dict[str, float]:
    """Return the counts that differ, by unit."""
    names = sorted({*more, *fewer})
    found = {name: (more.get(name, 0) - fewer.get(name, 0)) / units for name in names}
    return {name: count for name, count in found.items() if count}


def packs_of(card: OnCard, phase: str) -> int:
    return card.gpu.record.operations_in(phase)["triton _softmax"]


def test_the_host_waits_once_a_segment(qwen3: MakeFolder) -> None:
    segments = {"few": 2, "many": 6}
    with on_card(qwen3("tiny")) as card:
        for phase, count in segments.items():
            card.sample(Load(new=SEGMENT * count), phase)
        waits = card.gpu.record.waits_in
        assert growth(waits("many"), waits("few"), units=4) == WAITS_OF_A_SEGMENT


@pytest.mark.slow
def test_more_rows_and_layers_are_no_more_waits(qwen3: MakeFolder) -> None:
    found: list[Counter[str]] = []
    for layers, load in ((2, Load()), (4, Load()), (2, Load(prompts=4, group=8))):
        with on_card(qwen3("tiny", num_hidden_layers=layers)) as card:
            card.step(load)
            found.append(card.gpu.record.waits_in("sample", "train", "publish"))
    assert found[0] == found[1] == found[2]


def test_the_host_waits_for_each_pack(qwen3: MakeFolder) -> None:
    waits, packs = [], []
    for most in (1000, 64):
        with on_card(qwen3("tiny"), options={"micro_batch_tokens": most}) as card:
            card.train(Load())
            waits.append(card.gpu.record.waits_in("train"))
            packs.append(packs_of(card, "train"))
    assert packs == [1, 6]
    name, most = MOST_WAITS_OF_PICKS
    assert waits[0].pop(name) <= most
    assert waits[1].pop(name) <= most * 6
    assert waits[0] == WAITS_OF_A_PACK | WAITS_OF_A_STEP
    assert growth(waits[1], waits[0], units=5) == WAITS_OF_A_PACK


@pytest.mark.parametrize("what", ["logprobs", "reference_logprobs", "top_logprobs"])
def test_log_probabilities_are_read_once_a_pack(qwen3: MakeFolder, what: str) -> None:
    with on_card(qwen3("tiny"), options={"micro_batch_tokens": 64}) as card:
        compute = getattr(card.backend, what)
        compute = partial(compute, top=3) if what == "top_logprobs" else compute
        card.gpu.phase = what
        compute(Load().rows(card.vocabulary), 0.9)
        waits = card.gpu.record.waits_in(what)
        reads = {name: count for name, count in waits.items() if "cpu to cuda" not in name}
        assert list(reads.values()) == [6]


def test_launches_of_a_token_and_of_a_layer(qwen3: MakeFolder) -> None:
    captured, trained, published = [], [], []
    for layers in (2, 4):
        with on_card(qwen3("tiny", num_hidden_layers=layers)) as card:
            card.step()
            card.step(step=1)
            card.train(Load(), "second", step=2)  # the first one makes the moments
            record = card.gpu.record
            captured.append(record.captured[-1])
            trained.append(record.operations_in("second"))
            published.append(record.operations_in("publish"))
    assert growth(captured[1], captured[0], units=2) == DECODED_LAYER
    assert growth(published[1], published[0], units=2 * 2) == PUBLISHED_LAYER
    assert sum(growth(trained[1], trained[0], units=2).values()) == LAUNCHES_OF_A_TRAINED_LAYER


def test_a_shared_prompt_is_one_more_launch_a_layer(qwen3: MakeFolder) -> None:
    captured = []
    for layers in (2, 4):
        with on_card(qwen3("tiny", num_hidden_layers=layers)) as card:
            card.sample(Load(prompts=2, group=16, prompt=300, new=SEGMENT))
            (graph,) = card.gpu.record.captured
            captured.append(graph)
            assert not card.faults()
    # so few rows cut their keys into stretches, which are joined
    assert growth(captured[1], captured[0], units=2) == DECODED_LAYER | {"triton attend": 2, "triton join": 1}


def test_publishing_waits_for_nothing(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        card.step()
        assert not card.gpu.record.waits_in("publish")


def test_a_graph_is_captured_once_for_each_size(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        for step in range(3):
            card.step(step=step)
        sizes = len(card.gpu.record.captured)
        for step in range(3, 6):
            card.step(step=step)
        assert len(card.gpu.record.captured) == sizes
        assert card.gpu.record.replays == 6 * 24
        assert not card.faults()
