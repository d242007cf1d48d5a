"""Defects of commit 46939923 that a GPU that is not there has shown; the others have their tests by their subject."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pydantic import BaseModel

from retrain.api import ConfigError
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import TeacherTable
from retrain_local.devices.group import ProcessGroup
from retrain_local.model.load import trained_dtype
from retrain_local.model.qlora import Int8
from retrain_local.sampling.cache import bytes_per_token
from retrain_local.teacher import open_teacher
from tests.fake_gpu.conftest import MakeFolder
from tests.fake_gpu.test_counts import growth
from tests.fake_gpu.test_memory import SAMPLED, SMALL, limits_of
from tests.kit.fake_gpu.backends import Load, on_card
from tests.kit.fake_gpu.card import RTX_4090, T4
from tests.kit.fake_gpu.gpu import FakeGpu
from tests.kit.local_backend import Local

pytestmark = pytest.mark.fake_gpu
GSPO: dict[str, BaseModel] = {"algorithm": schema.AlgorithmTable(loss="gspo")}
# Kernels that add to a place from several programs at once, in an order that differs from run to run.
UNORDERED = {"index_add", "index_add_", "scatter_add", "scatter_add_"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["logprobs", "top_logprobs", "reference_logprobs"])
def test_log_probabilities_before_training_do_not_make_its_packs_smaller(qwen3: MakeFolder, what: str) -> None:
    chosen = []
    for is_asked in (False, True):
        with on_card(qwen3("4B"), RTX_4090) as card:
            card.sample(SAMPLED)
            if is_asked:
                card.gpu.phase = what
                given: dict[str, Any] = {"top": 3} if what == "top_logprobs" else {}
                getattr(card.backend, what)(SMALL.rows(card.vocabulary), 1.0, **given)
            card.train(SMALL)
            chosen.append(limits_of(card).pack_tokens)
    assert chosen[1] >= 0.95 * chosen[0]


def test_decoding_goes_back_to_its_stream_when_a_capture_breaks(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        before = torch.cuda.current_stream()
        with mock.patch("retrain_local.sampling.engine.decode_step") as step:
            step.side_effect = lambda *given, **named: torch.cuda.synchronize()
            card.sample(Load())
        assert torch.cuda.current_stream() is before


@pytest.mark.slow
def test_dynamic_positions_are_decoded_by_a_graph(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from tests.kit.fake_gpu.hosted_models import hosted_folder, probed_on_the_host

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    with probed_on_the_host(), on_card(hosted_folder(tmp_path, "llama", rope_parameters=rope), rank=4) as card:
        card.sample(Load(prompt=9, new=16))
        assert card.gpu.record.replays == 16
        assert not card.faults()


def test_sums_by_sequence_have_an_order(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny"), tables=GSPO) as card:
        card.train(Load())
        assert not UNORDERED & set(card.gpu.record.operations_in("train"))


def test_a_closed_backend_frees_the_card(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        card.step()
        card.backend.close()
        gc.collect()
        assert card.gpu.memory.live == 0


def test_a_rank_makes_its_card_current_before_its_mesh() -> None:
    calls, devices = [], [torch.device("cuda", 1), torch.device("cuda", 2)]
    with (
        mock.patch("torch.distributed.init_process_group"),
        mock.patch("torch.distributed.new_group"),
        mock.patch("torch.distributed.init_device_mesh", side_effect=lambda *given: calls.append("mesh")),
        mock.patch("torch.cuda.set_device", side_effect=lambda device: calls.append("device")),
    ):
        ProcessGroup(None, rank=0, size=2, devices=devices, shards=True)
    assert calls == ["device", "mesh"]


def test_an_int8_matrix_is_expanded_into_its_dtype_only() -> None:
    gpu, size = FakeGpu(), 1024
    with gpu.in_place():
        stored = Int8(torch.empty(size, size, dtype=torch.bfloat16, device="cuda:0"))
        before, gpu.phase = gpu.memory.live, "expand"
        kept = stored.expanded(torch.bfloat16)
        assert gpu.memory.peaks["expand"] - before < 1.1 * kept.nbytes


def test_a_card_without_bf16_computes_in_fp32_or_refuses(qwen3: MakeFolder) -> None:
    config = Local(folder=qwen3("tiny"), requests=()).context(devices="gpu:0").config
    with FakeGpu(T4).in_place():
        try:
            dtype = trained_dtype(config, torch.device("cuda", 0))
        except ConfigError:
            return
    assert dtype is torch.float32


def test_averages_of_sequences_wait_for_nothing(qwen3: MakeFolder) -> None:
    waits = []
    for tables in ({}, GSPO):
        with on_card(qwen3("tiny"), tables=tables, options={"micro_batch_tokens": 64}) as card:
            card.train(Load())
            waits.append(card.gpu.record.waits_in("train"))
    assert not growth(waits[1], waits[0])


def test_the_pool_leaves_room_for_the_teacher(qwen3: MakeFolder) -> None:
    folder = qwen3("4B", num_hidden_layers=12)
    with on_card(folder, RTX_4090) as card:
        tables: dict[str, BaseModel] = {"teacher": TeacherTable(model=str(qwen3("4B")))}
        context = Local(folder=folder, requests=()).context(devices="gpu:0", tables=tables)
        teacher = open_teacher(context)
        card.sample(Load())
        sampler = card.backend._pair.sampler
        pool = limits_of(card).cache_tokens * bytes_per_token(sampler.shape, "auto", sampler.dtype)
        assert pool < card.gpu.memory.free
        teacher.close()
