"""Scores answers with a data set's own verifier, and keeps model output away from verifiers that would execute it.

Some verifiers of reasoning-gym pass the answer to Python's `eval`, to sympy's parser (which calls `eval`), or to number
classes that write out an exponent ("1e999999999" fills the memory). Model output is untrusted, so those verifiers get
only answers of a harmless form; any other counts as an empty answer. That also closes a loophole of the integration
data sets, whose verifier accepts the question itself, `Integral(...)`, as its answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from retrain.api import Example, Score
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.sources.reasoning_gym.library import from_plain, make_data_set


@dataclass(frozen=True, slots=True, kw_only=True)
class GymReward:
    """The data set's own `score_answer` of the last box, usually in [0, 1]; 0.0 without a box.

    It holds plain data only, and the scoring process builds the data set on first use. Answers that a verifier would
    evaluate as code count as empty, and so do hedges and negations, which many verifiers read over (see `guards`).
    """

    name: str
    config: str  # JSON text of the data set's configuration, seed and size included

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> GymReward:
        return cls(name=name, config=json.dumps(dict(config), sort_keys=True))

    def score(self, example: Example, text: str) -> Score:
        """Score one completion; an exception of the library is a failed score, not a verdict."""
        answer = last_boxed(text)
        if answer is None:
            return Score.of(0.0)
        entry = from_plain(example.info["entry"])
        right = entry["answer"] if isinstance(entry["answer"], str) else ""
        if not harmless(data_set_of(entry, self.name), answer) or (right and not affirms_one(answer, right)):
            answer = ""
        return Score.of(_data_set(self.name, self.config).score_answer(answer, entry))

    answer_in = staticmethod(last_boxed)

    def gold(self, example: Example) -> str | None:
        """The entry's own answer in a box; None when it has none, or one that a box cannot hold (a lone brace)."""
        answer = from_plain(example.info["entry"])["answer"]
        if not isinstance(answer, str) or not answer.strip():
            return None
        return boxed(answer) if last_boxed(boxed(answer)) == answer.strip() else None


def data_set_of(entry: Mapping[str, Any], name: str) -> str:
    """The data set of an entry: its own where `composite` mixes several."""
    return str(entry["metadata"].get("source_dataset", name))


@lru_cache(maxsize=8)
def _data_set(name: str, config: str) -> Any:
    return make_data_set(name, json.loads(config))


MAX_LENGTH = 2000
MAX_NODES = 500
MAX_DIGITS = 30
MAX_EXPONENT = 1000
TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"})
HYPERBOLIC = frozenset({"sinh", "cosh", "tanh", "asinh", "acosh", "atanh"})
FUNCTIONS = TRIGONOMETRIC | HYPERBOLIC | {"exp", "log", "ln", "sqrt", "Abs"}
CONSTANTS = frozenset({"pi"})
# What turns an answer into several, into its opposite, or into a multiple, which many verifiers read over.
_TURNING = r"or|not|but|maybe|perhaps|hundred|thousand|million|billion"
_AS_LATEX = re.compile(
    rf"\\(?:neq?|neg|not|lor|vee)(?![A-Za-z])|\\text\s*\{{\s*(?:,|(?:{_TURNING})\b)|^not\b", re.IGNORECASE
)
_AS_WORD = re.compile(rf"\b(?:{_TURNING})\b", re.IGNORECASE)
_LETTERS = re.compile(r"[A-Za-z]{2,}")


def is_literal(answer: str) -> bool:
    """Whether `eval` gives a literal or fails: a constant, list, tuple, dictionary, bare name, or no expression."""
    try:
        body = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return True
    except (MemoryError, RecursionError):
        return False
    try:
        return isinstance(body, ast.Name) or ast.literal_eval(body) is not None or True
    except (ValueError, TypeError, MemoryError, RecursionError):
        return False


def is_formula(answer: str, *, symbols: bool) -> bool:
    """Whether it is a short formula of numbers and `+ - * / **`, with `symbols` also one-letter names and functions.

    Powers must not exceed `MAX_EXPONENT` in total, so that no evaluation can run away.
    """
    if len(answer) > MAX_LENGTH:
        return False
    try:
        body = ast.parse(answer.strip(), mode="eval").body
        nodes = sum(1 for _ in ast.walk(body))
        return nodes <= MAX_NODES and _power(body, symbols) <= MAX_EXPONENT
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


_is_product = re.compile(r"\s*\d{1,30}(?:\s*×\s*\d{1,30})*\s*", re.ASCII).fullmatch
_is_number = re.compile(r"[\s\d,./+-]{1,100}(e[+-]?\d{1,3})?", re.IGNORECASE).fullmatch
GUARDS: dict[str, Callable[[str], object]] = {
    "binary_matrix": is_literal,
    "n_queens": is_literal,
    "spiral_matrix": is_literal,
    "string_insertion": is_literal,
    "countdown": partial(is_formula, symbols=False),
    "puzzle24": partial(is_formula, symbols=False),
    "intermediate_integration": partial(is_formula, symbols=True),
    "polynomial_multiplication": partial(is_formula, symbols=True),
    "simple_integration": partial(is_formula, symbols=True),
    "coin_flip": _is_number,
    "decimal_arithmetic": _is_number,
    "decimal_chain_sum": _is_number,
    "power_function": _is_number,
    "prime_factorization": _is_product,  # its verifier raises on anything else
}


def harmless(data_set: str, answer: str) -> bool:
    """Whether the verifier of this data set may get this answer."""
    guard = GUARDS.get(data_set)
    return guard is None or bool(guard(answer))


def affirms_one(answer: str, right: str) -> bool:
    """Whether the answer neither hedges, denies nor scales what it says, unless the right answer does so too.

    In LaTeX and as a first "not" this is told anywhere, as a word only where the right answer is no text.
    """
    if _AS_LATEX.search(answer) and not _AS_LATEX.search(right):
        return False
    is_text = len(_LETTERS.findall(right)) > 1
    return is_text or not _AS_WORD.search(answer) or bool(_AS_WORD.search(right))


def _power(node: ast.expr, symbols: bool) -> float:
    """The highest power in the formula, towers multiplied; ValueError when it is not a formula."""
    match node:
        case ast.Constant(value=bool() | complex() | str() | bytes()):
            raise ValueError("not a number")
        case ast.Constant(value=int() | float() as number):
            if abs(number) >= 10**MAX_DIGITS:
                raise ValueError("too large a number")
            return 1.0
        case ast.Name(id=name) if symbols and (len(name) == 1 or name in CONSTANTS):
            return 1.0
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _power(operand, symbols)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return max(_power(left, symbols), _power(right, symbols))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(left, symbols) * max(1.0, _exponent(right, symbols))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if symbols and name in FUNCTIONS:
            return _power(argument, symbols)
    raise ValueError("not a formula")


def _exponent(node: ast.expr, symbols: bool) -> float:
    """Size of an exponent: a number, a quotient of numbers, or a formula with a symbol, which stays symbolic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return abs(float(number))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _exponent(operand, symbols)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() | float() as number)) if number:
            return _exponent(left, symbols)
    if any(isinstance(part, ast.Name) and len(part.id) == 1 for part in ast.walk(node)):
        return _power(node, symbols)
    raise ValueError("a computed exponent")
