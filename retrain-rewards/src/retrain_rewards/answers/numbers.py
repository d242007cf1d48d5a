r"""Numbers as people write them: `1\,200`, `1.2e3`, `602 \times 10^{21}`, `2 1/3`, `0.\overline{3}`, `.5`, `1200.`."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from retrain_rewards.answers.rewrite import END, Rewrite, apply, rewrite
from retrain_rewards.answers.units import NO_UNIT

MAX_PLAIN_EXPONENT = 30  # `6.02 \times 10^{23}` is written out up to here, so that it compares exactly
_DOTS = rf"(?:\.\.\.|\\[lc]?dots{END})"


def _fraction(whole: str, before: str, block: str) -> str:
    """The value of `whole.before` and then `block` without end."""
    scale = 10 ** len(before)
    value = Fraction(int((whole + before) or "0"), scale) + Fraction(int(block), scale * (10 ** len(block) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def _repeated(match: re.Match[str]) -> str:
    first, between, last = match["first"] or "", match["between"] or "", match["last"] or ""
    block = match["braced"] or match["digit"] or match["round"] or first + between + last
    return _fraction(match["whole"], match["before"], block)


def _continued(match: re.Match[str]) -> str:
    found = re.search(r"(\d{1,13}?)\1\1+$", match[2])
    return _fraction(match[1], match[2][: found.start()], found[1]) if found else match[0]


def _mixed_percent(match: re.Match[str]) -> str:
    value = int(match[1]) + Fraction(int(match[2]), int(match[3]))
    if 10**9 % value.denominator == 0:
        return f"{float(value):.9f}".rstrip("0").rstrip(".")
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _joined(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _power_of_ten(match: re.Match[str]) -> str:
    """A whole number up to 10^30; beyond, and below 1, one digit before the point and the power."""
    value, exponent = Decimal(match[1]), int(match[2] or match[3])
    if exponent < 0 or exponent > MAX_PLAIN_EXPONENT or len(match[1]) > MAX_PLAIN_EXPONENT:
        first = value.adjusted() if value else 0
        digits = format(value.scaleb(-first).normalize(), "f") if value else "0"
        return rf"{digits} \times 10^{{{exponent + first}}}"
    return format(value.scaleb(exponent), "f") if exponent else match[1]


_POINTS: tuple[Rewrite, ...] = (
    rewrite(
        r"(?<![\d.])(?P<whole>\d*)\.(?P<before>\d*)"
        r"(?:\\(?:overline|bar)\s*(?:\{\s*(?P<braced>\d+)\s*\}|(?P<digit>\d)(?!\d))|\((?P<round>\d+)\)(?!\d)"
        r"|\\dot\s*\{?\s*(?P<first>\d)\s*\}?(?:(?P<between>\d*)\\dot\s*\{?\s*(?P<last>\d)\s*\}?)?)"
        rf"(?:\s*{_DOTS})?",
        _repeated,
        *(
            r"0.1\overline{6}, 0.\bar 3, 0.(27), 0.\dot{1}2\dot{3}",
            r"\frac{1}{6}, \frac{1}{3}, \frac{3}{11}, \frac{41}{333}",
        ),
    ),
    rewrite(rf"(?<![\d.])(\d*)\.(\d{{3,40}})\s*{_DOTS}$", _continued, r"0.1666\ldots", r"\frac{1}{6}"),
    rewrite(r"(?<![\d.}\w])\.(?=\d)", "0.", "-.5", "-0.5"),
    rewrite(r"(?<=\d)\.(?![\d.])(?=\s*(?:$|[,;)\]}\\&]))", "", "(1., 2.)", "(1, 2)"),
)
_PERCENT: tuple[Rewrite, ...] = (
    rewrite(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", r"33\frac13\%", r"33\frac{1}{3}\%"),
    rewrite(
        r"(?<![\d.,/^}])(\d{1,9})\s*\\frac\{(\d{1,9})\}\{([1-9]\d{0,8})\}(?=\s*\\?%)",
        _mixed_percent,
        *(r"33\frac{1}{3}\%", r"\frac{100}{3}\%"),
    ),
)
_GROUPS: tuple[Rewrite, ...] = (
    rewrite(
        r"(?<![\d.,/^}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])",
        lambda m: rf"{m[1]}\frac{{{m[2]}}}{{{m[3]}}}" if int(m[2]) < int(m[3]) else m[0],
        *("2 1/3", r"2\frac{1}{3}"),
    ),
    rewrite(
        r"(?<![\d.,])(\d{1,3})((?:(?:\s*\{,\}\s*|[\s'])\d{3})+)(?!\d|,\d)", _joined, "1 200, 3{,}400", "1200, 3400"
    ),
    rewrite(r"(?<![\d,.])(\d{1,2})((?:,00)+,\d{3})(?![\d,])", _joined, "1,00,000", "100000"),
)
_SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE_WORDS = rewrite(
    r"(\d)\s*(?:\\text\{\s*)?(thousand|million|billion|trillion)(?![A-Za-z])\s*\}?",
    lambda match: rf"{match[1]} \times 10^{{{_SCALES[match[2]]}}}",
    *(r"4.5\text{ billion}", r"4.5 \times 10^{9}"),
)
_COMMA_GROUPS = rewrite(r"(?<![\d,.])(\d{1,3})((?:,\d{3})+)(?!\d|,\d)", _joined, "1,200 x", "1200 x")
_POWERS: tuple[Rewrite, ...] = (
    rewrite(
        r"(?<![\w.}\\^])(\d+(?:\.\d*)?)[eE]([+-]?\d{1,4})(?![\w.])",
        r"\1 \\times 10^{\2}",
        "6.02e23",
        r"6.02 \times 10^{23}",
    ),
    rewrite(
        r"(?<![\w.}\\^)/])(\d{1,40}(?:\.\d{1,40})?)\s*(?:\\times|\\cdot|[xX*])\s*10\s*\^\s*"
        r"(?:\{\s*([+-]?\d{1,9})\s*\}|([+-]?\d{1,9}))(?![\w.^!])",
        _power_of_ten,
        *(r"602 \times 10^{21}, 16 \cdot 10^{-20}", rf"602{'0' * 21}, 1.6 \times 10^{{-19}}"),
    ),
)
REWRITES = (*_POINTS, *_PERCENT, *_GROUPS, _COMMA_GROUPS, _SCALE_WORDS, *_POWERS)


def with_plain_numbers(text: str) -> str:
    """The text with its numbers as math-verify reads them."""
    if "." in text:
        text = apply(_POINTS, text)
    if "%" in text:
        text = apply(_PERCENT, text)
    text = apply(_GROUPS, text)
    # `(1,200)` is a pair, and so is `1,2`; in `1,200, 3,400` the other commas have a space
    if (
        "," in text
        and not re.search(r"[(\[]|\\\{", text)
        and not re.search(r",\S", _COMMA_GROUPS.pattern.sub("", text))
    ):
        text = _COMMA_GROUPS(text)
    return apply(_POWERS, _SCALE_WORDS(text))


_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SMALL = {word: value for value, word in enumerate(_ONES)} | {
    word: 10 * value for value, word in enumerate(_TENS, start=2)
}
_WORD_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
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
        elif word in _WORD_SCALES and part and _WORD_SCALES[word] < scale:
            scale = _WORD_SCALES[word]
            total, part = total + part * scale, 0
        elif word == "and" and place > at and words[place - 1] in ("hundred", *_WORD_SCALES):
            continue
        else:
            break
        end = place + 1
    return total + part, end
