"""Reads the verdict in the last line of a judge's reply."""

from __future__ import annotations

import re

from retrain.api import Score

HEAD = 200  # characters of a reply in a message
_LINE = re.compile(
    r"[\s#*_`]*verdict[\s*_`]*:[\s*_`]*(?P<word>yes|no|[01](?:\.[0-9]+)?|\.[0-9]+)[\s.*_`]*", re.I | re.A
)
_STATED = re.compile(  # at the beginning of a line, whatever follows; quoted and listed ones too
    r"[\s>#*_`0-9.)+-]*(?:(?:my|the|final)\s+){0,3}verdict[\s*_`]*:[\s*_`]*(?:yes\b|no\b|\.?[0-9])", re.I | re.A
)
_NEWLINE = re.compile(r"\r\n?|\n")  # no other separator ends the last line: a quotation may hold any
_WORDS = {"yes": 1.0, "no": 0.0}


def read_verdict(reply: str, *, was_cut: bool = False) -> Score:
    """`VERDICT: yes` is 1, `no` 0, a number in [0, 1] itself.

    The verdict is the last line alone. With another last line, a quoted one, or a second line that begins with a
    verdict, even the same, there is no verdict. `was_cut` says that the reply reached its token limit, which is then
    named as the reason.
    """
    lines = [line for line in _NEWLINE.split(reply) if line.strip()]
    last = _value(lines[-1]) if lines else None
    if last is None:
        reason = "was cut off by judge_max_tokens" if was_cut else "does not end in a verdict"
        return Score.no_verdict(f"the judge's reply {reason}: {head(reply)!r}")
    stated = sum(_STATED.match(line) is not None for line in reply.splitlines())
    if stated > 1:
        return Score.no_verdict(f"the judge's reply has {stated} verdicts: {head(reply)!r}")
    return Score.of(last)


def head(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text[: 4 * HEAD].split())
    return line if len(line) <= HEAD else line[:HEAD] + "..."


def _value(line: str) -> float | None:
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    word = match["word"].lower()
    value = _WORDS[word] if word in _WORDS else float(word)
    return value if value <= 1.0 else None
