r"""The final answer of a completion: the last `\boxed{...}` of its text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_END = re.compile(r"\\[\])\\]|\\.|[{}$\s]", re.DOTALL)
_CLOSERS = ("\\)", "\\]", "\\\\")  # end of inline or display mathematics, line break
_PUNCTUATION = ".,;:!?"


def last_boxed(text: str) -> str | None:
    r"""The content of the last box of `text`, trimmed; None when there is no answer.

    A box is `\boxed` or `\fbox` with a brace-matched group (`\{` and `\}` are characters, not braces), or with a bare
    answer that runs up to white space, `$`, `\)` or an unmatched brace and loses its final punctuation: `\boxed 5.`
    A last box that never ends is no answer, whatever earlier boxes hold. Of nested boxes the innermost counts.
    Time and memory are linear in the length of the text.
    """
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    return _group(text, start + 1) if text.startswith("{", start) else _bare(text, start)


def boxed(answer: str) -> str:
    r"""The answer in a box: `\boxed{answer}`."""
    return rf"\boxed{{{answer}}}"


def _group(text: str, start: int) -> str | None:
    depth = 1
    for match in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return text[start : match.start()].strip()
    return None


def _bare(text: str, start: int) -> str | None:
    depth, end = 0, len(text)
    for match in _BARE_END.finditer(text, start):
        found = match.group()
        if found == "{":
            depth += 1
        elif found == "}" and depth:
            depth -= 1
        elif depth == 0 and (found in _CLOSERS or not found.startswith("\\")):
            end = match.start()
            break
    answer = text[start:end].rstrip(_PUNCTUATION)
    return answer if answer and depth == 0 else None
