"""A rewrite of an answer's text: a pattern, what replaces it, and the example that needs it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

END = "(?![A-Za-z])"  # of a TeX command


@dataclass(frozen=True, slots=True)
class Rewrite:
    """`example` is a text and the text that this rewrite alone makes of it; a test holds each to that."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    example: tuple[str, str]

    def __call__(self, text: str) -> str:
        return self.pattern.sub(self.replacement, text)


def rewrite(pattern: str, replacement: str | Callable[[re.Match[str]], str], *example: str) -> Rewrite:
    before, after = example
    return Rewrite(re.compile(pattern, re.DOTALL), replacement, (before, after))


def apply(rewrites: Iterable[Rewrite], text: str) -> str:
    """The text after all rewrites, in their order."""
    for each in rewrites:
        text = each(text)
    return text


_BRACKET = re.compile(r"\\.|[{}()]", re.DOTALL)


def closing(text: str, opening: int) -> int:
    """The index at which the brace or parenthesis at `opening` is closed; -1 if it never is."""
    pair = {"{": "{}", "(": "()"}[text[opening]]
    depth = 0
    for match in _BRACKET.finditer(text, opening):
        depth += (match[0] == pair[0]) - (match[0] == pair[1])
        if depth == 0:
            return match.start()
    return -1


def members(text: str, separators: str = ",") -> list[str]:
    """The members of a list, split at the separators outside of all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"\\.|[{{}}()\[\]{separators}]", text, re.DOTALL):
        depth += (match[0] in "{([") - (match[0] in "})]")
        if match[0] in separators and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]
