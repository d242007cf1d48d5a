r"""Unicode that stands for TeX: `√5`, `x²`, `½`, `−5`, `４２`, `45°`."""

from __future__ import annotations

import re
import unicodedata

_GREEK = (
    "αβγδεζηθικλνξπρστυφχψωΓΔΘΛΞΠΣΦΨ",
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda nu xi pi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi",
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
    r"\times ": "×",
    r"\div ": "÷",
    r"\pm ": "±",
    r"\mp ": "∓",
    r"\infty ": "∞",
    r"^\circ ": "°º˚",
    r"^\circ C": "℃",
    r"^\circ F": "℉",
    r"\le ": "≤⩽≦",
    r"\ge ": "≥⩾≧",
    r"\ne ": "≠",
    r"\approx ": "≈",
    r"\in ": "∈",
    r"\notin ": "∉",
    r"\cup ": "∪",
    r"\cap ": "∩",
    r"\setminus ": "∖",
    r"\wedge ": "∧",
    r"\vee ": "∨",
    r"\emptyset ": "∅⌀Ø",
    r"\ldots ": "…",
    r"\therefore ": "∴",
    r"\angle ": "∠",
    r"\lfloor ": "⌊",
    r"\rfloor ": "⌋",
    r"\lceil ": "⌈",
    r"\rceil ": "⌉",
    r"\langle ": "⟨〈",
    r"\rangle ": "⟩〉",
    r"\sqrt": "√",
    r"\sqrt[3]": "∛",
    r"\sqrt[4]": "∜",
    **{rf"\mathbb{{{letter}}}": character for letter, character in zip("RZQNC", "ℝℤℚℕℂ", strict=True)},
    **{rf"\{name} ": letter for letter, name in zip(_GREEK[0], _GREEK[1].split(), strict=True)},
    r"\mu ": "μµ",
    r"\Omega ": "ΩΩ",
}
_CHARACTERS = str.maketrans({character: meaning for meaning, group in _MEANINGS.items() for character in group})
_SCRIPTS = ("0123456789+-ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "₀₁₂₃₄₅₆₇₈₉₊₋ₙᵢ")
_RAISED, _LOWERED = (re.compile(f"[{script}]+") for script in _SCRIPTS[1:])
_ON_THE_LINE = str.maketrans(_SCRIPTS[1] + _SCRIPTS[2], 2 * _SCRIPTS[0])
_VULGAR = re.compile("[¼-¾⅐-⅞]")


def in_ascii(text: str) -> str:
    """The text with each known character as TeX; digits and letters of other fonts and scripts become plain ones."""
    if text.isascii():
        return text
    text = _RAISED.sub(lambda run: f"^{{{run[0].translate(_ON_THE_LINE)}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{run[0].translate(_ON_THE_LINE)}}}", text)
    text = _VULGAR.sub(_fraction, text).translate(_CHARACTERS)
    return "".join(character if character.isascii() else _plain_character(character) for character in text)


def _fraction(sign: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", sign[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{above}}}{{{below}}}"


def _plain_character(character: str) -> str:
    folded = unicodedata.normalize("NFKC", character).translate(_CHARACTERS)
    return folded if folded.isascii() else str(unicodedata.decimal(character, character))
