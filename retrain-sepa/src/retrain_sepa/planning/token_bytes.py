"""The bytes that each token of a vocabulary stands for, derived from the tokenizer's own decoder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[str], str | bytes]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORDPIECE_CLEANUP = (  # what the WordPiece decoder does to each token, in its order
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def vocabulary_bytes(tokenizer: Any) -> dict[int, bytes] | None:
    """Token id -> UTF-8 bytes (a token may hold part of a character); None when the decoder is of an unknown kind.

    It knows byte-level BPE (ByteLevel), SentencePiece (Metaspace, or Replace and ByteFallback), WordPiece, BPE with
    word ends, and tokenizers without a decoder. Spaces at the very start of a text belong to no token and may differ.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    try:
        steps = decoder_steps(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
    except Exception:  # a decoder written in Python has no serialised form
        return None
    if steps is None:
        return None
    return {index: token_bytes(token, steps) for token, index in tokenizer.get_vocab().items()}


def token_bytes(token: str, steps: list[Step]) -> bytes:
    """The bytes of one token."""
    text: str | bytes = token
    for step in steps:
        text = step(text)  # type: ignore[arg-type]
        if isinstance(text, bytes):
            return text
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def decoder_steps(decoder: Mapping[str, Any] | None) -> list[Step] | None:
    """What the decoder does to one token among others, as functions; None when that depends on other tokens."""
    if decoder is None:
        return [lambda token: f" {token}"]
    steps: list[Step] = []
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if part["type"] == "Fuse":
            break  # later steps see the whole text: they trim its edges, which belong to no token
        step = _step(part)
        if step is None:
            return None
        steps.append(step)
    return steps


def _step(part: Mapping[str, Any]) -> Step | None:
    match part:
        case {"type": "ByteLevel"}:
            return _byte_level
        case {"type": "ByteFallback"}:
            return _byte_fallback
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return lambda token: token.replace(old, new)
        case {"type": "Metaspace", "replacement": str(mark)}:
            return lambda token: token.replace(mark, " ")
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return lambda token: token.replace(suffix, " ")
        case {"type": "WordPiece", "prefix": str(prefix), "cleanup": bool(cleanup)}:
            return lambda token: _word_piece(token, prefix, cleanup)
    return None


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token is stored as plain text
        return token.encode("utf-8", "surrogatepass")


def _byte_fallback(token: str) -> str | bytes:
    byte = BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token


def _word_piece(token: str, prefix: str, cleanup: bool) -> str:
    text = token.removeprefix(prefix) if token.startswith(prefix) else f" {token}"
    for old, new in WORDPIECE_CLEANUP if cleanup else ():
        text = text.replace(old, new)
    return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others are mapped to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(moved)}}


BYTE_OF_CHAR = _byte_alphabet()
