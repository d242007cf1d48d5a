r"""The expressions of a prompt that still have to be computed: what a policy restates in place of an answer.

The rule looks at the text alone: whatever stands between `$...$`, `\(...\)` or `\[...\]`, and every run of numbers
joined by operators; of these, the ones in which something is left to compute.
"""

from __future__ import annotations

import re

MOST = 2  # expressions of one prompt, the longest first
_FORMULA = re.compile(r"\$\$(.{1,200}?)\$\$|\$(.{1,200}?)\$|\\\((.{1,200}?)\\\)|\\\[(.{1,200}?)\\\]", re.DOTALL)
_OPERAND = r"\({0,9}[-+]?\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?\){0,9}"
_SUM = re.compile(rf"{_OPERAND}(?:\s{{0,9}}(?:\*\*|[-+*/^×÷·x−])\s{{0,9}}{_OPERAND}){{1,30}}")
_UNFINISHED = re.compile(  # an operator between two operands, or a command that computes
    r"[\w)}]\s{0,9}(?:\*\*|[-+*/^×÷·−]|\\(?:times|cdot|div|pm)\b)\s{0,9}[-+]?[\w({\\]|\d\s{0,9}x\s{0,9}\d"
    r"|\\(?:d?frac|sqrt|binom|int|sum|prod|lim|det|gcd|log|ln|sin|cos|tan)\b"
)


def expressions(prompt: str, reference: str) -> list[str]:
    """At most two expressions of the prompt, none of them the reference or one side of an equation that gives it."""
    found = ["".join(groups) for groups in _FORMULA.findall(prompt)]
    found += [match[0] for match in _SUM.finditer(_FORMULA.sub(" ", prompt))]
    texts = dict.fromkeys(
        " ".join(text.split()).strip(" .,;:?") for text in found if text.count("(") == text.count(")")
    )
    left = [text for text in texts if _UNFINISHED.search(text) and not _gives(text, reference)]
    return sorted(left, key=len, reverse=True)[:MOST]


def _gives(text: str, reference: str) -> bool:
    """Whether the text, or a side of it if it is an equation, is the reference but for white space."""
    answer = "".join(reference.split())
    return any("".join(side.split()) == answer for side in (text, *text.split("=")))
