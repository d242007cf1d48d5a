"""Every mode of backend `local` on the CUDA path: no fault, no warning, and graphs that are replayed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import EntropyTable, TeacherTable
from retrain_local.teacher import open_teacher
from tests.fake_gpu.conftest import MakeFolder, warnings_of
from tests.kit.fake_gpu.backends import Load, on_card
from tests.kit.local_backend import Local

pytestmark = pytest.mark.fake_gpu
FIRST: dict[str, dict[str, Any]] = {
    "keys in fp8": {"inference": {"kv_cache_dtype": "fp8"}},
    "all weights": {"rank": 0},
    "nf4": {"quantize": "nf4"},
    "packs of 64 tokens": {"options": {"micro_batch_tokens": 64}},
}
OTHERS: dict[str, dict[str, Any]] = {
    "keys in int8": {"inference": {"kv_cache_dtype": "int8"}},
    "sampler in bf16": {"inference": {"dtype": "bf16"}},
    "fp32": {"dtype": "fp32"},
    "all weights in fp32": {"rank": 0, "dtype": "fp32"},
    "int8": {"quantize": "int8"},
    "recomputed": {"options": {"gradient_checkpointing": "on"}},
    "own prompts": {"inference": {"prefix_caching": False}},
    "rank 4": {"rank": 4},
    "rank 8": {"rank": 8},
    "rslora": {"lora": {"rslora": True}},
    "clipped": {"clip": 1.0},
    "flash": {"inference": {"attention_kernel": "flash"}},
    "triton": {"inference": {"attention_kernel": "triton"}},
    "split": {"devices": "gpu:0,gpu:0"},
    "gspo": {"tables": {"algorithm": schema.AlgorithmTable(loss="gspo")}},
    "entropy": {"tables": {"entropy": EntropyTable(coef=0.01)}},
}
MODES = [pytest.param(mode, id=name) for name, mode in FIRST.items()]
MODES += [pytest.param(mode, id=name, marks=pytest.mark.slow) for name, mode in OTHERS.items()]


@pytest.mark.parametrize("mode", MODES)
def test_two_steps_and_every_other_call(
    qwen3: MakeFolder, mode: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    load = Load(new=16)
    if mode.get("quantize") == "nf4":
        pytest.importorskip("bitsandbytes")  # before the card is there: with a card it imports kernels for it
    with caplog.at_level(logging.WARNING, logger="retrain"), on_card(qwen3("tiny"), **mode) as card:
        for step in range(2):
            card.step(load, step=step)
        card.sample(replace(load, group=1), "greedy", greedy=True)
        rows = load.rows(card.vocabulary)
        card.gpu.phase = "log-probabilities"
        card.backend.logprobs(rows, 0.9)
        card.backend.top_logprobs(rows, 0.9, 3)
        if mode.get("rank") != 0:  # of all weights it is another model, which is read from the files
            card.backend.reference_logprobs(rows, 0.9)
        assert not card.faults()
        assert card.gpu.record.replays == 3 * 16
    assert not warnings_of(caplog)


def test_kl_to_the_reference(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        load = Load()
        card.gpu.phase = "reference"
        rows = load.rows(card.vocabulary)
        (reference_T, *_) = card.backend.reference_logprobs(rows, 0.9)
        assert reference_T.shape == rows[0].tokens_T.shape
        card.train(load, kl_coef=0.1, reference_logprobs_T=np.zeros_like(reference_T))
        assert not card.faults()


def test_a_teacher_shares_the_card(qwen3: MakeFolder) -> None:
    folder, load = qwen3("tiny"), Load()
    larger = qwen3("tiny", num_hidden_layers=3)
    with on_card(folder) as card:
        tables: dict[str, BaseModel] = {"teacher": TeacherTable(model=str(larger))}
        teacher = open_teacher(Local(folder=folder, requests=()).context(devices="gpu:0", tables=tables))
        card.step(load)
        card.gpu.phase = "teacher"
        assert len(teacher.logprobs(load.rows(card.vocabulary), 0.9)) == load.prompts * load.group
        teacher.close()
        assert not card.faults()
