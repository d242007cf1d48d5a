r"""Rewrites of an answer's text: numbers as people write them, and brackets, rows and lists.

`1\,200`, `1.2e3`, `602 \times 10^{21}`, `2 1/3`, `0.\overline{3}`, `.5`; vectors and arrays as `pmatrix`, `]1,2[`,
`(1;2)`, `x \in (1,2)`, `1 \pm \sqrt 2`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from retrain_rewards.answers.units import NO_UNIT

END = "(?![A-Za-z])"  # of a TeX command


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A pattern and its replacement; `example` is a text and the text that this rewrite by itself makes of it."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    example: tuple[str, str]

    def __call__(self, text: str) -> str:
        return self.pattern.sub(self.replacement, text)


def rewrite(pattern: str, replacement: str | Callable[[re.Match[str]], str], *example: str) -> Rewrite:
    before, after = example
    return Rewrite(re.compile(pattern, re.DOTALL), replacement, (before, after))


def apply(rewrites: Iterable[Rewrite], text: str) -> str:
    for each in rewrites:
        text = each(text)
    return text


_BRACKET = re.compile(r"\\.|[{}()]", re.DOTALL)


def closing(text: str, opening: int) -> int:
    """Return the index that closes the brace or parenthesis at `opening`; -1 if it is never closed."""
    pair = {"{": "{}", "(": "()"}[text[opening]]
    depth = 0
    for match in _BRACKET.finditer(text, opening):
        depth += (match[0] == pair[0]) - (match[0] == pair[1])
        if depth == 0:
            return match.start()
    return -1


def members(text: str, separators: str = ",") -> list[str]:
    """Split a list at the separators outside of all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"\\.|[{{}}()\[\]{separators}]", text, re.DOTALL):
        depth += (match[0] in "{([") - (match[0] in "})]")
        if match[0] in separators and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]]


MAX_PLAIN_EXPONENT = 30  # `6.02 \times 10^{23}` is written out up to here, so that it compares exactly
_EXACT = Context(prec=100)  # more digits than `_POWERS` takes
_DOTS = rf"(?:\.\.\.|\\[lc]?dots{END})"


def _fraction(whole: str, before: str, block: str) -> str:
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
    """Write a whole number up to 10^30; beyond, and below 1, one digit before the point and the power."""
    value, exponent = Decimal(match[1]), int(match[2] or match[3])
    if exponent < 0 or exponent > MAX_PLAIN_EXPONENT or len(match[1]) > MAX_PLAIN_EXPONENT:
        first = value.adjusted() if value else 0
        digits = format(value.scaleb(-first, _EXACT).normalize(_EXACT), "f") if value else "0"
        return rf"{digits} \times 10^{{{exponent + first}}}"
    return format(value.scaleb(exponent, _EXACT), "f") if exponent else match[1]


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


def with_plain_numbers(text: str) -> str:
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
    r"""Write a number in words at the beginning with digits: `\text{two apples}` as `2\text{ apples}`.

    Unchanged if the text holds more than words, or if a later word may change the value: `six or seven`.
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
    """Return the number that begins at a word, and the place behind it; the same place if no number begins there."""
    total, part, scale, end = 0, 0, 10**12, at
    for place in range(at, len(words)):
        word = words[place]
        if (small := _SMALL.get(word)) is not None:
            free = 100 if small >= 10 else 10
            if part % free or (10 <= part % 100 < 20) or (small == 0 and place > at):
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


def column(text: str) -> str:
    rows = r"\\".join(part.strip() for part in re.split("[,;]", text))
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


def pair_as_column(text: str) -> str:
    r"""Write `(1,2)` as a column, to be compared with `\langle 1,2\rangle`; other texts are unchanged."""
    match = re.fullmatch(r"\(([^()]*,[^()]*)\)", text.replace(r"\left", "").replace(r"\right", ""))
    return column(match[1]) if match else text


def _array(match: re.Match[str]) -> str:
    if not match[1] and not re.search(r"&|\\\\", match[2]):
        return match[2]
    name = "cases" if match[1] == r"\{" else "pmatrix"
    return rf"\begin{{{name}}}{match[2]}\end{{{name}}}"


_NAMES: tuple[Rewrite, ...] = (
    rewrite(
        rf"^[^=<>&]{{1,20}}=\s*(?=(?:\\left\s*)?(?:\\langle{END}|<|[(\[]?\s*\\begin\s*\{{(?!cases)))",
        "",
        *(r"\vec v = \langle 1,2\rangle", r"\langle 1,2\rangle"),
    ),
    rewrite(rf"^[A-Za-z]\s*\\in{END}\s*(?=(?:\\left\s*)?(?:[(\[\]]|\\\{{|\\mathbb))", "", r"x \in (1,2)", "(1,2)"),
    rewrite(r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", "", "P(1,2)", "(1,2)"),
)
_VECTORS: tuple[Rewrite, ...] = (
    rewrite(
        rf"^(?:\\left\s*)?(?:\\langle{END}|<)(?!=)([^<>]+?[,;][^<>]+?)(?:\\right\s*)?(?:\\rangle|>)$",
        lambda match: column(match[1]),
        *(r"\langle 1,2\rangle", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ),
    rewrite(
        r"^(?:\\left\s*)?[(\[]([^()\[\]&]+,[^()\[\]&]+?)(?:\\right\s*)?[)\]]\s*\^[\s{]*(?:\\text\{T\}|T|\\top|\\intercal)[\s}]*$",
        lambda match: column(match[1]),
        *(r"[1,2]^\top", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ),
)
_BASIS = re.compile(
    r"\\(?:math(?:bf|rm)|text(?:bf|rm)?|hat|widehat|vec|bar|overrightarrow|boldsymbol|bm)\s*"
    r"(?:\{\s*(?:\\(?:mathbf|text)\s*\{)?\s*\\?([ijk])(?:math)?\s*\}{1,2}|\\([ij])math)"
)
_TERM = re.compile(r"\s*([+-]?)\s*([^@]*?)\s*(?:\\cdot\s*)?@([ijk])\s*")
_ROWS: tuple[Rewrite, ...] = (
    rewrite(rf"\\cr{END}", r"\\\\", r"1\cr 2", r"1\\ 2"),
    rewrite(
        r"(?:\\left\s*)?([(\[]|\\\{)\s*\\begin\s*\{(?:array|matrix)\}\s*(?:\{[^{}]*\})?(.*?)"
        r"\\end\s*\{(?:array|matrix)\}(?:\s*(?:\\right\s*)?(?:[)\]]))?",
        _array,
        *(r"\left[\begin{array}{c}1\\2\end{array}\right]", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ),
    rewrite(
        r"^()\\begin\s*\{array\}\s*\{[^{}]*\}(.*?)\\end\s*\{array\}$",
        _array,
        *(r"\begin{array}{c}1\\2\end{array}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ),
    rewrite(
        r"\\(begin|end)\s*\{(?:[pb]?smallmatrix|[pbB]matrix\*?)\}",
        r"\\\1{pmatrix}",
        *(r"\begin{bmatrix}1\end{bmatrix}", r"\begin{pmatrix}1\end{pmatrix}"),
    ),
    rewrite(r"(?:\\\\|\s)+(?=\\end\s*\{)", " ", r"1&2\\ \end{pmatrix}", r"1&2 \end{pmatrix}"),
)
_LINES = rewrite(
    r"\\(?:begin|end)\s*\{(?:aligned|align|gather|gathered|equation|split|center|flushleft)\*?\}",
    " ",
    *(r"\begin{aligned}x&=5\end{aligned}", " x&=5 "),
)
_INTERVALS: tuple[Rewrite, ...] = (
    rewrite(
        r"^\s*\]([^\[\]()]*[,;][^\[\]()]*)([\[\]])\s*$",
        lambda match: f"({match[1]}{')' if match[2] == '[' else ']'}",
        *("]1,2[", "(1,2)"),
    ),
    rewrite(r"^\s*\[([^\[\]()]*[,;][^\[\]()]*)\[\s*$", r"[\1)", "[1,2[", "[1,2)"),
    rewrite(r"(?<=[(\[])([^()\[\],;]+);([^()\[\],;]+)(?=[)\]])", r"\1,\2", "[1;2]", "[1,2]"),
)
_UNIONS = rewrite(
    r"(?<=[)\]])\s*(?:\\text\{\s*(?:or|and)\s*\}|or|and)\s*(?=\\left|[(\[])",
    r" \\cup ",
    *(r"(-\infty,-1) \text{ or } (2,\infty)", r"(-\infty,-1) \cup (2,\infty)"),
)
_SYSTEM = re.compile(r"^\\begin\s*\{cases\}([^&]*)\\end\s*\{cases\}$", re.DOTALL)


def with_plain_rows(text: str) -> str:
    """Write vectors and arrays as `pmatrix` or `cases`, and `aligned` and systems as lists."""
    text = apply(_VECTORS, apply(_NAMES, text))
    if r"\begin" not in text:
        return text
    text = apply(_ROWS, text)
    if _LINES.pattern.search(text):
        text = _LINES(text).replace("&", "").replace(r"\\", ",")
    rows = match[1].split(r"\\") if (match := _SYSTEM.match(text.strip())) else []
    return ", ".join(row.strip(" ,;.") for row in rows) if rows and all("=" in row for row in rows) else text


def with_plain_vectors(text: str) -> str:
    r"""Write `\mathbf{i} + 2\mathbf{j}` as a column, unless `i` may be the imaginary unit."""
    marked = _BASIS.sub(lambda found: f"@{found[1] or found[2]}", text)
    letters = re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", marked))
    if "@" not in marked and {"i", "j"} <= set(letters) <= set("ijk"):
        marked = re.sub(r"(?<![A-Za-z\\])([ijk])(?![A-Za-z])", r"@\1", marked)
    marked = re.sub(r"^[^=]{1,20}=", "", marked)
    parts: dict[str, str] = {}
    at = 0
    while match := _TERM.match(marked, at):
        if match[3] in parts or len(members(match[2], "+-")) > 1 or (at and not match[1]):
            return text
        parts[match[3]] = match[1].strip("+") + (match[2] or "1")
        at = match.end()
    if at < len(marked) or len(parts) < 2:
        return text
    return column(",".join(parts.get(letter, "0") for letter in "ijk"[: 3 if "k" in parts else 2]))


def with_plain_intervals(text: str) -> str:
    text = apply(_INTERVALS, text)
    return _UNIONS(text) if r"\infty" in text else text


_EITHER = re.compile(rf"\\pm{END}\s*")
_NO_PLUS = re.compile(r"(?:^|[{(\[,=]|\\ne)\s*$")
_IN_BRACES = re.compile(r"^((?:\\left)?\\\{)(.*?)((?:\\right)?\\\})$", re.DOTALL)


def with_both_signs(text: str) -> str:
    r"""Write `\frac{-1 \pm \sqrt5}{2}` as its two values, unless a member has two signs."""
    if not _EITHER.search(text):
        return text
    opening, inside, ending = match.groups() if (match := _IN_BRACES.match(text)) else ("", text, "")
    parts = members(inside)
    for place, part in enumerate(parts):
        signs = list(_EITHER.finditer(part))
        if len(signs) > 1 or (signs and r"\mp" in part):
            return text
        if signs:
            before, after = part[: signs[0].start()], part[signs[0].end() :]
            plus = "" if _NO_PLUS.search(before) else "+"
            again = "" if r"\ne" in before else before  # `k \ne \pm 1` is `k \ne 1, -1`
            parts[place] = f"{before}{plus}{after}, {again}-{after}"
    return f"{opening}{', '.join(part.strip() for part in parts)}{ending}"
