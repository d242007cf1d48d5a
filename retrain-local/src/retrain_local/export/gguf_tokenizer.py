"""The tokenizer of a model in GGUF: tokens, merges, and the name of what cuts text before the merges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from retrain_local.export.adapter_file import refusal
from retrain_local.model.model_files import Folder

# llama.cpp knows pre-tokenizers by name only. These are the expressions of each one, as tokenizer.json spells them;
# `Digits` stands for its part that sets digits apart, `ByteLevel` for that of GPT-2's own expression.
_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS: dict[tuple[str, ...], str] = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_ANY_CASE + r"\p{N}" + _REST,): "qwen2",
    (_ANY_CASE + r"\p{N}{1,3}" + _REST,): "llama-bpe",
}
UNKNOWN_PRE = "default"
UNKNOWN_NOTE = (
    "llama.cpp has no name for how this tokenizer cuts text before its merges: some text gets other tokens there"
)


def add_tokenizer(writer: Any, folder: Folder, vocabulary: int) -> tuple[str, ...]:
    """Add tokens, merges, special ids and the chat template; returns notes. ConfigError for one that is no BPE."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder.source.path,
        trust_remote_code=folder.trust_remote_code,
        local_files_only=folder.source.offline,
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    document = json.loads(backend.to_str()) if backend is not None else {}
    model = document.get("model", {})
    if model.get("type") != "BPE":
        fix = "convert_hf_to_gguf.py of llama.cpp, given a folder of --format transformers, may know it"
        raise refusal(folder.name, "GGUF is not written for its tokenizer", why="it is no BPE", fix=fix)
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
    """llama.cpp's name of what cuts text before the merges; "default" where it has none for it."""
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
    """Text and type of every row of the embedding; rows without a token are filled up."""
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
        raise refusal(folder.name, what, fix="use the tokenizer that belongs to the model")
    rows = [by_id.get(at, (f"[PAD{at}]", int(kinds.UNUSED))) for at in range(vocabulary)]
    return [text for text, _ in rows], [kind for _, kind in rows]
