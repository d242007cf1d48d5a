"""Numbers in words: `seven`, `twenty-one`, `two thirds`, `one hundred and five apples`."""

from __future__ import annotations

import re

from retrain_rewards.answer_units import NO_UNIT

_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_SMALL = {word: value for value, word in enumerate(_ONES)} | {
    word: 10 * value
    for value, word in enumerate(
        ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"), start=2
    )
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_PARTS = ("half", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_DENOMINATORS = {"quarter": 4, "halve": 2} | {word: value for value, word in enumerate(_PARTS, start=2)}
_GROUP = re.compile(r"\\text\s*\{([^{}]*)\}")


def with_digits(text: str) -> str:
    r"""A text that begins with a number in words, with digits: `\text{two apples}` as `2\text{ apples}`.

    Unchanged where it holds anything but words, and where what follows may change the value: `six or seven`.
    """
    flat = _GROUP.sub(r" \1 ", text).strip()
    if not re.fullmatch(r"[A-Za-z][A-Za-z\s-]*", flat):
        return text
    words = [word for word in re.split(r"[\s-]+", flat.casefold()) if word]
    sign = "-" if words[0] in ("minus", "negative") else ""
    at = len(sign)
    value, end = _number(words, at)
    if end == at:
        return text
    below = _DENOMINATORS.get(words[end].removesuffix("s")) if end < len(words) else None
    rest = words[end + (below is not None) :]
    if any(word in NO_UNIT or word in _SMALL or word.removesuffix("s") in _DENOMINATORS for word in rest):
        return text
    number = rf"\frac{{{value}}}{{{below}}}" if below else str(value)
    return f"{sign}{number}" + (rf"\text{{ {' '.join(rest)}}}" if rest else "")


def _number(words: list[str], at: int) -> tuple[int, int]:
    """The number that begins at a word, and the place behind it; the same place where none does."""
    total, part, scale, end = 0, 0, 10**12, at
    for place in range(at, len(words)):
        word = words[place]
        if (small := _SMALL.get(word)) is not None:
            free = 100 if small >= 10 else 10
            if part % free or (10 < part % 100 < 20) or (part % 100 == 10) or (small == 0 and place > at):
                break
            part += small
        elif word == "hundred" and 0 < part < 10:
            part *= 100
        elif word in _SCALES and part and _SCALES[word] < scale:
            scale = _SCALES[word]
            total, part = total + part * scale, 0
        elif word == "and" and place > at and words[place - 1] in ("hundred", *_SCALES):
            continue
        else:
            break
        end = place + 1
    return total + part, end
