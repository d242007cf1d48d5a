"""Small random models of every architecture of the Llama family."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

SIZES: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 80, "vocab_size": 200, "max_position_embeddings": 64, "initializer_range": 0.2}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "llama tied with biases": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama with wide heads and scaled positions": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(**SIZES, head_dim=20, rope_scaling=LLAMA3 | {"original_max_position_embeddings": 16})
    ),
    "llama with yarn": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SIZES, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        )
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen2 with windows": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, **SLIDING, max_window_layers=1)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
    "qwen3 with windows and biases": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SIZES, **SLIDING, head_dim=16, attention_bias=True, layer_types=LAYER_TYPES)
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
    "mistral without window": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=None)),
}


def random_model(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        for key, p in model.named_parameters():  # biases start at zero and norms at one
            if p.dim() == 1:
                torch.nn.init.normal_(p, mean=0.0 if key.endswith("bias") else 1.0, std=0.3)
    return model
