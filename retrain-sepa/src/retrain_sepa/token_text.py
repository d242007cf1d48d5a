"""Token ids as text, with the characters that each token covers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.api import CreditError, Mask, Problem, Tokens

Offsets = NDArray[np.int64]
REPLACEMENT = "\ufffd"
LONE = re.compile("[\udc80-\udcff]")  # `surrogateescape` turns a byte that is not valid UTF-8 into one
# Tokens that may wait for the rest of one character; it has at most four bytes, so more are broken for good.
MAX_PENDING = 8
# Tokens before the next one that are decoded again with it, since its text may depend on them.
MAX_CONTEXT = 16
log = logging.getLogger("retrain.credit")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedTokens:
    """A text and the characters `[start, end)` that each token covers, `[T]`; both arrays are non-decreasing.

    Tokens that share a character both cover it; a token without text has start = end.
    """

    text: str
    starts_T: Offsets
    ends_T: Offsets

    def covering(self, spans: Sequence[tuple[int, int]]) -> Mask:
        """Return True for each token that covers at least one character of a span, `[T]`."""
        if not spans:
            return np.zeros(self.starts_T.shape, np.bool_)
        bounds = np.asarray(spans, dtype=np.int64)
        edges = np.zeros(self.starts_T.size + 1, np.int64)
        np.add.at(edges, np.searchsorted(self.ends_T, bounds[:, 0], side="right"), 1)
        np.add.at(edges, np.searchsorted(self.starts_T, bounds[:, 1], side="left"), -1)
        return (np.cumsum(edges[:-1]) > 0) & (self.ends_T > self.starts_T)


def token_decoder(tokenizer: Any) -> TokenDecoder:
    """Return the exact decoder for this tokenizer: by table where its decoder is known, incremental otherwise."""

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    bytes_of_id = vocabulary_bytes(tokenizer)
    incremental = IncrementalDecoder(decode)
    return incremental if bytes_of_id is None else TableDecoder(bytes_of_id, incremental)


class TableDecoder:
    """Concatenates the bytes of the tokens, so that offsets are sums of lengths.

    A completion with a token not seen before is compared with the tokenizer's decoding; from the first difference on,
    completions go to the incremental decoder.
    """

    def __init__(self, bytes_of_id: dict[int, bytes], incremental: IncrementalDecoder) -> None:
        # One entry past the vocabulary is for all ids of padded embeddings: they decode to nothing.
        self.unknown = max(bytes_of_id, default=-1) + 1
        self.token_bytes = [bytes_of_id.get(index, b"") for index in range(self.unknown + 1)]
        self.lengths = np.array([len(data) for data in self.token_bytes], dtype=np.int64)
        self.verified = np.zeros(self.unknown + 1, np.bool_)
        self.incremental = incremental
        self.trusted = True

    def decode(self, tokens_T: Tokens) -> DecodedTokens:
        """Return text and offsets of these ids; CreditError for a negative id."""
        _refuse_negative(tokens_T)
        if not self.trusted:
            return self.incremental.decode(tokens_T)
        ids_T = np.minimum(tokens_T, self.unknown)
        data = b"".join(map(self.token_bytes.__getitem__, ids_T.tolist()))
        if not self.verified[ids_T].all() and not self._agrees(ids_T, data):
            self.trusted = False
            log.warning(
                "planning detector: this tokenizer decodes a token differently by its neighbours; decoding will be slow"
            )
            return self.incremental.decode(tokens_T)
        ends_T = np.cumsum(self.lengths[ids_T])
        starts_T = ends_T - self.lengths[ids_T]
        if data.isascii():
            return DecodedTokens(text=data.decode("ascii"), starts_T=starts_T, ends_T=ends_T)
        text, char_of_byte = decode_bytes(data)
        filled_T = ends_T > starts_T
        first_T = char_of_byte[starts_T]
        last_T = np.where(filled_T, char_of_byte[ends_T - 1] + 1, first_T)
        return DecodedTokens(text=text, starts_T=first_T, ends_T=last_T)

    def _agrees(self, ids_T: Tokens, data: bytes) -> bool:
        joined = data.decode("utf-8", "replace")
        if REPLACEMENT in joined:
            # Decoders render broken characters differently. The tokens stay unverified until they come whole.
            return True
        decoded = self.incremental.decode_text(ids_T[ids_T < self.unknown].tolist())
        agrees = decoded.endswith(joined.lstrip())  # some decoders keep the leading space, others do not
        self.verified[ids_T] |= agrees
        return agrees


class IncrementalDecoder:
    """Decodes token by token within a short context, for tokenizers whose tokens decode differently by neighbour.

    Tokens that share one character all cover it. `decode_text` is the decoding of the tokenizer.
    """

    def __init__(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        self.decode_text = decode_text

    def decode(self, tokens_T: Tokens) -> DecodedTokens:
        _refuse_negative(tokens_T)
        ids = tokens_T.tolist()
        starts, ends, parts = [0] * len(ids), [0] * len(ids), []
        position = context = done = 0
        for index in range(len(ids)):
            before = self.decode_text(ids[context:done])
            after = self.decode_text(ids[context : index + 1])
            if after.endswith(REPLACEMENT) and index + 1 - done < MAX_PENDING and index + 1 < len(ids):
                continue  # the character is incomplete
            piece = after[len(before) :]
            parts.append(piece)
            for covered in range(done, index + 1):
                starts[covered], ends[covered] = position, position + len(piece)
            position += len(piece)
            context = done if piece else max(context, index + 1 - MAX_CONTEXT)
            done = index + 1
        starts_T, ends_T = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
        return DecodedTokens(text="".join(parts), starts_T=starts_T, ends_T=ends_T)


TokenDecoder = TableDecoder | IncrementalDecoder


def decode_bytes(data: bytes) -> tuple[str, Offsets]:
    """Return the text of UTF-8 `data` and, for each byte and the end, the character it belongs to.

    Each byte that is not valid UTF-8 becomes one lone surrogate, so that text and bytes stay aligned.
    """
    text = data.decode("utf-8", "surrogateescape")
    leading = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    if not LONE.search(text):  # whole characters only: each has one leading byte
        return text, np.append(np.cumsum(leading) - 1, len(text))
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    widths[(points >= 0xDC80) & (points <= 0xDCFF)] = 1
    return text, np.append(np.repeat(np.arange(points.size), widths), points.size)


def _refuse_negative(tokens_T: Tokens) -> None:
    if tokens_T.size and tokens_T.min() < 0:
        position = int(np.argmax(tokens_T < 0))
        what = f"token id {tokens_T[position]} at position {position} is negative"
        raise CreditError(Problem(code="credit.negative-token", what=what, fix="give the token ids of the tokenizer"))


Step = Callable[[str], str | bytes]
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORDPIECE_CLEANUP = (  # replacements of the WordPiece decoder in each token, in its order
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
    """Return token id -> UTF-8 bytes (a token may hold part of a character); None for an unknown kind of decoder.

    Known are byte-level BPE (ByteLevel), SentencePiece (Metaspace, or Replace and ByteFallback), WordPiece, BPE with
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
    text: str | bytes = token
    for step in steps:
        text = step(text)  # type: ignore[arg-type]
        if isinstance(text, bytes):
            return text
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def decoder_steps(decoder: Mapping[str, Any] | None) -> list[Step] | None:
    """Return the decoder's effect on one token as functions; None when it depends on other tokens."""
    if decoder is None:
        return [lambda token: f" {token}"]
    steps: list[Step] = []
    for part in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
        if part["type"] == "Fuse":
            break  # later steps see the whole text: they trim its edges, and those belong to no token
        if (step := _step(part)) is None:
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
    """Return GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + n): byte for n, byte in enumerate(moved)}}


BYTE_OF_CHAR = _byte_alphabet()
