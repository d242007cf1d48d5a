r"""Rewrites an answer or a reference into the TeX that math-verify reads: `√5`, `{\color{red}42}`, `1\,200`.

Each step is a small rewrite with the example that needs it, applied to both sides alike; none changes the value of
mathematics that math-verify reads already. Callers bound the length first (`size.MAX_LENGTH`): the patterns take linear
time, and the scans for matching brackets quadratic time at most.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from retrain_rewards.answers.rewrites import (
    END,
    Rewrite,
    apply,
    closing,
    rewrite,
    with_both_signs,
    with_digits,
    with_plain_intervals,
    with_plain_numbers,
    with_plain_rows,
    with_plain_vectors,
)
from retrain_rewards.answers.units import with_plain_unit

_STYLES = (
    "displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits bf em it rm sf tt sl sc bfseries itshape"
    " rmfamily large Large LARGE huge Huge small footnotesize scriptsize normalsize tiny hfill noindent allowbreak"
    " nobreak strut mathstrut null centering par relax boldmath unskip hline newline middle"
)
_FONTS = "underline emph ensuremath boldsymbol bm pmb bold mathbf mathsf mathtt mathit mathnormal smash uline"
_GAPS = "quad qquad thinspace enspace enskip medspace thickspace negthinspace nobreakspace space"
_FUNCTIONS = "arcsin arccos arctan arccot sinh cosh tanh coth sin cos tan cot sec csc log exp ln lg"


def _one_of(names: str) -> str:
    return f"(?:{'|'.join(names.split())})"


_DECORATION: tuple[Rewrite, ...] = (
    rewrite(r"\\\\\s*\[\s*-?[\d.]+\s*(?:[a-z]{2}|\\[a-z]+)\s*\]", r"\\\\", r"1\\[4pt]2", r"1\\2"),
    rewrite(r"(?<!\\)\$+|(?<!\\)\\[()\[\]]", " ", r"\(42\)", " 42 "),
    rewrite(r"(?<![A-Za-z}\]^_])\{\s*\}", "", "42{}", "42"),
    rewrite(r"^\s*(\*{1,3}|`+|\"|“)(.+?)(?:\1|”)\s*$", r"\2", "**42**", "42"),
    rewrite(r"(?<=\d),\s*\\!\s*(?=\d{3})", ",", r"10,\!000", "10,000"),
    rewrite(
        r"\\(?:textcolor|mathcolor|colorbox|color)\s*(?:\[\w*\])?\s*\{[^{}]*\}|\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}",
        " ",
        *(r"\textcolor{red}{42}", " {42}"),
    ),
    rewrite(
        rf"(?<!\\)\\(?:[,;:! ]|{_one_of(_GAPS)}{END})|~|\\(?:hskip|kern|mskip|mkern)\s*-?[\d.]+\s*[a-z]{{2}}"
        r"|\\(?:hspace|vspace|phantom|hphantom|vphantom|label|tag|rule)\*?\s*\{[^{}]*\}",  # invisible
        " ",
        *(r"\hspace{2mm}~42\,", "  42 "),
    ),
    rewrite(r"(\\(?:left|right))\s+(?=[^A-Za-z\s])", r"\1", r"\left ( 1", r"\left( 1"),
    rewrite(rf"\\{_one_of(_STYLES)}{END}", " ", r"\large 42", "  42"),
    rewrite(rf"\\[bB]igg?[lrm]?{END}\s*", "", r"\bigl\{1\bigr\}", r"\{1\}"),
    rewrite(r"\\(?:left|right)\s*\.", " ", r"\left.42\right.", " 42 "),
    rewrite(
        r"\\(?:text(?:bf|it|rm|sf|tt|sc|sl|md|up|normal)|mbox|hbox|fbox|framebox)\s*(?=\{)|\\text\s+(?=\{)",
        r"\\text",
        *(r"\textbf{B}", r"\text{B}"),
    ),
    rewrite(
        r"\\math(?:bb|cal|frak|scr)\s*\{([-\d.,/\s]+)\}|\s*\\(?:blacksquare|square|Box|qed|checkmark)\s*$",
        lambda match: match[1] or "",
        *(r"\mathcal{42} \square", "42"),
    ),
    rewrite(rf"\\{_one_of(_FONTS)}{END}\s*|\\mathrm\s+(?=[A-Za-z0-9]{END})", " ", r"\underline{42}", " {42}"),
)
_UPRIGHT = re.compile(r"\\(?:mathrm|operatorname\*?|mathop)\s*(?=\{)")
_LETTERS = rewrite(
    r"(\\[A-Za-z]+)|([A-Za-z]+(?:\s+[A-Za-z]+)*)",
    lambda run: run[1] or rf"\text{{{run[2]}}}",
    *(r"m\cdot s^{-2}", r"\text{m}\cdot \text{s}^{-2}"),
)

_ANSWER = r"(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|ans\.?|solution|result)"
_THUS = r"(?:so|thus|hence|therefore),?"
_FRAME = r"(?:there\s+(?:are|is)|(?:we|you)\s+(?:get|have|find|obtain)|a\s+total\s+of|only|exactly)"
_FIRST_WORDS = rewrite(
    rf"(?i)^(?:\\text\{{\s*(?:{_FRAME}\s*)+\}}|{_FRAME}\b|\s|\\therefore{END}|\\(?:implies|Rightarrow){END}|=(?!=)|\\text\{{\s*{_THUS}\s*\}}|\\text\{{[:=\s]*\}}"
    rf"|\\text\{{(?!\s*not)[A-Za-z ]{{2,40}}:\s*\}}"
    rf"|\\text\{{\s*(?:{_THUS}\s*)?{_ANSWER}\s*(?:is|:|=)?[\s:=]*\}}\s*[:=]?"
    rf"|{_ANSWER}\s*(?:is\b|:|=)\s*[:=]?)+",
    "",
    *(r"\text{Answer: }5", "5"),
)
_WORDS_BEFORE = rewrite(
    rf"(?i)^(?:{_ANSWER}|option|choice|it)\s*(?:is\b|:|=|(?=\(?[A-J]\)?\W*$))\s*:?\s*", "", "Option B", "B"
)
_LAST_WORDS = rewrite(
    r"(?i)(?<=[\d)\]}%])(?:\s|\(|\\text\{[\s,(]*)+(?:only|exactly|in (?:all|total)|altogether)[\s.,)}]*$",
    "",
    *(r"x=3\text{ only}", "x=3"),
)
_LAST_SIGNS = rewrite(r"(?:\s|(?<!\.\.)\.|,|;|\\(?=\s|\\|$)|\\text\{[\s.,;]*\})+$", "", r"42 .\\", "42")
_ONLY_TEXT = re.compile(r"^\\text\{([^{}]*)\}$")

_SPELLING: tuple[Rewrite, ...] = (
    rewrite(rf"\\text\{{\s*({_one_of(_FUNCTIONS)})\s*\}}", r"\\\1 ", r"\text{ln}(2)", r"\ln (2)"),
    rewrite(r"\\text\{\s*([ei])\s*\}", r" \1", r"4\text{i}", "4 i"),
    rewrite(rf"(?<![A-Za-z\\])({_one_of(_FUNCTIONS)}|sqrt|pi){END}", r"\\\1 ", "2pi", r"2\pi "),
    rewrite(r"(?<![A-Za-z}\]^_])\{\s*([ei])\s*\}", r"\1", r"3+4 {i}", r"3+4 i"),
    rewrite(rf"\\(?:[dtc]frac|nicefrac|sfrac){END}", r"\\frac", r"\tfrac12", r"\frac12"),
    rewrite(r"\\frac\{([^{}=]+)\}\{1\}(?=[^=]*=\s*1$)", r"(\1)", r"\frac{y^2}{1} = 1", "(y^2) = 1"),  # of an ellipse
    rewrite(r"(\w+)\s*\\choose\s*(\w+)", r"\\binom{\1}{\2}", r"10 \choose 3", r"\binom{10}{3}"),
    rewrite(rf"\\(?:leqslant|leqq|leq){END}", r"\\le", r"x\leq 3", r"x\le 3"),
    rewrite(rf"\\(?:geqslant|geqq|geq){END}", r"\\ge", r"x\geqslant 3", r"x\ge 3"),
    rewrite(rf"\\neq{END}", r"\\ne", r"x\neq 3", r"x\ne 3"),
    rewrite(rf"\\lt{END}", "<", r"x\lt 3", "x< 3"),
    rewrite(rf"\\gt{END}", ">", r"x\gt 3", "x> 3"),
    rewrite(rf"\\(?:varnothing|empty){END}", r"\\emptyset", r"\varnothing", r"\emptyset"),
    rewrite(rf"\\lbrace{END}", r"\\{", r"\lbrace 1", r"\{ 1"),
    rewrite(rf"\\rbrace{END}", r"\\}", r"1\rbrace", r"1\}"),
    rewrite(rf"\\lbrack{END}", "[", r"\lbrack 1", "[ 1"),
    rewrite(rf"\\rbrack{END}", "]", r"1\rbrack", "1]"),
    rewrite(rf"\\[ij]math{END}", "i", r"4\imath", "4i"),
    rewrite(rf"\\colon{END}", ":", r"3\colon 4", "3: 4"),
    rewrite(rf"\\degree{END}|(?<=\d)\s*\^\s*(?:\{{o\}}|o{END})", r"^\\circ", r"45\degree, 45^o", r"45^\circ, 45^\circ"),
    rewrite(rf"\\(?:dots|dotsc|cdots){END}", r"\\ldots", r"1,\dots,9", r"1,\ldots,9"),
    rewrite(
        rf"\\text\{{\s*infinity\s*\}}|(?<![A-Za-z\\])(?:infinity|oo){END}", r"\\infty ", r"\text{infinity}", r"\infty "
    ),
    rewrite(rf"\\log\s*_\s*(?:\{{\s*e\s*\}}|e{END})", r"\\ln ", r"\log_e 2", r"\ln  2"),
    rewrite(rf"\\lg{END}", r"\\log_{10}", r"\lg 5", r"\log_{10} 5"),
    rewrite(
        r"\\(gcd|lcm)\s*(?=\([^()]*[A-Za-z])",  # math-verify computes 1 of two letters
        r"\\text{\1}",
        *(r"\gcd(a,b)", r"\text{gcd}(a,b)"),
    ),
    rewrite(r"\*\*", "^", "x**2", "x^2"),
    rewrite(r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r" \\cdot ", "2*x", r"2 \cdot x"),
    rewrite(rf"(?<=\d)\s*\\cdot\s+(?=i{END})|(?<=\d)\s+(?=i$)", "", r"3+4\cdot i", "3+4i"),
    rewrite(rf"(?<![\d.A-Za-z^_])1(?=i{END})", "", "14-1i", "14-i"),
    rewrite(r"([\])])\s*U\s*(?=[\[(])", r"\1 \\cup ", "[1,2]U[3,4]", r"[1,2] \cup [3,4]"),
    rewrite(r"(?<=[\d%}])\s+(of\s+[a-z]+\s[a-z ]+)$", r"\\text{ \1}", "70% of the voters", r"70%\text{ of the voters}"),
    rewrite(r"\\text\{\s*\\\$\s*\}", r"\\$", r"\text{\$}5", r"\$5"),
    rewrite(r"(?<=\d)\s+to\s+(?=\d)|\s*\\text\{\s*to\s*\}\s*", ":", r"3 \text{ to } 4", "3:4"),
    rewrite(r"\\text\{([^{}A-Za-z]*)\}", lambda kept: kept[1] or " ", r"\text{42}", "42"),
)


@lru_cache(maxsize=4096)
def plain(formula: str) -> str:
    """Rewrite a formula; the result is empty if nothing in it is visible."""
    text = in_ascii(formula)
    if r"\begin" not in text:
        text = re.sub(r"\\(?=\\[A-Za-z]{2})", "", text)  # escaped twice, out of a JSON file
    text = apply(_DECORATION, with_plain_vectors(text))
    for found in reversed(list(_UPRIGHT.finditer(text))):  # `\mathrm{m\,s^{-2}}`, inner commands first
        if (end := closing(text, found.end())) > 0:  # letters upright, the rest as mathematics
            text = text[: found.start()] + _LETTERS(text[found.end() + 1 : end]) + text[end + 1 :]
    text = _LAST_SIGNS(_without_surplus_braces(text.strip()))
    if match := _ONLY_TEXT.match(text):  # `\text{5 cm}`, `\text{Answer: B.}`
        text = _LAST_SIGNS(match[1])
    text = _LAST_SIGNS(_LAST_WORDS(_WORDS_BEFORE(_FIRST_WORDS(text).strip())))
    text = with_digits(text)
    text = with_plain_rows(_without_surplus_braces(text))
    text = _with_braced_roots(apply(_SPELLING, text))
    text = with_plain_intervals(with_plain_numbers(" ".join(text.split())))
    return with_plain_unit(with_both_signs(text.strip()))


def _without_surplus_braces(text: str) -> str:
    pairs: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            pairs[opened.pop()] = match.start()
    surplus = {at for start, end in pairs.items() if pairs.get(start + 1) == end - 1 for at in (start + 1, end - 1)}
    start, end = 0, len(text) - 1
    while pairs.get(start) == end:
        surplus |= {start, end}
        start, end = start + 1, end - 1
    return "".join(character for at, character in enumerate(text) if at not in surplus) if surplus else text


_ROOT = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*(?:(\()|(\d+(?:\.\d+)?|[A-Za-z](?![A-Za-z])))")


def _with_braced_roots(text: str) -> str:
    r"""Put braces into `\sqrt(x+1)` and `\sqrt 12`, from `√(x+1)` and `√12`: math-verify would take one digit."""
    at = 0
    while match := _ROOT.search(text, at):
        end = closing(text, match.start(2)) if match[2] else match.end() - 1
        if end < 0:
            break
        inside = text[match.start(2) + 1 : end] if match[2] else match[3]
        text = f"{text[: match.start()]}\\sqrt{match[1] or ''}{{{inside}}}{text[end + 1 :]}"
        at = match.start() + len(r"\sqrt")
    return text


_COMMANDS = (  # characters, and the command of each
    "αβγδεζηθικλνξπρστυφχψωΓΔΘΛΞΠΣΦΨ×÷±∓∞≠≈∈∉∪∩∖∧∨…∴∠⌊⌋⌈⌉",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda nu xi pi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi times div pm mp infty ne approx in notin cup cap setminus wedge vee "
    "ldots therefore angle lfloor rfloor lceil rceil",
)
_MEANINGS = {  # TeX or ASCII, and the characters that mean it
    "-": "−–—‒―﹣－‐‑⁃",
    " ": "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000",
    "": "\u200b\u200c\u200d\u2060\ufeff\u00ad",
    "*": "∗＊",
    "/": "⁄∕",
    ":": "∶：",
    "|": "∣❘",
    "'": "′’",
    r"\%": "％",
    r"\cdot ": "⋅·∙•",
    r"^\circ ": "°º˚",
    r"^\circ C": "℃",
    r"^\circ F": "℉",
    r"\le ": "≤⩽≦",
    r"\ge ": "≥⩾≧",
    r"\emptyset ": "∅⌀Ø",
    r"\langle ": "⟨〈",
    r"\rangle ": "⟩〉",
    r"\sqrt": "√",
    r"\sqrt[3]": "∛",
    r"\sqrt[4]": "∜",
    **{rf"\mathbb{{{letter}}}": character for letter, character in zip("RZQNC", "ℝℤℚℕℂ", strict=True)},
    **{rf"\{name} ": character for character, name in zip(_COMMANDS[0], _COMMANDS[1].split(), strict=True)},
    r"\mu ": "μµ",
    r"\Omega ": "ΩΩ",
}
_CHARACTERS = str.maketrans({character: meaning for meaning, group in _MEANINGS.items() for character in group})
_SCRIPTS = ("0123456789+-ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢ")
_RAISED, _LOWERED = (re.compile(f"[{script}]+") for script in _SCRIPTS[1:])
_ON_THE_LINE = str.maketrans(_SCRIPTS[1] + _SCRIPTS[2], 2 * _SCRIPTS[0])
_VULGAR = re.compile("[¼-¾⅐-⅞]")


def in_ascii(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda run: f"^{{{run[0].translate(_ON_THE_LINE)}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{run[0].translate(_ON_THE_LINE)}}}", text)
    text = _VULGAR.sub(_fraction, text).translate(_CHARACTERS)
    plain = []
    for character in text:
        folded = unicodedata.normalize("NFKC", character).translate(_CHARACTERS)
        plain.append(folded if folded.isascii() else str(unicodedata.decimal(character, character)))
    return "".join(plain)


def _fraction(sign: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"
