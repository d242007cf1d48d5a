"""The promise of the project: a model of 4 billion parameters, rows of 10,240 tokens, a card of 16 GB."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from retrain.api import SampleRequest, SamplingParams, TrainBatch, TrainRow
from tests.kit.local_backend import Local
from tests.kit.model_configs import QWEN3_4B

CARD_BYTES = 16 * 10**9
NEW_TOKENS = 10_240
PROMPTS, GROUP, PROMPT_TOKENS = 8, 16, 256
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


@pytest.fixture(scope="module")
def four_billion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with random bf16 weights in the shape of Qwen3-4B."""
    folder = tmp_path_factory.mktemp("qwen3-4b")
    sizes = QWEN3_4B | {"max_position_embeddings": 40_960, "rope_theta": 1_000_000.0}
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes)).bfloat16()
    model.generation_config = GenerationConfig(eos_token_id=151_645)
    model.save_pretrained(folder)
    del model  # its memory is returned before the card becomes small
    yield folder
    shutil.rmtree(folder)  # 8 GB that pytest would keep


@pytest.fixture
def _card_of_16_gb() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, CARD_BYTES / total), 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


def row(tokens: int, seed: int) -> TrainRow:
    rng = np.random.default_rng(seed)
    action_T = np.arange(PROMPT_TOKENS + tokens) >= PROMPT_TOKENS
    return TrainRow(
        tokens_T=rng.integers(0, 150_000, size=len(action_T)),
        action_T=action_T,
        logprobs_T=np.where(action_T, -12.0, 0.0),
        advantages_T=np.where(action_T, rng.normal(), 0.0),
    )


@pytest.mark.usefixtures("_card_of_16_gb")
def test_a_card_of_16_gb_samples_and_trains(local: Local, four_billion: Path) -> None:
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(
            prompt_T=rng.integers(0, 150_000, size=PROMPT_TOKENS),
            seeds_G=tuple(int(seed) for seed in rng.integers(0, 2**62, size=GROUP)),
        )
        for _ in range(PROMPTS)
    ]
    backend = local.make(four_billion, rank=32, devices="gpu:0", lr=1e-5)
    # all completions at once, as far as they get in a few minutes, and a few of them to the very end
    groups = backend.sample(requests, SamplingParams(max_tokens=512, temperature=1.0))
    assert [len(group) for group in groups] == [GROUP] * PROMPTS
    few = [SampleRequest(prompt_T=requests[0].prompt_T, seeds_G=requests[0].seeds_G[:4])]
    (longest,) = backend.sample(few, SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0))
    assert max(len(sample.tokens_T) for sample in longest) > NEW_TOKENS // 2
    rows = tuple(row(NEW_TOKENS, seed) for seed in range(PROMPTS * GROUP))
    report = backend.train(TrainBatch(step=0, rows=rows, temperature=1.0))
    assert np.isfinite(report.loss)
    assert report.grad_norm > 0
    backend.publish()
    backend.sample(few, SamplingParams(max_tokens=8, temperature=1.0))
    assert torch.cuda.max_memory_reserved() <= CARD_BYTES
