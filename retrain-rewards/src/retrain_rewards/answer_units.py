r"""Units and words around a value: what math-verify drops in silence, `5\text{ cm}` and `5\text{ million}` alike."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from retrain_rewards.boxed import boxed


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _renamed(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


# Counted things, currencies, and (MODIFIERS) what may stand beside them without a value of its own. Physical units and
# their abbreviations are sympy's; any word of the prompt counts too.
NOUNS = _listed(
    """acre animal apple arrangement ball bag book bottle box boy bushel candy car card cat cent chair child choice coin
    color combination cookie cow cube cup decade digit dog dollar edge egg element euro face factor fish flower friend
    gallon game girl group guest handshake horse house integer inhabitant item letter line marble mark match member man
    month number orange ounce outcome page pair path pen pencil penny permutation person piece pint player point problem
    question rectangle revolution room rotation round row rupee run seat set side slice sock soldier solution step stick
    stone student subset team term ticket tile toy tree triangle trip turn unit value vertex vote way week win woman
    word worker yen th st rd am bpm rpm calorie cal kcal gb kb mb tb electronvolt knot"""
)
MODIFIERS = _listed(
    "of old possible positive distinct different whole natural real rational prime ordered unique total 2 3 /"
)
ALIASES = _renamed(
    """metre=meter metres=meter centimetre=centimeter centimetres=centimeter millimetre=millimeter litre=liter
    millimetres=millimeter kilometre=kilometer kilometres=kilometer litres=liter lb=pound lbs=pound gm=gram gms=gram
    in=inch sec=second secs=second min=minute mins=minute hr=hour hrs=hour yr=year yrs=year celsius=C fahrenheit=F
    ev=electronvolt pence=penny pennies=penny children=child men=man women=woman people=person vertices=vertex sq=2
    square=2 squared=2 cu=3 cubic=3 cubed=3 per=/ mph=mile_/_hour kmh=kilometer_/_hour kph=kilometer_/_hour
    kmph=kilometer_/_hour"""
)
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
MAX_WORDS = 6
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
    text = re.sub(r"\b([ap])\s+m\b", r"\1m", text)
    text = re.sub("[A-Za-z]+", lambda word: ALIASES.get(word.group().lower(), word.group()), text).replace("_", " ")
    if _TOKEN.sub("", text).strip(" $-"):
        return None
    names = [_name(token, prompt) for token in _TOKEN.findall(text)]
    if not names and _DEGREES.search(tail):
        return ("degree",)
    return tuple(sorted(names)) if all(names) and set(names) - MODIFIERS and len(names) <= MAX_WORDS else None


def _name(token: str, prompt: str) -> str:
    """The singular of a word that may be part of a unit; empty for others."""
    lower = token.lower()
    if token == "%" or lower in MODIFIERS:
        return "percent" if token == "%" else lower
    if lower in NO_UNIT:
        return ""
    for word in (token, lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name := word if word in NOUNS else _physical(word):
            return name
    if _physical(token[1:]) and token[0] in "kMGTmcdnu":
        return f"{token[0]} {_physical(token[1:])}"
    return lower.removesuffix("s") if len(lower) > 2 and lower in _words(prompt) else ""


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
