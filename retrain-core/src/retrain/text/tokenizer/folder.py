"""Reads a tokenizer that consists of its `tokenizer.json` alone, which `transformers` would use as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PLAIN_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
# For other architectures `transformers` may replace a plain class by one of its own; for these it does not.
PLAIN_ARCHITECTURES = frozenset({"llama", "qwen3"})
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
INERT_KEYS = frozenset(  # keys of `tokenizer_config.json` that change neither ids nor texts
    {
        "added_tokens_decoder",  # compared with those of `tokenizer.json`
        "backend",
        "chat_template",
        "clean_up_tokenization_spaces",  # must be false
        "extra_special_tokens",  # must be empty
        "is_local",
        "local_files_only",
        "model_input_names",
        "model_max_length",
        "padding_side",
        "tokenizer_class",
        *SPECIAL_NAMES,
    }
)
TEMPLATE_FILE = "chat_template.jinja"  # takes precedence over the template in `tokenizer_config.json`
PLAIN_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "generation_config.json",
        "README.md",
        "LICENSE",
        TEMPLATE_FILE,
    }
)
MAX_VOCABULARY = 100_000  # above it `transformers` repairs some regular expressions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlainParts:
    """A tokenizer without a class: the backend, the special tokens by name, the chat template if there is one."""

    backend: Tokenizer
    special: Mapping[str, str]
    template: str | None


def plain_parts(folder: Path) -> PlainParts | None:
    """The parts of the tokenizer in `folder`; None where only `transformers` knows what its files mean.

    A damaged folder is left to `transformers` too, which reports the fault.
    """
    try:
        if not _has_plain_files(folder):
            return None
        settings = _read(folder / "tokenizer_config.json")
        architecture = _read(folder / "config.json").get("model_type")
        if not _is_plain(settings) or architecture not in PLAIN_ARCHITECTURES:
            return None
        path = folder / TEMPLATE_FILE
        template = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
        from tokenizers import Tokenizer  # only sampling needs it

        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        special = {name: settings[name] for name in SPECIAL_NAMES if name in settings}
        if not _fits(backend, special, settings.get("added_tokens_decoder", {})):
            return None
    except Exception:  # `tokenizers` raises bare exceptions
        return None
    return PlainParts(backend=backend, special=special, template=template)


def _has_plain_files(folder: Path) -> bool:
    """Whether the folder has no other file that could matter: templates, added tokens, vocabularies, code."""
    names = {path.name for path in folder.iterdir()}
    weights = {name for name in names if ".safetensors" in name}
    return "tokenizer.json" in names and names - weights <= PLAIN_FILES


def _read(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise TypeError(f"{path} does not hold an object")
    return content


def _is_plain(settings: Mapping[str, Any]) -> bool:
    return (
        settings.keys() <= INERT_KEYS
        and settings.get("tokenizer_class") in PLAIN_CLASSES
        and settings.get("clean_up_tokenization_spaces", False) is False
        and not settings.get("extra_special_tokens")
        and isinstance(settings.get("chat_template"), str | None)
        and all(isinstance(settings[name], str) for name in SPECIAL_NAMES if name in settings)
    )


def _fits(backend: Tokenizer, special: Mapping[str, str], added: Mapping[str, Any]) -> bool:
    """Whether `transformers` would use `tokenizer.json` as it is."""
    if backend.truncation is not None or backend.padding is not None:
        return False
    if backend.get_vocab_size(with_added_tokens=True) > MAX_VOCABULARY:
        return False
    known = backend.get_added_tokens_decoder()
    plain = {token.content for token in known.values() if token.special and not token.normalized}
    return set(special.values()) <= plain and all(
        _same(known.get(int(index)), declared) for index, declared in added.items()
    )


def _same(token: Any, declared: Mapping[str, Any]) -> bool:
    return token is not None and all(getattr(token, name, None) == value for name, value in declared.items())
