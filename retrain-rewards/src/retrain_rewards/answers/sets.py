r"""Inequalities of one letter as sets: `1<x\le 2` is `(1,2]`, `x<-1 \text{ or } x>2` a union, `x \ne 3` the rest."""

from __future__ import annotations

import re
from functools import lru_cache

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
    r"""The letter of a statement and its set in TeX, `("x", "(1,2]")`; twice empty for anything but inequalities."""
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
    """One letter between its bounds; several inequalities with `and` narrow it down."""
    letter, low, high = "", _UNBOUNDED_BELOW, _UNBOUNDED_ABOVE
    left_out: list[str] = []
    for part in _AND.split(clause):
        if (point := _POINT.match(part)) and _is_number(point[2]) and part == clause:  # beside an inequality
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
    r"""Letter, bounds and left-out values of `1 < x \le 2`, `3 \ge x`, `|x| < 2`, `x \ne 3`; None for others."""
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
    """True for an end without letters or relations."""
    rest = _KNOWN.sub("", term)
    return bool(term) and not re.search(r"[A-Za-z=\\]", rest) and ("," not in term or _RELATION.search(term) is None)


_SET_LIKE = re.compile(r"^(?:[A-Za-z]\s*\\in(?![A-Za-z])\s*)?(?:\\left\s*)?(?:[(\[]|\\\{|\\mathbb)")


def both_as_sets(reference: str, answer: str) -> tuple[str, str]:
    """Both sides, with inequalities replaced by their sets where they meet a set or inequalities of the same letter."""
    (letter, wanted), (other, found) = as_set(reference), as_set(answer)
    if wanted and found:
        return (wanted, found) if letter == other else (reference, answer)
    if wanted and not _RELATION.search(answer):
        return wanted, answer
    if found and _SET_LIKE.match(reference):
        return reference, found
    return reference, answer
