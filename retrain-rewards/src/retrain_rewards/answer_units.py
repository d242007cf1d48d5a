r"""Units and words around a value: what math-verify drops in silence, `5\text{ cm}` and `5\text{ million}` alike."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from retrain_rewards.boxed import boxed


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


# Counted things and currencies; physical units and their abbreviations are sympy's. Any word of the prompt counts too.
NOUNS = _listed(
    """acre animal apple arrangement ball bag book bottle box boy bushel candy car card cat cent chair child children
    choice coin color combination cookie cow cube cup decade digit dog dollar edge egg element euro face factor fish
    flower friend gallon game girl group guest handshake horse house integer inhabitant item letter line marble mark
    match member men man month orange ounce outcome page pair path pen pencil penny pence people permutation person
    piece pint player point problem question rectangle revolution room rotation round row rupee run seat set side
    slice soldier solution step stick stone student subset team term ticket tile toy tree triangle trip turn unit
    value vertex vertices vote way week win woman women word worker yen th st rd"""
)
ALIASES = {
    word: name
    for name, words in {
        "meter": "metre",
        "centimeter": "centimetre",
        "millimeter": "millimetre",
        "kilometer": "kilometre",
        "liter": "litre",
        "milliliter": "millilitre",
        "pound": "lb lbs",
        "gram": "gm",
        "inch": "in",
        "second": "sec",
        "minute": "min",
        "hour": "hr",
        "year": "yr",
        "C": "celsius",
        "F": "fahrenheit",
        "penny": "pence",
        "child": "children",
        "man": "men",
        "woman": "women",
        "person": "people",
        "vertex": "vertices",
        "2": "sq square squared",
        "3": "cu cubic cubed",
        "/": "per",
    }.items()
    for word in words.split()
}
# A word that changes, negates or doubles a value is never a unit, wherever it stands.
NO_UNIT = _listed(
    """no not non none never neither nor nope wrong false incorrect except without minus negative plus times or and but
    maybe perhaps possibly either if unless otherwise else actually wait versus to until about approximately approx
    roughly nearly almost around over under more less least most than half third quarter double twice triple dozen
    score hundred thousand million billion trillion ten one two three four five six seven eight nine eleven twelve
    factorial modulo mod percent is are was be equals equal"""
)
_NEGATIONS = _listed("no not non never neither nor nope wrong false incorrect maybe perhaps possibly either")
_TEXT = re.compile(r"\\(?:text|mbox|math)(?:rm|it|bf|normal|sf|tt)?\s*\{([^{}]*)\}")
_SIGNS = re.compile(r"\\[,;:! ]|\\(?:thinspace|quad|text|mbox)\b|[{}^~\s.]+")
_TOKEN = re.compile(r"[A-Za-z]+|[23](?![0-9])|[/%]")
_DEGREES = re.compile(r"\\circ|\\degree|°")
_VARIABLE = re.compile(r"[a-z]{1,2}")


@lru_cache(maxsize=4096)
def dropped(formula: str) -> str:
    """The end of a formula that math-verify takes for a unit and drops."""
    whole, kept = (_normalized(formula, units=units) for units in (False, True))
    return whole[len(kept) :].strip() if whole.startswith(kept) else whole


def objection_to_words(reference: str, answer: str, prompt: str) -> str:
    """Why what stands around the value makes it no answer (`... is no unit`); empty when it is harmless.

    A unit is harmless that the reference has too, or where one of the two leaves it out.
    """
    tail, expected = dropped(answer), dropped(reference)
    if tail != expected and tail and _unit(tail, prompt) is None:
        return f"{tail!r} is no unit"
    unit, wanted = _unit_of(answer, tail, prompt), _unit_of(reference, expected, prompt)
    is_variable = wanted is None and bool(_VARIABLE.fullmatch(expected))
    if expected and not tail and (is_variable or _words(expected) & NO_UNIT):
        return f"{expected!r} is missing"
    if tail != expected and unit and (wanted or expected) and unit != wanted:
        return "it has another unit"
    for word in _words(answer) & _NEGATIONS - _words(reference):
        return f"it says {word!r}"
    if not _TEXT.search(answer):
        return ""
    return _objection_inside(_normalized(answer, units=True), reference, prompt)


def _objection_inside(kept: str, reference: str, prompt: str) -> str:
    for match in _TEXT.finditer(kept):
        words = match.group(1).strip()
        is_all = not re.sub(r"[\s(){}.$]", "", kept[: match.start()] + kept[match.end() :])
        is_name = "=" in kept[match.end() :]  # `\text{Area} = 5`
        if not (is_all or is_name or len(words) < 2 or words in reference or _unit(words, prompt)):
            return f"{words!r} is no part of a value"
    return ""


def _unit_of(formula: str, tail: str, prompt: str) -> tuple[str, ...] | None:
    if tail:
        return _unit(tail, prompt)
    if _DEGREES.search(formula):
        return ("degree",)
    return ("dollar",) if r"\$" in formula else ("percent",) if formula.rstrip(" .$").endswith("%") else None


def _unit(tail: str, prompt: str) -> tuple[str, ...] | None:
    """The unit, the same for each of its spellings; None for anything else."""
    text = _DEGREES.sub("", _SIGNS.sub(" ", tail.replace(r"\$", " dollar ").replace(r"\%", "%")))
    if _TOKEN.sub("", text).strip(" $-"):
        return None
    names = [_name(token, prompt) for token in _TOKEN.findall(text)]
    return None if len(names) > 6 or not all(names) else tuple(sorted(name for name in names if name)) or ("degree",)


def _name(token: str, prompt: str) -> str:
    lower = token.lower()
    if token in "23/%":
        return "percent" if token == "%" else token
    for word in (token, ALIASES.get(lower, lower), lower.removesuffix("s"), lower.removesuffix("es")):
        word = ALIASES.get(word, word)
        if word in "23/" or word in NOUNS:
            return word
        if name := _physical(word):
            return name
    return lower.removesuffix("s") if len(lower) > 2 and lower not in NO_UNIT and lower in _words(prompt) else ""


@lru_cache(maxsize=4096)
def _physical(word: str) -> str:
    from sympy.physics import units
    from sympy.physics.units.quantities import PhysicalConstant, Quantity

    found: Any = getattr(units, word, None)
    is_unit = isinstance(found, Quantity) and not isinstance(found, PhysicalConstant)
    return str(found.name) if is_unit and word not in ("percents", "permille", "t", "v", "me", "us") else ""


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text))


@lru_cache(maxsize=4096)
def _normalized(formula: str, *, units: bool) -> str:
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex

    config: Any = NormalizationConfig(units=units, malformed_operators=False, nits=False, boxed="last")
    return str(normalize_latex(boxed(formula), config))
