r"""Numbers as people write them: `1\,200`, `1.2e3`, `602 \times 10^{21}`, `2 1/3`, `0.\overline{3}`, `.5`, `1200.`."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from retrain_rewards.answer_rewrite import END, Rewrite, apply, rewrite

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


def _mixed(match: re.Match[str]) -> str:
    return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}" if int(match[2]) < int(match[3]) else match[0]


def _mixed_percent(match: re.Match[str]) -> str:
    value = int(match[1]) + Fraction(int(match[2]), int(match[3]))
    if 10**9 % value.denominator == 0:
        return f"{float(value):.9f}".rstrip("0").rstrip(".")
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _joined(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\D", "", match[2])


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
    rewrite(r"(?<![\d.,/^}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", _mixed, "2 1/3", r"2\frac{1}{3}"),
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
