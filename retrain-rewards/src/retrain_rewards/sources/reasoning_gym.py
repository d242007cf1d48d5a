"""The `reasoning_gym` source: any data set of that library by name, scored by its own verifier.

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

from retrain.api import Example, LoadedData, PluginContext, Score, Table, key
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.sources.collector import Collector, refuse_foreign_keys
from retrain_rewards.sources.reasoning_gym_library import LEVEL, check, from_plain, make_data_set, make_entries


class GymOptions(Table):
    """`[data.options]` of `reasoning_gym`."""

    name: str = key(..., "Data set of reasoning-gym, for example chain_sum.", min_length=1)
    size: int = key(1000, "Entries to make.", ge=1)
    seed: int = key(0, "Seed of the data set, independent of the run's.", ge=0)
    level: int = key(-1, "Difficulty by the data set's own curriculum, 0 the easiest; -1 = its defaults.", ge=-1)
    config: dict[str, Any] = key({}, "The data set's own options, for example {min_terms = 2}; they win over level.")


class ReasoningGym:
    """The entries of one data set, each in its example's `info`, and the data set's verifier.

    A data set without a single right answer leaves the reference empty, and its verifier uses the entry. An entry whose
    own answer must not reach the verifier (`GUARDS`; an unsolved integral) is left out, for no answer could be right.
    """

    def __init__(self, context: PluginContext) -> None:
        refuse_foreign_keys(context, "reasoning_gym", ("path", "prompt_key", "answer_key"))
        self.options: Any = context.params
        self.where = context.config.place("data.options")

    def load(self) -> LoadedData:
        options = self.options
        check(options.name, options.config, options.level, where=self.where)
        config = {**options.config, "seed": options.seed, "size": options.size}
        if options.level >= 0:
            config |= {LEVEL: options.level}
        collector = Collector(source="reasoning_gym", has_verifier=True)
        for index, entry in enumerate(make_entries(options.name, config, where=self.where)):
            place = f"{options.name} entry {index}"
            question, answer = entry["question"], entry["answer"]
            if answer is not None and not harmless(data_set_of(from_plain(entry), options.name), answer):
                collector.skip("no answer that may be verified", place=place)
            else:
                collector.add(question, answer, place=place, task=options.name, info={"entry": entry})
        read_from = f"{options.name}, seed {options.seed}"
        return collector.finish(where=self.where, read_from=read_from, reward=GymReward.of(options.name, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class GymReward:
    """The data set's own `score_answer` of the last box; hedges, and answers it would run as code, count as empty."""

    name: str
    config: str  # JSON text of the data set's configuration, seed and size included

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> GymReward:
        return cls(name=name, config=json.dumps(dict(config), sort_keys=True))

    def score(self, example: Example, text: str) -> Score:
        answer = last_boxed(text)
        if answer is None:
            return Score.of(0.0)
        entry = from_plain(example.info["entry"])
        # Without a single right answer there is nothing that a hedge could be measured against.
        right = entry["answer"] if isinstance(entry["answer"], str) else ""
        if not harmless(data_set_of(entry, self.name), answer) or (right and not affirms_one(answer, right)):
            answer = ""
        return Score.of(_data_set(self.name, self.config).score_answer(answer, entry))

    answer_in = staticmethod(last_boxed)

    def gold(self, example: Example) -> str | None:
        """Return the entry's own answer in a box; None without one, or if a box cannot hold it (a lone brace)."""
        answer = from_plain(example.info["entry"])["answer"]
        if not isinstance(answer, str) or not answer.strip():
            return None
        return boxed(answer) if last_boxed(boxed(answer)) == answer.strip() else None


def data_set_of(entry: Mapping[str, Any], name: str) -> str:
    return str(entry["metadata"].get("source_dataset", name))


@lru_cache(maxsize=8)
def _data_set(name: str, config: str) -> Any:
    return make_data_set(name, json.loads(config))


# Bounds on a formula that `eval` or sympy will see, far above honest answers.
MAX_LENGTH = 2000
MAX_NODES = 500
MAX_DIGITS = 30
MAX_EXPONENT = 1000
TRIGONOMETRIC = frozenset({"sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan"})
HYPERBOLIC = frozenset({"sinh", "cosh", "tanh", "asinh", "acosh", "atanh"})
FUNCTIONS = TRIGONOMETRIC | HYPERBOLIC | {"exp", "log", "ln", "sqrt", "Abs"}
CONSTANTS = frozenset({"pi"})
# Words that turn an answer into several, its opposite or a multiple: many verifiers read over them.
_TURNING = r"or|not|but|maybe|perhaps|hundred|thousand|million|billion"
_AS_LATEX = re.compile(
    rf"\\(?:neq?|neg|not|lor|vee)(?![A-Za-z])|\\text\s*\{{\s*(?:,|(?:{_TURNING})\b)|^not\b", re.IGNORECASE
)
_AS_WORD = re.compile(rf"\b(?:{_TURNING})\b", re.IGNORECASE)
_LETTERS = re.compile(r"[A-Za-z]{2,}")


def is_literal(answer: str) -> bool:
    """True if `eval` gives a literal or fails: a constant, list, tuple, dictionary, bare name, or no expression."""
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
    """True for a short formula of numbers and `+ - * / **`, with `symbols` also letters; its powers are bounded."""
    if len(answer) > MAX_LENGTH:
        return False
    try:
        body = ast.parse(answer.strip(), mode="eval").body
        nodes = sum(1 for _ in ast.walk(body))
        return nodes <= MAX_NODES and _power(body, symbols) <= MAX_EXPONENT
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


_is_product = re.compile(r"\s*\d{1,30}(?:\s*×\s*\d{1,30})*\s*", re.ASCII).fullmatch
# At most three digits of exponent: "1e999999999" would fill the memory.
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
    # Its verifier raises on anything else.
    "prime_factorization": _is_product,
}


def harmless(data_set: str, answer: str) -> bool:
    guard = GUARDS.get(data_set)
    return guard is None or bool(guard(answer))


def affirms_one(answer: str, right: str) -> bool:
    """True if the answer does not hedge, deny or scale its value, unless the right answer does so too."""
    if _AS_LATEX.search(answer) and not _AS_LATEX.search(right):
        return False
    is_text = len(_LETTERS.findall(right)) > 1
    return is_text or not _AS_WORD.search(answer) or bool(_AS_WORD.search(right))


def _power(node: ast.expr, symbols: bool) -> float:
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
