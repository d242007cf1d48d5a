r"""What an answer says beside its value: another spelling, its decimals, its name, the range of its letter.

`\frac{1}{2} \text{ or } 0.5`, `2\sqrt{3} \approx 3.46`, `P(A \cap B) = \frac{1}{2}`, `k\pi, k \in \mathbb{Z}`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from retrain_rewards.answers.rewrite import END, members

_OR = re.compile(
    r"\s*,?\s*\\text\{[\s,;(]*(?:or(?: equivalently)?|equivalently|i\.e\.|that is|which is|which equals)[\s,]*\}\s*"
    r"|\s*\(?(?<![A-Za-z\\])or(?![A-Za-z])\s*"
)
_APPROX = re.compile(rf"^(.+?)\s*\\(?:approx|simeq|doteq){END}\s*((-?\d+(?:\.(\d+))?)\s*(\\?%|\\text\{{[^{{}}]*\}})?)$")
_NO_LETTER = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|(?<![A-Za-z])e(?![A-Za-z])")
_NAME = re.compile(r"^\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*(?:_\s*(?:\w|\{\w+\}))?\s*(?:\([^()]*\))?\s*=(?!=)")
_FOR = r"\\text\{[\s,;(]*(?:where|with|for)?\s*(?:all|any|every|each|some)?\s*(?:real|integers?)?\s*\}"
_CONDITION = re.compile(
    rf"(?:[\s,;(]|{_FOR})+(?P<letter>[A-Za-z])\s*(?P<range>\\in\s*\\mathbb\s*\{{?\s*[ZNR]\s*\}}?|\\ge\s*[01]"
    rf"|\\text\{{\s*(?:is\s+)?an(?:y)?\s+integer\s*\}})\s*\)?$"
    r"|\s*,?\s*(?:\\text\{\s*)?for\s+(?:all|any|every)(?:\s+real|\s+integers?)?[\s}]+(?P<any>[A-Za-z])$"
)
_LIST = re.compile(r"[,;]|\\text|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
MAX_SPELLINGS = 3


def spellings(answer: str) -> list[str]:
    """The members of an answer that are joined by `or` and the like; each has to be the reference."""
    parts = [part.strip() for part in _OR.split(answer)]
    if len(parts) > 1 and parts[-1].endswith(")") and parts[-1].count("(") < parts[-1].count(")"):
        parts[-1] = parts[-1][:-1].rstrip()  # `\text{ (or } 0.5)`
    return parts if 1 < len(set(parts)) == len(parts) <= MAX_SPELLINGS and all(parts) else []


def decimals(answer: str) -> tuple[str, str, str] | None:
    r"""Of `2\sqrt{3} \approx 3.46\text{ cm}` both sides with the unit, and the decimals; None beside a letter."""
    match = _APPROX.match(answer)
    exact = match[1].rpartition("=")[2].strip() if match else ""
    if not match or not exact or re.search("[A-Za-z]", _NO_LETTER.sub("", exact)):
        return None
    if (unit := match[5] or "").endswith("%"):
        return exact, match[2], str(Decimal(match[3]).scaleb(-2))
    return exact if r"\text" in exact else f"{exact}{unit}", match[2], match[3]


def rounds_to(value: Any, digits: str) -> bool:
    """Whether decimals are those of a value, rounded or cut off."""
    last = 10.0 ** -len(digits.partition(".")[2])
    over = abs(value) - abs(float(digits))
    has_sign = value.imag == 0 and value.real * float(digits) >= 0
    return bool(has_sign and -0.5 * last <= over * (1 - 1e-12) < last)


def without_names(reference: str, answer: str) -> tuple[str, str]:
    """Both, without a name that only one of them has, and without conditions on a letter, unless these differ."""
    sides = [reference, answer]
    found = [_CONDITION.search(side) for side in sides]
    if len({(match["letter"], "".join(match["range"].split())) for match in found if match and match["range"]}) < 2:
        sides = [_without_condition(side, match) for side, match in zip(sides, found, strict=True)]
    for place, other in ((0, sides[1]), (1, sides[0])):
        side = sides[place]
        if "=" not in other and len(members(side)) == 1 and (name := _NAME.match(side)):
            value = side[name.end() :].strip()
            sides[place] = side if _LIST.search(value) or "=" in value else value
    return sides[0], sides[1]


def _without_condition(side: str, match: re.Match[str] | None) -> str:
    """A formula without the condition, where its letter occurs in the rest."""
    rest = side[: match.start()].rstrip() if match else side
    is_relation = re.search(rf"[<>]|\\(?:le|ge|ne|text){END}", rest)
    return (
        rest
        if match and not is_relation and re.search(rf"(?<![A-Za-z\\]){match['letter'] or match['any']}", rest)
        else side
    )
