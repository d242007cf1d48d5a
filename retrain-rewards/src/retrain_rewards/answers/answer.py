r"""Decides which text counts as an answer: one value in finished form, with nothing around it but a unit.

math-verify decides whether two formulas are equal. That is no verdict yet: it finds `348+217` equal to 565, `0.0` to
6.63e-34, and the `5` in `\neq 5` to 5. `objection` says why a formula that math-verify found equal is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from retrain_rewards.answers.units import dropped, objection_to_words
from retrain_rewards.boxed import boxed

T = TypeVar("T")
# Relative. math-verify compares six decimals, and any two numbers below these are equal to it.
TOLERANCE = 1e-3
# From here on, six decimals are the stricter bound.
SMALL = 5e-4
CACHED = 4096
MAX_PROMPT = 8000  # characters of a prompt, and
MAX_EXPRESSIONS = 100  # expressions in it, that an answer is held against
# Text that math-verify's parser drops silently.
_SILENT = re.compile(r"\\(?:[lc]?dots|phantom|vrule|vcenter|vbox|vskip|vspace|hfil)(?![A-Za-z])|[A-Za-z0-9]'+\s*$")
_PERCENT = re.compile(r"%|percent|pct")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?\s*(\w+|\\text\s*\{[^}]*\})")
_PLAIN = re.compile(r"-?(?:\d+(?:\.\d+)?|\\[dt]?frac\{-?\d+\}\{\d+\}|\d+/\d+)")
_EQUALS = re.compile(r"(?<![\\<>!])=|\\approx(?![A-Za-z])|\\equiv(?![A-Za-z])|≈")
_IN_DOLLARS = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_IN_WORDS = re.compile(r"(?:\\[A-Za-z]+|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|[-+*/^_=(){}\[\]|!<>.,\d\s×÷·−])+")
_ORDERED, _BRACES, _LISTS = ("()", "[]", "[)", "(]"), ("{}",), ("list", "{}", "()", "[]", "[)", "(]")
_SETS = ("union", "minus")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The facts known of a reference; its form is None where it is no LaTeX mathematics."""

    text: str
    golds: tuple[Any, ...]
    form: Any
    is_cased: bool
    is_finished: bool
    is_rational: bool


@lru_cache(maxsize=CACHED)
def wanted(reference: str, is_cased: bool = False) -> Wanted:
    import sympy

    golds, form = parsed(reference, is_cased), _form(reference)
    # A form that sympy cannot evaluate is no finished value.
    is_finished, is_rational = _tried(lambda: _state(form, golds[0] if golds else None), (False, False))
    return Wanted(
        text=reference,
        golds=tuple(gold for gold in golds if isinstance(gold, str) or gold not in (sympy.nan, sympy.zoo)),
        form=form,
        is_cased=is_cased,
        is_finished=is_finished,
        is_rational=is_rational,
    )


def _tried(call: Callable[[], T], otherwise: T) -> T:
    """Return what the call returns; sympy and math-verify's parser have no common class of errors."""
    try:
        return call()
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return otherwise


def _state(form: Any, value: Any) -> tuple[bool, bool]:
    import sympy

    from retrain_rewards.answers.form import is_finished

    is_number = isinstance(value, sympy.Expr) and not value.free_symbols
    if not (is_finished(form) if form is not None else is_number and value.is_Number):
        return False, False
    return True, is_number and bool(value.doit().is_rational)


def are_cased(*formulas: str) -> bool:
    r"""True if a formula has a letter in both cases: math-verify takes them for one, so `\frac{R}{r}` is 1 to it."""
    found = (_letters(re.sub(r"\\text\s*\{[^{}]*\}", "", formula)) for formula in formulas)
    return any({letter.lower() for letter in letters if letter.isupper()} & letters for letters in found)


def parsed(formula: str, is_cased: bool = False) -> tuple[Any, ...]:
    """Return the result of `math_verify.parse` for a box with the formula: expression and text, or nothing.

    With `is_cased` the cases of a letter are two letters. LaTeX is parsed here, so that the form of the answer needs no
    second parse. The rest is left to math-verify: it looks for numbers in any text, and for words such as "final
    answer" first.
    """
    from math_verify import parse

    from retrain_rewards.answers.form import value_of

    try:
        if "answer" not in formula.lower():
            return value_of(formula, is_cased=is_cased)
    except MemoryError:
        raise
    except Exception:  # not LaTeX mathematics, or nested too deeply for the parser
        pass
    # An error of its normalisation or its parser means that this is not mathematics.
    return _tried(lambda: tuple(parse(boxed(formula), parsing_timeout=None, raise_on_error=True)), ())


def objection(reference: Wanted, answer: str, target: Any, prompt: str, *, accept_unfinished: bool) -> str:
    """Return why `answer`, equal to the reference for math-verify as `target`, is no answer; empty if it is one."""
    from math_verify.grader import is_equation, take_last_relation

    if reason := objection_to_words(reference.text, answer, prompt):
        return reason
    if _SILENT.search(answer) and not _SILENT.search(reference.text):
        return "it leaves something out"
    if (bases := _BASE.findall(answer)) and bases != _BASE.findall(reference.text):
        return "it has another base"
    if isinstance(target, str):  # of equal text
        return ""
    gold = next(gold for gold in reference.golds if not isinstance(gold, str))
    # math-verify would compare the value of `variable = value` with the bare value.
    if is_equation(gold) != is_equation(target):
        gold, target = (take_last_relation(side).rhs if is_equation(side) else side for side in (gold, target))
    if reason := _objection_to_value(gold, target):
        return reason
    form = _form(answer)
    if form is None:
        return "it is no mathematics as a whole"
    if _copies(reference, answer, form, prompt):
        return "it repeats the prompt"
    if _PERCENT.search(dropped(answer)) and not _PERCENT.search(reference.text) and _is_below_one(target):
        return "it is another percentage"
    if _PLAIN.fullmatch(answer.strip()):
        return ""
    return _objection_to_form(reference, gold, answer, form, prompt, accept_unfinished=accept_unfinished)


def _objection_to_form(
    reference: Wanted, gold: Any, answer: str, form: Any, prompt: str, *, accept_unfinished: bool
) -> str:
    import sympy

    from retrain_rewards.answers.form import is_finished, is_literal, kind_of

    if kind_of(form) == "=" and "=" not in _kinds(reference.form):
        if not _chain_holds(reference, answer):
            return "it equates different values"
        answer, form = _EQUALS.split(answer)[-1], form.args[-1]
        if _copies(reference, answer, form, prompt):
            return "it repeats the prompt"
    kind = kind_of(form)
    if isinstance(gold, sympy.Expr) and kind in _LISTS and len(form.args) > 2:
        return "it lists several"
    if _brackets_differ(reference.form, form):
        return "it has other brackets"
    if accept_unfinished or not reference.is_finished:
        return ""
    if kind in _SETS and reference.form is not None and kind_of(reference.form) not in ("", *_SETS):
        return "it still has to be computed"
    value = form.args[1] if kind in _BRACES and len(form.args) == 2 else form
    if not is_finished(form) or (reference.is_rational and not (is_literal(value) or value.is_Symbol)):
        return "it still has to be computed"
    return ""


def _brackets_differ(reference: Any, form: Any) -> bool:
    """True if only one is ordered, or only one includes an end. `x = 1, y = 2` is ordered by its letters."""
    from retrain_rewards.answers.form import kind_of

    kinds = [kind_of(side) if side is not None else "" for side in (reference, form)]
    for side, kind in zip((reference, form), kinds, strict=True):
        if (
            kind == "list"
            and len({part.args[1] for part in side.args[1:] if kind_of(part) == "="}) == len(side.args) - 1
        ):
            return False
    ordered = [kind in _ORDERED for kind in kinds]
    if ordered[0] != ordered[1]:
        return any(kind in (*_BRACES, "list") for kind in kinds)
    return all(ordered) and kinds[0] != kinds[1] and len(form.args) == 3


def _objection_to_value(gold: Any, target: Any) -> str:
    """Find falsehoods that pass math-verify's six decimals, its percent signs and cancelled letters."""
    import sympy

    if isinstance(gold, sympy.Integer) and isinstance(target, sympy.Integer):
        return ""
    is_formula = all(isinstance(side, sympy.Expr) and not side.is_Symbol for side in (gold, target))
    if is_formula and target.free_symbols - gold.free_symbols:
        return "it has other letters"
    sides = (gold, target)
    numbers = [numbers_of(side) for side in sides]
    is_small = any(0 < abs(number) < SMALL for side in numbers for number in side)
    if is_small and (len(numbers[0]) != len(numbers[1]) or not all(map(_close, *numbers))):
        return f"it differs by more than {TOLERANCE:g} of the value"
    signs = [side.has(sympy.UnevaluatedExpr) for side in sides]
    if signs[0] != signs[1]:
        bare = [side.args[0] if sign and side.is_Mul else side for side, sign in zip(sides, signs, strict=True)]
        if bare[0] != bare[1] and not _is_below_one(gold):
            return "it is another percentage"
    return ""


def _is_below_one(value: Any) -> bool:
    return all(abs(number) < 1 for number in numbers_of(value))


def numbers_of(side: Any) -> list[Any]:
    """Return the numbers (mpmath's, to avoid underflow) in a value, sorted; letters are arbitrary ones."""
    import mpmath
    import sympy

    if isinstance(side, sympy.logic.boolalg.Boolean):
        return []
    if isinstance(side, sympy.MatrixBase) or not isinstance(side, sympy.Expr):
        parts = side.args[:2] if isinstance(side, sympy.Interval) else side
        parts = parts.args if isinstance(parts, sympy.Basic) else parts
        found = [number for part in parts for number in numbers_of(part)]
        return sorted(found, key=lambda number: (number.real, number.imag))
    letters = sorted(side.free_symbols, key=str)
    # Arbitrary distinct values: two formulas that agree there agree, up to chance.
    at = {letter: sympy.Rational(1234 + 711 * rank, 1000) for rank, letter in enumerate(letters)}
    try:
        return [mpmath.mpc(*map(mpmath.mpf, side.subs(at).doit().evalf(15).as_real_imag()))]
    except (TypeError, ValueError, OverflowError, AttributeError):
        return []


def _close(one: Any, other: Any) -> bool:
    # The last factor lets a difference of exactly the tolerance pass, whatever rounding did to it.
    return bool(abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) * (1 + 1e-9))


def _chain_holds(reference: Wanted, answer: str) -> bool:
    from math_verify import verify

    sides = _EQUALS.split(answer)
    for side in sides[:-1]:
        if re.search(r"[A-Za-z]", re.sub(r"\\(?!text|mathrm|angle|[a-z]*theta|alpha|beta|phi)[A-Za-z]+", "", side)):
            continue
        if not verify(list(reference.golds), list(parsed(side)), timeout_seconds=None):
            return False
    return True


def _kinds(form: Any) -> set[str]:
    import sympy

    from retrain_rewards.answers.form import kind_of

    parts = form.args if isinstance(form, sympy.Tuple) else ()
    return {kind_of(form)} | {kind for part in parts for kind in _kinds(part)}


def _copies(reference: Wanted, answer: str, form: Any, prompt: str) -> bool:
    """True if the answer is an expression of the prompt, in another form than the reference's.

    With letters in it, trivial steps do not make another form of it. A whole number is no copy where the reference is a
    number too: any prompt may hold it by chance.
    """
    from retrain_rewards.answers.form import is_literal

    is_number = reference.is_finished and reference.form is not None and is_literal(reference.form)
    if not prompt or form.is_Symbol or (is_number and answer.strip().lstrip("-").isdigit()):
        return False
    prints = _fingerprints(form)
    own = _fingerprints(reference.form) if reference.form is not None else ("", "")
    return any(
        mine == theirs != expected
        for copied in _forms_in(prompt, _letters(answer))
        for mine, theirs, expected in zip(prints, copied, own, strict=True)
        if mine
    )


def _fingerprints(form: Any) -> tuple[str, str]:
    from retrain_rewards.answers.form import fingerprint, reduced

    return fingerprint(form), fingerprint(reduced(form)) if form.free_symbols else ""


@lru_cache(maxsize=CACHED)
def _forms_in(prompt: str, letters: frozenset[str]) -> tuple[tuple[str, str], ...]:
    texts = [text for text in _expressions(prompt[:MAX_PROMPT]) if _letters(text) == letters]
    forms = (_form(text) for text in texts[:MAX_EXPRESSIONS])
    return tuple(dict.fromkeys(_fingerprints(form) for form in forms if form is not None))


@lru_cache(maxsize=CACHED)
def _expressions(prompt: str) -> tuple[str, ...]:
    found = ["".join(groups) for groups in _IN_DOLLARS.findall(prompt)]
    found += _IN_WORDS.findall(_IN_DOLLARS.sub(" ; ", prompt))
    sides = [side for text in found for side in (text, *_EQUALS.split(text))]
    stripped = (side.strip().strip(".,!").strip() for side in sides)
    return tuple(dict.fromkeys(text for text in stripped if re.search(r"[\d+*/^\\-]", text)))


def _letters(formula: str) -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", formula)))


@lru_cache(maxsize=CACHED)
def _form(formula: str) -> Any:
    from retrain_rewards.answers.form import form_of
    from retrain_rewards.answers.size import refusal

    return None if refusal(formula) else _tried(lambda: form_of(formula), None)
