"""Small random models of the causal types that the installed transformers knows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CAUSAL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
STOP = (198, 199)
MOST_PARAMETERS = 12_000_000  # of a model that counts as shrunk


def _each(changes: dict[str, Any], *kinds: str) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(kinds, changes)


def _sizes(value: int, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# By the names that configurations have for these sizes; a configuration takes those that it knows.
SIZES: dict[str, Any] = {
    **_sizes(200, "vocab_size", "vocab_size_per_layer_input"),
    **_sizes(48, "hidden_size", "n_embd", "d_model", "dim", "hidden_dim", "word_embed_proj_dim", "embedding_size"),
    **_sizes(48, "emb_dim", "dim_model", "lru_width", "conv_dim", "conv_dim_out"),
    **_sizes(4, "num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    **_sizes(2, "decoder_layers", "encoder_layers", "num_kv_shared_layers", "altup_num_inputs"),
    **_sizes(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    **_sizes(4, "decoder_attention_heads", "encoder_attention_heads", "swa_num_attention_heads"),
    **_sizes(2, "num_key_value_heads", "multi_query_group_num", "num_kv_heads", "swa_num_key_value_heads"),
    **_sizes(16, "head_dim", "attention_head_dim", "global_head_dim", "swa_head_dim", "index_head_dim"),
    **_sizes(12, "v_head_dim", "swa_v_head_dim"),
    **_sizes(80, "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "mlp_dim", "d_inner"),
    **_sizes(80, "intermediate_size_mlp", "decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"),
    **_sizes(32, "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
    **_sizes(32, "moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    **_sizes(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_sizes(2, "num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "zero_expert_num"),
    **_sizes(1, "n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"),
    **_sizes(1, "num_expert_groups", "num_mem_blocks", "mamba_n_groups", "n_groups", "mamba_ngroups"),
    **_sizes(16, "q_lora_rank", "kv_lora_rank", "mamba_chunk_size", "chunk_size"),
    **_sizes(8, "qk_rope_head_dim", "qk_nope_head_dim", "hidden_size_per_layer_input", "adapter_rank"),
    **_sizes(64, "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    **_sizes(64, "max_context_length", "context_length", "index_topk"),
    **_sizes(5, "sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    **_sizes(8, "attention_chunk_size", "mamba_d_state", "ssm_state_size", "state_size"),
    **_sizes(2, "linear_num_key_heads", "n_mamba_heads", "index_n_heads"),
    **_sizes(4, "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads", "laurel_rank"),
    **_sizes(8, "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
    **_sizes(24, "mamba_d_head", "mamba_head_dim", "mamba_headdim"),
    **_sizes(4, "mamba_d_conv", "time_step_rank", "mamba_dt_rank"),
    "mamba_d_ssm": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "init_std": 0.1,
    "is_decoder": True,
}
LINEAR: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2}
# Latent attention has as many keys as queries.
LATENT: dict[str, Any] = {"num_key_value_heads": 4}
LATENT_TYPES = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
# Where common sizes contradict each other, or would leave out a kind of layer.
SPECIAL: dict[str, dict[str, Any]] = {
    **_each(LATENT, *LATENT_TYPES, "minicpm3", "youtu"),
    **_each(SLIDING, "gemma4_text", "gemma4_unified_text", "gemma3n_text"),
    **_each({"rotary_dim": 8}, "codegen", "gptj"),
    **_each(LATENT | LINEAR, "kimi_linear", "bailing_hybrid"),
    **_each(CONVOLUTION, "lfm2", "lfm2_moe"),
    "bamba": {"attn_layer_indices": [1, 3]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": LINEAR,
    "helium": {"head_dim": 12},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": LATENT | {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 24},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen3_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}},
    "stablelm": {"head_dim": None, "partial_rotary_factor": 0.5},
    "xlstm": {"hidden_size": 128},  # its cache rounds sizes of heads to such
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(kind: str, **changes: Any) -> Any:
    """Return a configuration of few parameters; any error where its sizes have other names or other relations."""
    made = CONFIG_MAPPING[kind]
    known = set(inspect.signature(made.__init__).parameters)
    for base in made.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    known -= set(getattr(made, "attribute_map", {}))
    return made(**{name: value for name, value in SIZES.items() if name in known} | SPECIAL.get(kind, {}) | changes)


def small_model(kind: str, **changes: Any) -> Any:
    """Return a random model whose biases are not zero, in evaluation mode; ValueError where it is not small."""
    config = small_config(kind, **changes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,d} parameters in spite of the small sizes")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters():
            if p.dim() == 1 and not p.any():
                torch.nn.init.normal_(p, std=0.1)
    model.generation_config = GenerationConfig(eos_token_id=list(STOP))
    return model


VISION: dict[str, Any] = {
    **_sizes(32, "hidden_size", "image_size"),
    **_sizes(48, "intermediate_size", "vision_output_dim"),
    **_sizes(48, "projector_input_dim", "projector_output_dim"),
    **_sizes(2, "num_hidden_layers", "num_attention_heads", "depth", "num_heads"),
    **_sizes(16, "num_position_embeddings", "patch_size"),
}
# A checkpoint of more than text: the type of its text, the class that holds all of it, its vision tower.
COMPOSITES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForConditionalGeneration", VISION),
    "gemma3": ("gemma3_text", "Gemma3ForConditionalGeneration", VISION),
    "gemma4": ("gemma4_text", "Gemma4ForConditionalGeneration", VISION),
    "llama4": ("llama4_text", "Llama4ForConditionalGeneration", VISION),
    "mistral3": ("mistral", "Mistral3ForConditionalGeneration", VISION | {"model_type": "pixtral"}),
    "qwen3_vl": ("qwen3_vl_text", "Qwen3VLForConditionalGeneration", VISION),  # its text has no class with a head
    "smolvlm": ("llama", "SmolVLMForConditionalGeneration", VISION),
}


def small_composite(kind: str, **changes: Any) -> Any:
    """Return a random model with a vision tower, in evaluation mode; `changes` are of its text part."""
    name, made, vision = COMPOSITES[kind]
    text = small_config(name, **changes)
    vision = vision | {"out_hidden_size": text.hidden_size}
    config = CONFIG_MAPPING[kind]
    known: set[str] = {"model_type"}
    for base in getattr(config.sub_configs["vision_config"], "__mro__", ()):
        known |= set(getattr(base, "__annotations__", {}))
    if "model_type" not in vision:
        vision = {name: value for name, value in vision.items() if name in known}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, made)(config(text_config=text.to_dict(), vision_config=vision))
    model.generation_config = GenerationConfig(eos_token_id=list(STOP))
    return model.eval()
