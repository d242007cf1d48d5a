r"""Statements around a value, such as inequalities of one letter, names, conditions and other spellings.

Inequalities become sets: `1<x\le 2` is `(1,2]`, `x<-1 \text{ or } x>2` a union, `x \ne 3` the rest. A value may come
with its decimals, its name or a range: `2\sqrt{3} \approx 3.46`, `P(A \cap B) = \frac{1}{2}`, `k\pi, k \in \mathbb{Z}`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from retrain_rewards.answers.rewrites import END, members

_BUILDER = re.compile(
    r"^(?:\\left\s*)?(?:\\\{)?\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.+?)(?:\\right\s*)?(?:\\\})?$"
)
_OR = re.compile(r"\\text\{\s*or\s*\}|(?<![A-Za-z])or(?![A-Za-z])|\\(?:cup|vee|lor)(?![A-Za-z])")
_AND = re.compile(
    r",(?=\s*[A-Za-z]\s*(?:<|\\(?:le|ne)(?![A-Za-z])))"  # but `x<-1, x>2` means "or"
    r"|\\text\{\s*and\s*\}|(?<![A-Za-z])and(?![A-Za-z])|\\(?:cap|wedge|land)(?![A-Za-z])"
)
_RELATION = re.compile(r"(<|>|\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z]))(=?)")
_ABSOLUTE = re.compile(r"^(?:\\left\s*)?(?:\||\\lvert)\s*([A-Za-z])\s*(?:\\right\s*)?(?:\||\\rvert)$")
_ALL = re.compile(r"^(?:\\text\{\s*(?:for\s+)?all\s*\}|(?:for\s+)?all\s)\s*")
_POINT = re.compile(r"^\s*([A-Za-z])\s*=\s*(\S[^=,]*?)\s*$")
_LETTER = re.compile(r"^(?:[A-Za-z]|\\(?:theta|alpha|beta|lambda|mu|phi|varphi|gamma|delta))$")
_KNOWN = re.compile(r"\\(?:frac|sqrt|pi|infty|ln|log|left|right|cdot|circ)(?![A-Za-z])|(?<![A-Za-z])e(?![A-Za-z])")
_UPWARDS = {"<": ("(", ")"), r"\le": ("[", "]")}
_MIRRORED = {">": "<", r"\ge": r"\le"}
Side = tuple[str, str]  # a bracket and an end
_UNBOUNDED_BELOW, _UNBOUNDED_ABOVE = ("(", r"-\infty"), (")", r"\infty")


@lru_cache(maxsize=4096)
def as_set(statement: str) -> tuple[str, str]:
    """Return the letter of a statement and its set in TeX, `("x", "(1,2]")`; twice "" if it is no inequality."""
    letter = ""
    if match := _BUILDER.match(statement):
        letter, statement = match[1], match[2]
    if not _RELATION.search(statement):
        return "", ""
    pieces = []
    statement = _ALL.sub("", statement)
    parts = _RELATION.split(statement)
    if len(parts) == 4 and parts[1] in _MIRRORED and (match := _ABSOLUTE.match(parts[0].strip())):  # `|x| > 2`
        end, below = parts[3].strip(), _MIRRORED[parts[1]]
        statement = rf"{match[1]} {below}{parts[2]} -{end} \vee {match[1]} {parts[1]}{parts[2]} {end}"
    for clause in _OR.split(statement):
        found, piece = _clause(clause)
        if not piece or (letter and found != letter):
            return "", ""
        letter = found
        pieces.append(piece)
    if len(pieces) > 1 and any("setminus" in piece for piece in pieces):
        return "", ""
    return letter, r" \cup ".join(pieces)


def _clause(clause: str) -> Side:
    """Put one letter between its bounds; several inequalities with `and` narrow it down."""
    letter, low, high = "", _UNBOUNDED_BELOW, _UNBOUNDED_ABOVE
    left_out: list[str] = []
    for part in _AND.split(clause):
        if (point := _POINT.match(part)) and _is_number(point[2]) and part == clause:  # next to an inequality
            return point[1], rf"\{{{point[2]}\}}"
        read = _bounds(part.strip())
        if read is None or (letter and read[0] != letter):
            return "", ""
        letter, sides, other = read
        left_out += other
        for bracket, end in sides:
            is_low = bracket in "(["
            if (low if is_low else high) not in (_UNBOUNDED_BELOW, _UNBOUNDED_ABOVE):
                return "", ""
            low, high = ((bracket, end), high) if is_low else (low, (bracket, end))
    is_bounded = (low, high) != (_UNBOUNDED_BELOW, _UNBOUNDED_ABOVE)
    whole = f"{low[0]}{low[1]},{high[1]}{high[0]}" if is_bounded or not left_out else r"\mathbb{R}"
    return letter, rf"{whole} \setminus \{{{','.join(left_out)}\}}" if left_out else whole


def _bounds(part: str) -> tuple[str, list[Side], list[str]] | None:
    r"""Return letter, bounds and excluded values of `1 < x \le 2`, `3 \ge x`, `|x| < 2`, `x \ne 3`; None for others."""
    found = _RELATION.split(part)
    terms = [term.strip() for term in found[::3]]
    signs = [
        {"<=": r"\le", ">=": r"\ge"}.get(sign + equal, sign)
        for sign, equal in zip(found[1::3], found[2::3], strict=True)
    ]
    if len(signs) == 1 and (match := _ABSOLUTE.match(terms[0])) and signs[0] in _UPWARDS and _is_number(terms[1]):
        left, right = _UPWARDS[signs[0]]
        return match[1], [(left, f"-{terms[1]}"), (right, terms[1])], []
    places = [place for place, term in enumerate(terms) if _LETTER.match(term)]
    if len(places) != 1 or not 1 <= len(signs) <= 2 or (len(signs) == 2 and places != [1]):
        return None
    place = places[0]
    if not all(_is_number(term) for number, term in enumerate(terms) if number != place):
        return None
    if signs == [r"\ne"]:
        return terms[place], [], terms[1 - place].split(",")
    if all(sign in _MIRRORED for sign in signs):
        terms, signs, place = terms[::-1], [_MIRRORED[sign] for sign in reversed(signs)], len(terms) - 1 - place
    if not all(sign in _UPWARDS for sign in signs):
        return None
    sides = [(_UPWARDS[signs[0]][0], terms[0])] if place else []
    if place < len(terms) - 1:
        sides.append((_UPWARDS[signs[-1]][1], terms[-1]))
    return terms[place], sides, []


def _is_number(term: str) -> bool:
    rest = _KNOWN.sub("", term)
    return bool(term) and not re.search(r"[A-Za-z=\\]", rest)


_SET_LIKE = re.compile(r"^(?:[A-Za-z]\s*\\in(?![A-Za-z])\s*)?(?:\\left\s*)?(?:[(\[]|\\\{|\\mathbb)")


def both_as_sets(reference: str, answer: str) -> tuple[str, str]:
    """Replace inequalities by their sets where they meet a set or inequalities of the same letter."""
    (letter, wanted), (other, found) = as_set(reference), as_set(answer)
    if wanted and found:
        return (wanted, found) if letter == other else (reference, answer)
    if wanted and not _RELATION.search(answer):
        return wanted, answer
    if found and _SET_LIKE.match(reference):
        return reference, found
    return reference, answer


_OR_EQUALLY = re.compile(
    r"\s*,?\s*\\text\{[\s,;(]*(?:or(?: equivalently)?|equivalently|i\.e\.|that is|which is|which equals)[\s,]*\}\s*"
    r"|\s*\(?(?<![A-Za-z\\])or(?![A-Za-z])\s*"
)
_APPROX = re.compile(rf"^(.+?)\s*\\(?:approx|simeq|doteq){END}\s*((-?\d+(?:\.(\d+))?)\s*(\\?%|\\text\{{[^{{}}]*\}})?)$")
_NO_LETTER = re.compile(r"\\text\s*\{[^{}]*\}|\\[A-Za-z]+|(?<![A-Za-z])e(?![A-Za-z])")
_NAME = re.compile(r"^\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*(?:_\s*(?:\w|\{\w+\}))?\s*(?:\([^()]*\))?\s*=(?!=)")
_FOR = r"\\text\{[\s,;(]*(?:where|with|for)?\s*(?:all|any|every|each|some)?\s*(?:real|integers?)?\s*\}"
_CONDITION = re.compile(
    rf"(?:[\s,;(]|{_FOR})+(?P<letter>[A-Za-z])\s*(?P<range>\\in\s*\\mathbb\s*\{{?\s*[ZNR]\s*\}}?|\\ge\s*[01]"
    rf"|\\text\{{\s*(?:is\s+)?an(?:y)?\s+integer\s*\}})\s*\)?$"
    r"|\s*,?\s*(?:\\text\{\s*)?for\s+(?:all|any|every)(?:\s+real|\s+integers?)?[\s}]+(?P<any>[A-Za-z])$"
)
_LIST = re.compile(r"[,;]|\\text|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
MAX_SPELLINGS = 3


def spellings(answer: str) -> list[str]:
    parts = [part.strip() for part in _OR_EQUALLY.split(answer)]
    if parts[-1].endswith(")") and parts[-1].count("(") < parts[-1].count(")"):
        parts[-1] = parts[-1][:-1].rstrip()  # `\text{ (or } 0.5)`
    return parts if 1 < len(set(parts)) == len(parts) <= MAX_SPELLINGS and all(parts) else []


def decimals(answer: str) -> tuple[str, str, str] | None:
    r"""Return both sides of `2\sqrt{3} \approx 3.46\text{ cm}` with the unit, and the decimals; None with a letter."""
    match = _APPROX.match(answer)
    exact = match[1].rpartition("=")[2].strip() if match else ""
    if not match or not exact or re.search("[A-Za-z]", _NO_LETTER.sub("", exact)):
        return None
    if (unit := match[5] or "").endswith("%"):
        return exact, match[2], str(Decimal(match[3]).scaleb(-2))
    return exact if r"\text" in exact else f"{exact}{unit}", match[2], match[3]


def rounds_to(value: Any, digits: str) -> bool:
    over = (abs(value) - abs(float(digits))) * 10.0 ** len(digits.partition(".")[2])  # in units of the last digit
    has_sign = value.imag == 0 and value.real * float(digits) >= 0
    return bool(has_sign and -0.5 <= over + 1e-9 < 1)


def without_names(reference: str, answer: str) -> tuple[str, str]:
    """Remove a name that only one of them has, and conditions on a letter, unless these differ."""
    sides = [reference, answer]
    found = [_CONDITION.search(side) for side in sides]
    if len({(match["letter"], "".join(match["range"].split())) for match in found if match and match["range"]}) < 2:
        for place, match in enumerate(found):
            rest = sides[place][: match.start()].rstrip() if match else ""
            letter = rf"(?<![A-Za-z\\]){match['letter'] or match['any']}" if match else ""
            if match and not re.search(rf"[<>]|\\(?:le|ge|ne|text){END}", rest) and re.search(letter, rest):
                sides[place] = rest
    for place, other in ((0, sides[1]), (1, sides[0])):
        side = sides[place]
        if "=" not in other and len(members(side)) == 1 and (name := _NAME.match(side)):
            value = side[name.end() :].strip()
            sides[place] = side if _LIST.search(value) or "=" in value else value
    return sides[0], sides[1]
