"""The least time of a token and of a pack of Qwen3-4B on an H100, by the bytes and operations of each launch."""

from __future__ import annotations

import pytest
import torch

from tests.kit.fake_gpu.backends import Load
from tests.kit.fake_gpu.card import H100
from tests.kit.fake_gpu.gpu import FakeGpu
from tests.kit.fake_gpu.roofline import READ, decoding, product_fraction, seconds, training
from tests.kit.fake_gpu.work import Work

pytestmark = [pytest.mark.fake_gpu, pytest.mark.slow]
DECODED = Load(prompts=8, group=16, prompt=256, new=2048)
TRAINED = Load(prompts=1, group=6, prompt=256, new=1024)
PARAMETERS = 4_022_468_096


def test_the_work_of_a_product() -> None:
    gpu = FakeGpu(weighs=True)
    with gpu.in_place():
        a, b = (torch.empty(size, dtype=torch.bfloat16, device="cuda:0") for size in ((3, 5), (5, 7)))
        torch.mm(a, b)
    work = next(work for (_, name, _), work in gpu.record.work.items() if name == "mm")
    assert work == Work(calls=1, moved_bytes=2 * (15 + 35 + 21), operations=2 * 3 * 5 * 7)


def test_a_token_moves_the_weights_and_prompts_once_and_every_row_its_keys() -> None:
    table = decoding("4B", H100, DECODED)
    keys = next(work for (name, _), work in table.items() if name == READ)
    # of the 256 tokens of a prompt its 15 full blocks are shared
    assert keys.moved_bytes == pytest.approx((8 * 240 + 128 * 1040) * 36 * 2 * 8 * 128 * 2, rel=0.03)
    others = sum((work for work in table.values() if work is not keys), Work())
    assert 2 * PARAMETERS < others.moved_bytes < 1.5 * 2 * PARAMETERS
    assert 0.009 < seconds(table, H100) < 0.0102
    # 8-bit keys save a third of a token's time
    assert seconds(decoding("4B", H100, DECODED, key_bytes=1, inference={"kv_cache_dtype": "fp8"}), H100) < 0.007


def test_a_pack_is_mostly_products() -> None:
    table = training("4B", H100, TRAINED)
    operations = sum(work.operations for work in table.values())
    tokens = TRAINED.prompt + TRAINED.group * TRAINED.new
    assert operations > 4 * tokens * PARAMETERS * 0.9  # the embedding is no product of the backward pass
    assert 0.7 < product_fraction(table, H100) < 1.0
