"""Small random models of architectures that transformers computes for the local backend."""

from typing import Any

import torch
import transformers
from torch import nn

COMMON: dict[str, Any] = {"vocab_size": 200, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LIKE_LLAMA: dict[str, Any] = COMMON | {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
LIKE_LLAMA |= {
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LIKE_GPT2: dict[str, Any] = COMMON | {"n_embd": 48, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}
OPT: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.1}
SERVED: dict[str, dict[str, Any]] = {
    "Gemma2": LIKE_LLAMA  # scores and logits soft-capped, windows on every other layer
    | {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "GPT2": LIKE_GPT2 | {"n_positions": 64},  # Conv1D, learned positions
    "GptOss": LIKE_LLAMA | {"head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "OPT": COMMON | OPT | {"hidden_size": 48, "ffn_dim": 80, "word_embed_proj_dim": 48, "max_position_embeddings": 64},
    "Granite": LIKE_LLAMA | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "DeepseekV3": LIKE_LLAMA  # values narrower than keys
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 1, "moe_intermediate_size": 32},
    "Llama": LIKE_LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}
if transformers.__version__ < "5":
    del SERVED["OPT"]  # builds masks of its own there, and is refused
HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def hf_model(kind: str, sizes: dict[str, Any]) -> Any:
    config, model = getattr(transformers, f"{kind}Config"), HEADS.get(kind, f"{kind}ForCausalLM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = getattr(transformers, model)(config(**sizes)).eval()
        for name, p in made.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(p)
    made.set_attn_implementation("eager")
    return made
