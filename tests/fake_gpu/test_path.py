"""A step on the CUDA path: kernels pass their trial, decoding is a captured graph, nothing is mixed up."""

from __future__ import annotations

import logging

import pytest

from tests.fake_gpu.conftest import MakeFolder, warnings_of
from tests.kit.fake_gpu.backends import Load, on_card
from tests.kit.fake_gpu.specialisation import specialisations

pytestmark = pytest.mark.fake_gpu
DECODED = {"attend", "_heads", "_swiglu", "_add_norm", "_measure", "_choose"}
# Rows in numbers of every kind, whose keys are in one stretch or in several.
SAMPLED = (
    Load(prompts=8, group=16, prompt=256, new=16),
    Load(prompts=1, group=8, prompt=300, new=8),
    Load(prompts=1, group=1),
)
TRAINED = {"_softmax", "_add_norm", "_rms_norm_back", "_turn_heads", "_turn_heads_back", "_swiglu", "_gates_back"}


def test_a_step_runs_through_graphs_and_kernels(qwen3: MakeFolder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="retrain"), on_card(qwen3("tiny")) as card:
        for step in range(2):
            card.step(Load(new=24), step=step)
        record = card.gpu.record
        kernels = {
            phase: {launch.name for launch in record.launches if launch.phase == phase} for phase in ("sample", "train")
        }
        assert kernels["sample"] >= DECODED
        assert kernels["train"] >= TRAINED
        assert record.replays == 2 * 24  # one for each token of a row
        assert not card.faults()
    assert not warnings_of(caplog)


@pytest.mark.parametrize("rank", [4, 8])
def test_rows_of_stacked_products_are_aligned_at_small_ranks(qwen3: MakeFolder, rank: int) -> None:
    with on_card(qwen3("tiny"), rank=rank) as card:
        card.sample(Load())
        used = specialisations(launch for launch in card.gpu.record.launches if launch.phase == "sample")
        strides = {name for each in used for name in each.unaligned() if name in ("y_row", "inner_row")}
        assert not strides


@pytest.mark.parametrize("kernel", ["attend", "join", "_heads", "_swiglu", "_measure", "_choose"])
def test_a_kernel_that_runs_has_been_compared(qwen3: MakeFolder, kernel: str) -> None:
    with on_card(qwen3("4B", num_hidden_layers=1)) as card:
        for load in SAMPLED:
            card.sample(load)
    launches = [each for each in card.gpu.record.launches if each.name == kernel]
    compared, used = (
        set(specialisations(each for each in launches if each.phase == phase)) for phase in ("start", "sample")
    )
    assert used
    assert used <= compared
