"""Answers that are no formulas: words, choices, times, dates, ratios of three, numerals with a base, `cases`.

math-verify reads them as products of letters or as quotients (`east` is `teas`, `1:2:3` is `1:3:2`), or not at all.
Here each has one normal form, and two of a kind are equal where their forms are equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd

_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_DAYS = frozenset({"monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "of", "the", "on"})
_DIGIT_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_BASES = {name: base for base, name in enumerate(_DIGIT_NAMES, start=2)} | (
    {"binary": 2, "ternary": 3, "octal": 8, "decimal": 10, "sixteen": 16, "hexadecimal": 16}
)
_WORD_GROUP = re.compile(r"\\text\s*\{([^{}]*)\}")
_ARTICLE = re.compile(r"^(?:it\s+is\s+|a\s+|an\s+|the\s+)+(?=[a-z])")
_WORDS = re.compile(r"[a-z][a-z'’-]*(?:,? [a-z][a-z'’-]*)*")
_SHORT_WORDS = frozenset({"yes", "no", "odd", "dne", "all", "any", "red", "one"})
_SYNONYMS = (  # pattern of a whole answer in words, and the word for it
    (
        re.compile(
            r"(?:there (?:is|are) |it has |has )?no (?:real |such |possible )?(?:solutions?|roots?)(?: exists?)?"
            r"|none|(?:there is )?no such [a-z]+(?: exists?)?"
        ),
        "no solution",
    ),
    (re.compile(r"(?:the )?(?:empty|null) set"), "no solution"),
    (re.compile(r"(?:the )?(?:limit |it )?(?:dne|does not exist|doesn't exist|doesn’t exist)"), "does not exist"),
    (
        re.compile(
            r"(?:x is |set of )?(?:all|every|any)(?: the)? reals?(?: numbers?| values?)?(?: (?:of )?[a-z])?"
            r"|(?:the )?real numbers"
        ),
        "all real numbers",
    ),
    (re.compile(r"(?:set of )?(?:all |any |every )?(?:the )?integers?"), "all integers"),
    (
        re.compile(r"infinitely many(?: solutions)?|infinite(?:ly many)? solutions|an infinite number of solutions"),
        "infinitely many",
    ),
)
_NAMED_SETS: dict[tuple[object, ...], str] = {
    ("all real numbers",): r"(-\infty,\infty)",
    ("all integers",): r"\mathbb{Z}",
}
_EMPTY = re.compile(r"\\emptyset|\\\{\s*\\\}|(?:[A-Za-z]\s*\\in\s*)\\emptyset")
_REALS = re.compile(r"(?:[A-Za-z]\s*\\in\s*)?\\mathbb\s*\{?\s*R\s*\}?")
_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(\s*([A-Ja-j])\s*\)\s*[.:]?|([A-J])\s*(?:\)|[.:](?=\s|\\|$)))\s*(.*)",
    re.DOTALL,
)
# Another choice, or a doubt about this one
_ANOTHER = re.compile(r"\(\s*[A-J]\s*\)|(?<![A-Za-z])(?:or|and|but|maybe|not|perhaps|possibly)(?![A-Za-z])")
_NAMED_CHOICE = re.compile(r"(?:option|choice)\s+\(?([A-Ja-j])\)?", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,2})(?::(\d{2})(?::(\d{2}))?|(?=\s*[ap]\.?\s*m))\s*([ap])?\.?\s*(?(4)m\.?)", re.IGNORECASE)
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*:\s*\d+(?:\.\d+)?){2,}")
_TWO_PARTS = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9})")
_NUMERAL = re.compile(
    r"\(?\s*([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\s*\)?\s*"
    r"(?:_\s*\{?\s*\(?\s*(?:base\s*)?(\w+)\s*\)?\s*\}?|\(?\s*(?:in\s+)?base\s*[-_ ]?\s*(\w+)\s*\)?)"
)
_ROW_WORDS = re.compile(
    r"\\(?:text\{\s*(?:if|for|when|where|otherwise,?\s*if)?\s*\}|quad|left|right)|[\s,;.&{}]|\\[,;:! ]|if|for|when"
)


@dataclass(frozen=True, slots=True)
class Notation:
    """The kind of an answer and its normal form; `value` is the formula next to the letter of a choice."""

    kind: str
    form: tuple[object, ...]
    value: str = ""


@lru_cache(maxsize=4096)
def notation_of(text: str) -> Notation | None:
    if _EMPTY.fullmatch(text):
        return Notation("words", ("no solution",))
    if r"\begin{cases}" in text:
        inside = text.partition(r"\begin{cases}")[2].partition(r"\end{cases}")[0]
        rows = (_ROW_WORDS.sub("", row) for row in inside.split(r"\\"))
        return Notation("cases", tuple(sorted(row for row in rows if row)))
    flat = _flat(text.replace("$", ""))
    for read in (_numeral, _choice, _time, _date, _words):
        if found := read(flat, text):
            return found
    if _RATIO.fullmatch(text):
        parts = [Fraction(part.strip()) for part in text.split(":")]
        return Notation("ratio", tuple(part / parts[0] if parts[0] else part for part in parts))
    return None


def _flat(text: str) -> str:
    return " ".join(_WORD_GROUP.sub(r" \1 ", text).split())


def _words(flat: str, text: str) -> Notation | None:
    lower = flat.casefold().rstrip(".!").strip()
    lower = _ARTICLE.sub("", lower).replace(" ,", ",")
    if not _WORDS.fullmatch(lower):
        return None
    is_spoken = any(len(word.strip()) > 2 for word in _WORD_GROUP.findall(text))
    if not (is_spoken or any(len(word) > 3 for word in lower.split()) or lower in _SHORT_WORDS):
        return None
    for pattern, word in _SYNONYMS:
        if pattern.fullmatch(lower):
            lower = word
    return Notation("words", (lower.replace(",", ""),))


def _choice(flat: str, text: str) -> Notation | None:
    if match := _NAMED_CHOICE.fullmatch(flat):
        return Notation("choice", (match[1].upper(),))
    if not (match := _CHOICE.fullmatch(flat)):
        return None
    value = match[3].strip()
    if value and (
        _ANOTHER.search(value)
        or re.match(r"[(\^_!+*/=<>,:-]|\\(?:cdot|times|or|and|cup|cap|setminus)|or\b|and\b", value)
    ):
        return None  # `(A)(B)`, `(a) + 1`, `(A) or (B)`
    return Notation("choice", ((match[1] or match[2]).upper(),), value)


def _time(flat: str, text: str) -> Notation | None:
    match = _TIME.fullmatch(flat)
    if not match or not (match[4] or match[2].startswith("0")):
        return None
    return Notation("time", (int(match[1]), int(match[2] or 0), int(match[3] or 0), (match[4] or "").lower()))


def _date(flat: str, text: str) -> Notation | None:
    found = re.findall(r"[A-Za-z]+|\d+|[^\w\s,.]", re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", flat.casefold()))
    parts = [next((month for month in _MONTHS if len(part) > 2 and month.startswith(part)), part) for part in found]
    months = [part for part in parts if part in _MONTHS]
    numbers = [part for part in parts if part.isdigit()]
    if len(months) != 1 or not 1 <= len(numbers) <= 2 or {*parts} - _DAYS - {*months, *numbers}:
        return None
    return Notation("date", (months[0], *sorted(map(int, numbers))))


def _numeral(flat: str, text: str) -> Notation | None:
    match = _NUMERAL.fullmatch(flat) or _NUMERAL.fullmatch(flat.replace(" ", ""))
    name = (match[2] or match[3]).casefold() if match else ""
    base = _BASES.get(name) or (int(name) if name.isdecimal() else 0)
    if not match or not 2 <= base <= 36:
        return None
    digits = match[1].upper().lstrip("0") or "0"
    # `F_{10}` is a member of a sequence.
    if not (digits[0].isdigit() or (base == 16 and len(digits) > 1)):
        return None
    return Notation("numeral", (digits, base))


def verdict_without_mathematics(reference: str, answer: str) -> bool | tuple[str, str]:
    """Return the verdict where the notation decides it, otherwise the two formulas to compare."""
    wanted, found = notation_of(reference), notation_of(answer)
    kinds = {side.kind for side in (wanted, found) if side}
    if "choice" in kinds:
        return _chosen(wanted, found, reference, answer)
    if wanted and wanted.form in _NAMED_SETS:
        reference, wanted = _NAMED_SETS[wanted.form], None
    if found and found.form in _NAMED_SETS:
        answer, found = _NAMED_SETS[found.form], None
    if "time" in kinds:
        found_times = [_TIME.fullmatch(_flat(side)) for side in (reference, answer)]
        times = [match.groups("") for match in found_times if match]
        clocks = {tuple(int(part or 0) for part in time[:3]) for time in times}
        halves = {time[3].lower() for time in times} - {""}
        return len(times) == 2 and len(clocks) == 1 and len(halves) < 2
    # The base may be left out, but not added.
    if "numeral" in kinds and wanted and not found:
        return answer.upper().lstrip("0") == wanted.form[0]
    if wanted:
        return wanted == found
    if found and found.kind != "words":
        return False
    if (match := _TWO_PARTS.fullmatch(answer)) and ":" not in reference:  # `3:4` for a fraction, but not `6:8`
        above, below = int(match[1]), int(match[2])
        answer = rf"\frac{{{above}}}{{{below}}}" if below > 1 and gcd(above, below) == 1 else answer
    reals = r"(-\infty,\infty)"
    return reals if _REALS.fullmatch(reference) else reference, reals if _REALS.fullmatch(answer) else answer


def _chosen(wanted: Notation | None, found: Notation | None, reference: str, answer: str) -> bool | tuple[str, str]:
    def read(side: Notation | None, text: str) -> tuple[str, str]:
        if side and side.kind == "choice":
            return str(side.form[0]), side.value
        return (text.upper(), "") if re.fullmatch("[A-Ja-j]", text) else ("", text)

    (letter, value), (other, other_value) = read(wanted, reference), read(found, answer)
    has_values = bool(value and other_value)
    if letter and other and (letter != other or not has_values):
        return letter == other
    return (value, other_value) if has_values else False
