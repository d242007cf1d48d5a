r"""The final answer of a completion: the last `\boxed{...}` of its text."""

from __future__ import annotations

import re

_BOX = r"\\(?:boxed|fbox)(?![A-Za-z])\s*"
_BOX_OR_BRACE = re.compile(rf"(?P<box>{_BOX}\{{?)|\\\\(?!{_BOX[2:]})|\\[^\\]|[{{}}]", re.DOTALL)
_BARE_END = re.compile(r"\\[\])\\]|\\.|[{}$\s]", re.DOTALL)
_CLOSERS = ("\\)", "\\]", "\\\\")  # end of inline or display mathematics, line break
_PUNCTUATION = ".,;:!?"
# Continuations of a bare answer, so that it is more than its first word: `\boxed 5, 6`, `\boxed 5 or 6`.
_GOES_ON = re.compile(
    r"[ \t]+(?:[-+*/=^_<>|&0-9±×÷·]|\\(?![()\[\]\\])|"
    r"(?:or|and|but|maybe|perhaps|to|plus|minus|times|not|percent|dozen|hundred|thousand|million|billion|trillion)\b)"
)
_OPENINGS = re.compile(rf"(?:{_BOX}\{{?|[\s$]|\\[(\[])*")
_CLOSINGS = re.compile(r"(?:[\s$}.]|\\[)\]])*")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last box of `text`, trimmed; None when there is no answer.

    A box is `\boxed` or `\fbox` with a brace-matched group (`\{` and `\}` are characters, not braces), or with a bare
    answer that runs up to white space, `$`, `\)` or an unmatched brace and loses its final punctuation: `\boxed 5.` A
    bare answer that continues behind the white space (`\boxed 5, 6`) does not count, nor does a last box that never
    ends, whatever earlier boxes hold. A box around nothing but a box counts as the inner one; with anything next to it,
    such as `\boxed{\boxed{5} or 6}`, there is no answer. Time and memory are linear in the length of the text.
    """
    start, end, around = _last_box(text)
    if start < 0:
        return None
    if text[start - 1] == "{":
        answer = text[start:end] if end >= 0 else None
    else:
        answer = _bare(text, start)
        end = start + len(answer or "")
    if answer is None or around is None:
        return answer and answer.strip()
    is_alone = _OPENINGS.fullmatch(text, around[0], start) and _CLOSINGS.fullmatch(text, end, around[1])
    return answer.strip() if is_alone else None


def _last_box(text: str) -> tuple[int, int, tuple[int, int] | None]:
    start, end, around = -1, -1, None
    opened: list[int] = []  # of each open brace, where the content of its box starts; -1 without a box
    for match in _BOX_OR_BRACE.finditer(text):
        found = match.group()
        if match["box"]:
            start, end, around = match.end(), -1, None
        if found.endswith("{") and not found.startswith("\\{"):
            opened.append(start if match["box"] else -1)
        elif found == "}" and opened and (closed := opened.pop()) >= 0:
            if closed == start:
                end = match.start()
            elif closed < start:
                around = (closed, match.start())
    return start, end, around


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


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
    return answer if answer and depth == 0 and not _GOES_ON.match(text, end) else None
