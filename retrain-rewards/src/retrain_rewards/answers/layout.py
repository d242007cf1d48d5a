r"""Brackets, rows and lists: vectors and arrays as `pmatrix`, `]1,2[`, `(1;2)`, `x \in (1,2)`, `1 \pm \sqrt 2`."""

from __future__ import annotations

import re

from retrain_rewards.answers.rewrite import END, Rewrite, apply, members, rewrite


def column(text: str) -> str:
    r"""The members of a text between commas or semicolons as a column: `1, 2` as `\begin{pmatrix}1\\2\end{pmatrix}`."""
    rows = r"\\".join(part.strip() for part in re.split("[,;]", text))
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


def pair_as_column(text: str) -> str:
    r"""`(1,2)` as a column, to be compared with `\langle 1,2\rangle`; other texts unchanged."""
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
REWRITES = (*_NAMES, *_VECTORS, *_ROWS, _LINES, *_INTERVALS, _UNIONS)
_SYSTEM = re.compile(r"^\\begin\s*\{cases\}([^&]*)\\end\s*\{cases\}$", re.DOTALL)


def with_plain_rows(text: str) -> str:
    """The text with its vectors and arrays as `pmatrix` or `cases`, and with `aligned` and systems as lists."""
    text = apply(_VECTORS, apply(_NAMES, text))
    if r"\begin" not in text:
        return text
    text = apply(_ROWS, text)
    if _LINES.pattern.search(text):
        text = _LINES(text).replace("&", "").replace(r"\\", ",")
    rows = match[1].split(r"\\") if (match := _SYSTEM.match(text.strip())) else []
    return ", ".join(row.strip(" ,;.") for row in rows) if rows and all("=" in row for row in rows) else text


def with_plain_vectors(text: str) -> str:
    r"""`\mathbf{i} + 2\mathbf{j}` as a column; a text in which `i` may be the imaginary unit is left as it is."""
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
    """The text with its intervals in the usual brackets, with commas, joined by `\\cup`."""
    text = apply(_INTERVALS, text)
    return _UNIONS(text) if r"\infty" in text else text


_EITHER = re.compile(rf"\\pm{END}\s*")
_NO_PLUS = re.compile(r"(?:^|[{(\[,=]|\\ne)\s*$")
_IN_BRACES = re.compile(r"^((?:\\left)?\\\{)(.*?)((?:\\right)?\\\})$", re.DOTALL)


def with_both_signs(text: str) -> str:
    r"""`\frac{-1 \pm \sqrt5}{2}` as its two values; a member with two signs is left as it is."""
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
