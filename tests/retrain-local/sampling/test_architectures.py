"""Every architecture that is served gives what its own modules give, and trains on policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from retrain.api import SamplingParams
from tests.kit.local_backend import Local, write_model
from tests.kit.local_engines import Engines, Plain, all_same
from tests.kit.shared import first_or_long

PARAMS = SamplingParams(max_tokens=20, temperature=0.8, entropy=True)
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILY = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128}
ARCHITECTURES = {
    "llama": transformers.LlamaConfig(**FAMILY),
    "qwen2": transformers.Qwen2Config(**FAMILY),
    "mistral-sliding": transformers.MistralConfig(**FAMILY, sliding_window=6),
    "gemma2-soft-cap": transformers.Gemma2Config(**FAMILY, head_dim=16, sliding_window=6, query_pre_attn_scalar=16),
    "gemma3-text": transformers.Gemma3TextConfig(
        **FAMILY, head_dim=16, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2-conv1d": transformers.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "opt-learned-positions": transformers.OPTConfig(
        **SMALL, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64
    ),
    "granite-scaled-logits": transformers.GraniteConfig(**FAMILY, logits_scaling=2.0),
}


@pytest.mark.parametrize("name", first_or_long(ARCHITECTURES))
def test_architectures(name: str, tmp_path: Path, local: Local, engines: Engines) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(ARCHITECTURES[name])
    folder = write_model(tmp_path, model)
    backend, plain = local.make(folder), Plain(folder)
    firsts = [replace(request, seeds_G=request.seeds_G[:1]) for request in engines.requests]
    all_same([group[:1] for group in backend.sample(engines.requests, PARAMS)], plain.all(firsts, PARAMS))
    for step in range(2):
        report = backend.train(local.roll(backend, requests=engines.requests, step=step, temperature=0.7))
        assert abs(report.ratio_max - 1) < 1e-4
        assert report.gap_max < 1e-4
        assert report.grad_norm > 0
        backend.publish()
