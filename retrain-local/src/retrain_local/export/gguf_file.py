"""Writes merged weights of the Llama family as one GGUF file, for llama.cpp and programs built on it.

llama.cpp rotates pairs of neighbouring channels, and transformers channels half a head apart. The rows of queries and
keys of its architecture `llama` are therefore written in another order. It rotates `qwen2` and `qwen3` as transformers.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain_local.export.merged import MergedWeights, in_order, refusal
from retrain_local.model.architecture import Architecture, read_architecture
from retrain_local.model.model_files import Folder

FILE = "model.gguf"
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# for sizes: upper bounds
WIDTHS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "q8_0": torch.float16}
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
CONVERTER = "convert_hf_to_gguf.py of llama.cpp, given a folder of --format transformers, may know it"


def write_gguf(weights: MergedWeights, folder: Folder, out: Path, kind: str) -> tuple[str, ...]:
    """Write `model.gguf`, matrices in `kind`, vectors in f32; return notes. ConfigError where not possible."""
    architecture = _architecture(folder)
    if importlib.util.find_spec("gguf") is None:
        what, fix = "the package gguf is missing", 'pip install "retrain-local[gguf]"'
        raise refusal("retrain export", code="export.needs-gguf", what=what, fix=fix)
    import gguf

    name = ARCHITECTURES[folder.document["model_type"]]
    writer = gguf.GGUFWriter(out / FILE, name)
    try:
        _add_sizes(writer, architecture, folder, kind)
        notes = add_tokenizer(writer, folder, architecture.vocabulary)
        tensors = _tensors(weights, architecture, name)
        types = {gguf_name: _type_of(weights, own, kind) for gguf_name, (own, _) in tensors.items()}
        for gguf_name, (own, _) in tensors.items():
            shape, raw = weights.reader.shape(own), types[gguf_name]
            num_bytes = math.prod(gguf.quant_shape_to_byte_shape(shape, raw))
            writer.add_tensor_info(gguf_name, shape, np.dtype(np.float32), num_bytes, raw_dtype=raw)
        frequencies = None
        # llama.cpp divides the frequencies by these numbers; it has no parameters for this kind.
        if architecture.rotation.kind == "llama3":
            size, theta = architecture.head_size, architecture.rotation.theta
            plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
            frequencies = (plain / architecture.rotation.frequencies(size)[0]).numpy()
            writer.add_tensor_info("rope_freqs.weight", frequencies.shape, frequencies.dtype, frequencies.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for gguf_name, (own, heads) in tensors.items():
            tensor = weights.tensor(own)
            values = (_neighbouring(tensor, heads) if heads else tensor).contiguous().numpy()
            writer.write_tensor_data(gguf.quantize(values, types[gguf_name]))
        if frequencies is not None:
            writer.write_tensor_data(frequencies)
    finally:
        writer.close()
    return notes


def read_options(folder: Folder) -> dict[str, Any]:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder.source.path, local_files_only=folder.source.offline)
    if config.model_type == "mistral":  # GGUF calls it llama: the same without windows
        left_out = ("model_type", "architectures", "sliding_window")
        values = {key: value for key, value in config.to_dict().items() if key not in left_out}
        config = AutoConfig.for_model("llama", **values)
    return {"gguf_file": FILE, "config": config}


def _architecture(folder: Folder) -> Architecture:
    found = read_architecture(folder.document)
    kind = folder.document.get("model_type")
    if found is None or kind not in ARCHITECTURES:
        what, why = f"GGUF is not written for {kind}", f"only for {', '.join(ARCHITECTURES)}"
        raise refusal(folder.name, code="export.gguf-architecture", what=what, why=why, fix=CONVERTER)
    if any(window is not None and window < (found.context or 0) for window in found.windows):
        what = f"its {kind} layers see a window of {min(filter(None, found.windows))} tokens"
        raise refusal(folder.name, code="export.gguf-windows", what=what, why="GGUF cannot store that", fix=CONVERTER)
    return found


def _add_sizes(writer: Any, a: Architecture, folder: Folder, kind: str) -> None:
    import gguf

    writer.add_name(Path(folder.name).name)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(a.context or 2048)
    writer.add_embedding_length(a.hidden)
    writer.add_block_count(a.layers)
    writer.add_feed_forward_length(a.inner)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_size)
    writer.add_value_length(a.head_size)
    writer.add_rope_dimension_count(a.head_size)
    writer.add_rope_freq_base(a.rotation.theta)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    writer.add_vocab_size(a.vocabulary)
    given = a.rotation.parameters
    if a.rotation.kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(a.rotation.kind))
        writer.add_rope_scaling_factor(float(given["factor"]))
    if a.rotation.kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(given["original_max_position_embeddings"]))


def _tensors(weights: MergedWeights, a: Architecture, name: str) -> dict[str, tuple[str, int | None]]:
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    known = gguf.get_tensor_name_map(arch, a.layers)
    is_prefixed = any(own.startswith("model.") for own in weights.names())
    found: dict[str, tuple[str, int | None]] = {}
    for own in in_order(weights.names()):
        if own.startswith("lm_head.") and a.is_tied:
            continue  # some files store the tied head as well
        full = own if is_prefixed or own.startswith("lm_head.") else f"model.{own}"
        gguf_name = known.get_name(full, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            if own.endswith("rotary_emb.inv_freq"):
                continue  # in old files: computed from the configuration
            raise refusal(own, code="export.gguf-tensor", what="GGUF has no name for this tensor", fix=CONVERTER)
        heads = {"q_proj": a.heads, "k_proj": a.kv_heads}.get(own.split(".")[-2]) if name == "llama" else None
        found[gguf_name] = own, heads
    return found


def _neighbouring(x: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (first halves, second halves) to pairs of neighbours."""
    return x.view(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _type_of(weights: MergedWeights, name: str, kind: str) -> Any:
    import gguf

    shape = weights.reader.shape(name)
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if kind == "q8_0" and shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0][0]:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[kind.upper()]


# llama.cpp knows pre-tokenizers by name only. These are the expressions of each one, as tokenizer.json spells them;
# `Digits` is its step that separates digits, `ByteLevel` the one with GPT-2's expression.
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_ANY_CASE + r"\p{N}" + _REST,): "qwen2",
    (_ANY_CASE + r"\p{N}{1,3}" + _REST,): "llama-bpe",
}
UNKNOWN_PRE = "default"
UNKNOWN_NOTE = "llama.cpp has no name for this tokenizer's pre-tokenizer: some text gets other tokens there"


def add_tokenizer(writer: Any, folder: Folder, vocabulary: int) -> tuple[str, ...]:
    """Add tokens, merges, special ids and the chat template; return notes. ConfigError unless it is a BPE."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder.source.path, trust_remote_code=folder.trust_remote_code, local_files_only=folder.source.offline
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    document = json.loads(backend.to_str()) if backend is not None else {}
    model = document.get("model", {})
    if model.get("type") != "BPE":
        what, why = "GGUF is not written for its tokenizer", "it is not a BPE"
        raise refusal(folder.name, code="export.gguf-tokenizer", what=what, why=why, fix=CONVERTER)
    tokens, types = _tokens(model, document.get("added_tokens", []), vocabulary, folder)
    is_bytes = not model.get("byte_fallback")
    writer.add_tokenizer_model("gpt2" if is_bytes else "llama")
    pre = pre_tokenizer(document) if is_bytes else UNKNOWN_PRE
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if is_bytes:
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    else:  # the merges of sentencepiece follow from the order of the tokens
        writer.add_token_scores([-float(at) for at in range(len(tokens))])
        writer.add_add_space_prefix(bool(tokenizer.encode("x", add_special_tokens=False) != tokenizer.encode("x")))
    for name in ("bos", "eos", "pad", "unk"):
        found = getattr(tokenizer, f"{name}_token_id", None)
        if found is not None and found < vocabulary:
            getattr(writer, f"add_{name}_token_id")(int(found))
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(bool(starts_with_bos))
    if isinstance(tokenizer.chat_template, str) and tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
    return (UNKNOWN_NOTE,) if is_bytes and pre == UNKNOWN_PRE else ()


def pre_tokenizer(document: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer; "default" for an unknown one."""
    given = document.get("pre_tokenizer") or {}
    steps = given.get("pretokenizers", [given] if given else [])
    parts = []
    for step in steps:
        kind = step.get("type")
        if kind == "Split":
            parts.append(str(step.get("pattern", {}).get("Regex", "")))
        elif kind == "ByteLevel" and step.get("use_regex", True):
            parts.append("ByteLevel")
        elif kind == "Digits" and step.get("individual_digits"):
            parts.append("Digits")
        elif kind != "ByteLevel":
            return UNKNOWN_PRE
    return PRE_TOKENIZERS.get(tuple(parts), UNKNOWN_PRE)


def _tokens(
    model: Mapping[str, Any], added: list[dict[str, Any]], vocabulary: int, folder: Folder
) -> tuple[list[str], list[int]]:
    """Return text and type of every row of the embedding; rows without a token are padding."""
    import gguf

    kinds = gguf.TokenType
    by_id: dict[int, tuple[str, int]] = {}
    for text, at in model["vocab"].items():
        is_byte = bool(model.get("byte_fallback")) and len(text) == 6 and text.startswith("<0x")
        kind = kinds.UNKNOWN if text == model.get("unk_token") else kinds.BYTE if is_byte else kinds.NORMAL
        by_id[at] = (text, int(kind))
    for token in added:
        is_unknown = token["content"] == model.get("unk_token")
        kind = kinds.UNKNOWN if is_unknown else kinds.CONTROL if token["special"] else kinds.USER_DEFINED
        by_id[token["id"]] = (token["content"], int(kind))
    if by_id and max(by_id) >= vocabulary:
        what = f"its tokenizer has the id {max(by_id)}, and the model {vocabulary} rows"
        fix = "use the tokenizer that belongs to the model"
        raise refusal(folder.name, code="model.other-tokenizer", what=what, fix=fix)
    rows = [by_id.get(at, (f"[PAD{at}]", int(kinds.UNUSED))) for at in range(vocabulary)]
    return [text for text, _ in rows], [kind for _, kind in rows]
