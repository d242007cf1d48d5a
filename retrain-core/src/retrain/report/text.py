"""Untrusted text as HTML: escaped, of bounded length, with control and bidirectional characters made visible."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

JOINERS = frozenset("\u200c\u200d")  # part of letters in many languages, and of emoji
LOST = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text, or its beginning and end and the number of characters left out between them."""

    head: str
    tail: str = ""
    left_out: int = 0


def text(value: Any, most_chars: int = 400) -> Markup:
    """A name or a short text; the rest of a longer one is dropped, and an ellipsis says so. A part stays a part."""
    if hasattr(value, "__html__"):
        return escape(value)
    shown = str(value)
    return _marked(shown[:most_chars]) + ("…" if len(shown) > most_chars else "")


def long_text(value: Excerpt) -> Markup:
    """Beginning and end, and the number of characters left out between them."""
    if not value.left_out:
        return _marked(value.head)
    gap = Markup('\n<span class="cut">[{:,} characters left out]</span>\n').format(value.left_out)
    return _marked(value.head) + gap + _marked(value.tail)


def plain(value: object, most_chars: int = 400, *, kept: str = "") -> str:
    """Text without markup, for a script to insert as text; control characters are made visible, except those `kept`."""
    shown = str(value)[:most_chars]
    if shown.isprintable():
        return shown
    return "".join(c if _is_harmless(c) or c in kept else _name(c) for c in shown)


def _marked(shown: str) -> Markup:
    if shown.isprintable():
        return escape(shown)
    span = Markup('<span class="ctl">{}</span>')
    return Markup("").join(
        c if _is_harmless(c) or c in "\n\t" else span.format(_name(c)) for c in shown.replace("\r\n", "\n")
    )


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in JOINERS or unicodedata.category(char) in ("Zs", "Co", "Cn")


def _name(char: str) -> str:
    """Visible replacement of a character that would act instead of being shown."""
    code = ord(char)
    if 0xD800 <= code <= 0xDFFF:  # a lone surrogate cannot be encoded
        return LOST
    return f"[U+{code:04X}]"
