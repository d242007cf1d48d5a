"""Small random models of every architecture of the Llama family."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 200,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SLIDING = {"use_sliding_window": True, "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0}
OLD_LENGTH = {"original_max_position_embeddings": 16}
BIASES = {"tie_word_embeddings": True, "attention_bias": True}
MIXED = SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the prefix of its classes, and what its configuration adds to SIZES
    "llama": ("Llama", {}),
    "llama tied with biases": ("Llama", BIASES | {"mlp_bias": True}),
    "llama with wide heads and scaled positions": ("Llama", {"head_dim": 20, "rope_scaling": LLAMA3 | OLD_LENGTH}),
    "llama with yarn": ("Llama", {"rope_scaling": YARN | OLD_LENGTH}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", SLIDING | {"max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with windows and biases": ("Qwen3", MIXED | {"head_dim": 16, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
}


def random_model(name: str, **changes: Any) -> Any:
    """One of `MODELS`; or of the classes with this prefix, with these sizes instead of those of `SIZES`."""
    kind, more = MODELS.get(name, (name, {}))
    config = getattr(transformers, f"{kind}Config")(**SIZES | more | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for key, p in model.named_parameters():  # biases start at zero and norms at one
            if p.dim() == 1:
                torch.nn.init.normal_(p, mean=0.0 if key.endswith("bias") else 1.0, std=0.3)
    return model
