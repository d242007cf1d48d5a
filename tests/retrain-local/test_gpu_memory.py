"""The promise of the project: a model of 4 billion parameters, rows of 10,240 tokens, a card of 16 GB."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, Qwen3Config

from retrain.api import SampleRequest, SamplingParams, TrainBatch, TrainRow
from tests.kit.local_backend import Local

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
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=151_645).save_pretrained(folder)
    hidden, inner, queries, keys = config.hidden_size, config.intermediate_size, 32 * 128, 8 * 128
    matrices = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden)}
    matrices |= {"self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries)}
    matrices |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": 128, "self_attn.k_norm": 128}
    numbers = torch.Generator(device="cuda").manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return (0.02 * torch.randn(size, generator=numbers, device="cuda")).bfloat16().cpu()

    tensors = {"model.embed_tokens.weight": drawn(config.vocab_size, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(config.num_hidden_layers):
        for name, size in matrices.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = drawn(*size)
        for name, width in norms.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
