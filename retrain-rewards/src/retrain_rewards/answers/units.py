r"""Units and words around a value: math-verify silently drops `5\text{ cm}` and `5\text{ million}` alike."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from retrain_rewards.boxed import boxed


def _listed(words: str) -> frozenset[str]:
    return frozenset(words.split())


def _renamed(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


# Counted things, currencies, and (MODIFIERS) words next to them without a value. Physical units and
# their abbreviations are sympy's; any word of the prompt counts too.
NOUNS = _listed(
    """acre animal apple arrangement ball bag book bottle box boy bushel candy car card cat cent chair child choice coin
    color combination cookie cow cube cup decade digit dog dollar edge egg element euro face factor fish flower friend
    gallon game girl group guest handshake horse house integer inhabitant item letter line marble mark match member man
    month number orange ounce outcome page pair path pen pencil penny permutation person piece pint player point problem
    question rectangle revolution room rotation round row rupee run seat set side slice sock soldier solution step stick
    stone student subset team term ticket tile toy tree triangle trip turn unit value vertex vote way week win woman
    word worker yen th st rd am bpm rpm calorie cal kcal gb kb mb tb electronvolt knot ton tonne hectare"""
)
MODIFIERS = _listed(
    "of old possible positive distinct different whole natural real rational prime ordered unique total"
)
ALIASES = _renamed(
    """metre=meter metres=meter centimetre=centimeter centimetres=centimeter millimetre=millimeter litre=liter
    millimetres=millimeter kilometre=kilometer kilometres=kilometer litres=liter lb=pound lbs=pound gm=gram gms=gram
    in=inch sec=second secs=second min=minute mins=minute hr=hour hrs=hour yr=year yrs=year celsius=C fahrenheit=F
    ev=electronvolt pence=penny pennies=penny children=child men=man women=woman people=person vertices=vertex sq=#2
    square=#2 squared=2 cu=#3 cubic=#3 cubed=3 per=/ mph=mile_/_hour kmh=kilometer_/_hour kph=kilometer_/_hour
    kmph=kilometer_/_hour mps=meter_/_second usd=dollar eur=euro gbp=pound rs=rupee mi=mile deg=degree degs=degree
    sqft=#2_foot ml=milliliter oz=ounce yd=yard tonnes=tonne"""
)
PREFIXES = _renamed("kilo=k mega=M giga=G tera=T milli=m micro=u nano=n centi=c deci=d")
# A word that changes, negates or doubles a value is never a unit, at any place.
NO_UNIT = _listed(
    """no not non none never neither nor nope wrong false incorrect except without minus negative plus times or and but
    maybe perhaps possibly either if unless otherwise else actually wait versus to until about approximately approx
    roughly nearly almost around over under more less least most than half third quarter double twice triple dozen
    score hundred thousand million billion trillion ten one two three four five six seven eight nine eleven twelve
    factorial modulo mod percent is are was be equals equal"""
)
_NEGATIONS = _listed(
    """no not non never neither nor nope wrong false incorrect maybe perhaps possibly either if unless about
    approximately approx roughly nearly almost around"""
)
_TEXT = re.compile(r"\\(?:text|mbox|math)(?:rm|it|bf|normal|sf|tt)?\s*\{([^{}]*)\}")
_SIGNS = re.compile(r"\\[,;:! ]|\\(?:thinspace|quad|text|mbox)\b|[{}^~\s.]+")
_TOKEN = re.compile(r"#[23]|[A-Za-z]+|\^?\s*-?[1-4](?![0-9])|[/%()]")
_OF_WHAT = re.compile(
    r"(?:\\text\{)?\s*(?<![A-Za-z])of\s+((?:the|all|these|those|them|us|its|his|her|their|your|an?)(?:\s+[A-Za-z]+){0,4})\}?$"
)
MAX_WORDS = 6
_DEGREES = re.compile(r"\\circ|\\degree|°")
_VARIABLE = re.compile(r"[a-z]{1,2}")
_DIVIDED = re.compile(r"\\frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_JOINED = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[*·]")
_PIECE = re.compile(r"\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]+|\d+|.", re.DOTALL)
_IN_UNITS = frozenset({r"\frac", r"\cdot", r"\times", r"\mu", r"\circ", r"\Omega"})
_CELSIUS = re.compile(r"\^\s*\{?\s*\\circ\s*\}?\s*\\?(?:text)?\{?\s*[CFK]")
_CLOCK = re.compile(r"(?<![A-Za-z])[apAP]\.?\s*[mM]\b\.?")
_METRES = re.compile(r"m\s*\^\s*\{?[23]\}?$")
# `4ab`, whose end math-verify takes for a unit
_VARIABLES = re.compile(r"(?:(?<=[\d}])\s*|(?<=[A-Za-z])\s+)(?!(?:th|st|nd|rd|i|e)$)([A-Za-z]{1,3})$")
_HAS_VALUE = re.compile(r"\d|\\(?:pi|sqrt|frac|infty)")
_CURRENCIES = _renamed("€=euros £=pounds ¥=yen ₹=rupees USD=dollars Rs.=rupees Rs=rupees")
_CURRENCY = re.compile(r"^(-?)\s*(€|£|¥|₹|USD|Rs\.|Rs)\s*(\d[\d,.]*)$")
Unit = tuple[tuple[str, int], ...]  # names with their powers


@lru_cache(maxsize=4096)
def dropped(formula: str) -> str:
    """Return the end of a formula that math-verify takes for a unit and drops."""
    whole, kept = (_normalized(formula, units=units) for units in (False, True))
    return whole[len(kept) :].strip() if whole.startswith(kept) else whole


def objection_to_words(reference: str, answer: str, prompt: str) -> str:
    """Return why the words around a value make it no answer; a unit that only one side has is harmless."""
    (tail, of_what), (expected, wanted_of) = _tail(answer), _tail(reference)
    if of_what and wanted_of and of_what != wanted_of:
        return "it is a part of something else"
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
    kept = _normalized(answer, units=True) if _TEXT.search(answer) else ""
    for match in _TEXT.finditer(kept):
        words = match.group(1).strip()
        is_all = not re.sub(r"[\s(){}.$]", "", kept[: match.start()] + kept[match.end() :])
        is_name = "=" in kept[match.end() :]  # `\text{Area} = 5`
        if not (is_all or is_name or len(words) < 2 or words in reference or _unit(words, prompt)):
            return f"{words!r} is no part of a value"
    return ""


def _tail(formula: str) -> tuple[str, str]:
    r"""Return the text after a value, and the whole it is a part of: the end of `70\% \text{ of the voters}`."""
    tail = dropped(formula)
    match = _OF_WHAT.search(tail)
    if not match or _words(match[0]) & NO_UNIT:
        return tail, ""
    return tail[: match.start()].strip(), " ".join(match[1].split())


def _unit_of(formula: str, tail: str, prompt: str) -> Unit | None:
    if tail:
        return _unit(tail, prompt)
    if _DEGREES.search(formula):
        return (("degree", 1),)
    if r"\$" in formula:
        return (("dollar", 1),)
    return (("percent", 1),) if formula.rstrip(" .$").endswith("%") else None


def _unit(tail: str, prompt: str) -> Unit | None:
    """Return names and powers of a unit, the same for each of its spellings; None for anything else.

    Names after a `/` or `per` are below it, up to a closing parenthesis: `km/h`, `m/s^2`, `(kg m)/s`.
    """
    flat = re.sub(r"\\mu\s*(?:\\text\s*\{\s*)?", " u", tail)
    flat = _DIVIDED.sub(r" \1 / ( \2 ) ", flat.replace(r"\$", " dollar ").replace(r"\%", "%"))
    text = _DEGREES.sub("", _SIGNS.sub(" ", _JOINED.sub(" ", flat.replace(r"\Omega", " ohm"))))
    text = re.sub(r"\b([ap])\s+m\b", r"\1m", text).replace("^ ", "^")
    text = re.sub("[A-Za-z]+", lambda word: ALIASES.get(word[0], ALIASES.get(word[0].lower(), word[0])), text)
    text = text.replace("_", " ")
    if _TOKEN.sub("", text).strip(" $-"):
        return None
    powers: dict[str, int] = {}
    last, below, coming = "", 1, 1
    for token in _TOKEN.findall(text):
        token = token.replace(" ", "").removeprefix("^")
        if token in ("/", ")"):
            below, last = (-1 if token == "/" else 1), ""
        elif token[0] == "#":  # `square` is a power of the next unit
            coming = int(token[1])
        elif token.lstrip("-").isdigit():
            if not last:
                return None
            powers[last] += below * (int(token) - 1)
        elif token != "(":
            last = _name(token, prompt)
            if not last:
                return None
            powers[last] = powers.get(last, 0) + below * coming
            coming = 1
    if coming > 1 and last:  # `inches square`
        powers[last] += below * (coming - 1)
    if not powers and _DEGREES.search(tail):
        return (("degree", 1),)
    if len(powers) > 1:
        powers.pop("degree", None)  # `degrees Celsius`
    names = {name for name, power in powers.items() if power}
    return tuple(sorted(powers.items())) if names - MODIFIERS and len(names) <= MAX_WORDS else None


def with_plain_unit(formula: str) -> str:
    r"""Write a known unit at the end as `\text{...}`; `5m` stays, since letters may be variables."""
    formula = _CURRENCY.sub(lambda m: rf"{m[1]}{m[3]}\text{{ {_CURRENCIES[m[2]]}}}", formula)
    formula = formula.replace("¢", r"\text{ cents}").replace("\N{EURO SIGN}", r"\text{ euros}")
    if _CLOCK.search(formula):
        return formula
    tokens = list(_PIECE.finditer(formula))
    first = len(tokens)
    while first:
        token, before = tokens[first - 1][0], formula[: tokens[first - 1].start()]
        if token.isdigit():
            if len(token) > 1 or not before.rstrip("{- ").endswith("^"):
                break
        elif not (token[0] in "{}/*^- " or token.isalpha() or token in _IN_UNITS or token.startswith(r"\text{")):
            break
        first -= 1
    for match in tokens[first : first + MAX_WORDS * 2]:
        token, head, tail = match[0], formula[: match.start()], formula[match.start() :]
        is_celsius = bool(_CELSIUS.match(tail))
        stands_apart = head.endswith(" ") and (len(token) > 1 or bool(_METRES.match(tail)))
        is_written = r"\text" in tail or "/" in tail or is_celsius or stands_apart
        begins = token[0].isalpha() or token.startswith("\\") or is_celsius
        if not begins or not is_written or head.endswith("^"):
            continue
        if _HAS_VALUE.search(head) and head.count("{") == head.count("}") and (unit := _unit(tail, "")):
            factors = " ".join(name if power == 1 else f"{name}^{power}" for name, power in unit)
            return rf"{head.rstrip()}\text{{ {factors}}}"
    if found := _VARIABLES.search(formula):
        head, letters = formula[: found.start()], found[1]
        names = re.findall("[A-Za-z]+", re.sub(r"\\[A-Za-z]+", "", head))
        if max(map(len, names), default=0) < 3 and (names or not _unit(letters, "")):
            return f"{head} {letters[:-1]}{{{letters[-1]}}}"
    return formula


def _name(token: str, prompt: str) -> str:
    lower = token.lower()
    if token == "%" or lower in MODIFIERS:
        return "percent" if token == "%" else lower
    if lower in NO_UNIT:
        return ""
    for word in (token, _prefixed(token), lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name := word if word in NOUNS else _physical(word) or _prefixed(word):
            return name
    return lower.removesuffix("s") if len(lower) > 2 and lower in _words(prompt) else ""


@lru_cache(maxsize=4096)
def _prefixed(word: str) -> str:
    for long, short in PREFIXES.items():
        rest = next((word[len(form) :] for form in (long, short) if word.startswith(form)), "")
        if rest and (name := _physical(rest)) and not name.startswith(tuple(PREFIXES)):  # `kms` are no milliseconds
            return short + name
    return ""


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
