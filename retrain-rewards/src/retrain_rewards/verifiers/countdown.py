"""The verifier of the `countdown` puzzles: does an expression reach the target with each given number, used once?"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

from retrain.api import Example, Score
from retrain_rewards.boxed import boxed, last_boxed

MOST_CHARS = 200  # of an expression; eight numbers and their operators need far fewer
# Steps of the search, so that it ends for a puzzle without a solution.
MOST_TRIED = 50_000
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_LATEX = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-"}
_LATEX |= {r"\left": "", r"\right": "", r"\,": "", r"\ ": " "}
_SPELT = re.compile("|".join(map(re.escape, _LATEX)))
_ALLOWED = re.compile(r"[0-9+\-*/() ]+", re.ASCII)


def question(numbers: Sequence[int], target: int) -> str:
    listed = ", ".join(map(str, numbers))
    return (
        f"Using the numbers {listed}, write an expression that equals {target}. Use each number exactly once, "
        "and only +, -, *, / and parentheses. The final answer is the expression itself."
    )


@dataclass(frozen=True, slots=True)
class CountdownReward:
    """1.0 when the last box holds an expression of the given numbers, each used once, that equals the target, or 0.0.

    It is read, never run: only integers, `+ - * /` and parentheses, so that no answer takes long. `= target` may
    follow. The numbers are `nums`, and the target `target`, of the example's `info`.
    """

    def score(self, example: Example, text: str) -> Score:
        answer = last_boxed(text) or ""
        numbers, target = example.info["nums"], example.info["target"]
        found = evaluated(answer.removesuffix(f"= {target}").removesuffix(f"={target}"))
        if found is None or not isinstance(numbers, list):
            return Score.of(0.0)
        value, used = found
        return Score.of(float(value == target and Counter(used) == Counter(numbers)))

    answer_in = staticmethod(last_boxed)

    def gold(self, example: Example) -> str | None:
        numbers, target = example.info["nums"], example.info["target"]
        if not isinstance(numbers, list) or not isinstance(target, int):
            return None
        found = solution(numbers, target)
        return boxed(found) if found else None


def evaluated(text: str) -> tuple[Fraction, list[int]] | None:
    text = _SPELT.sub(lambda match: _LATEX[match.group()], text).strip()
    if len(text) > MOST_CHARS or not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        return None
    used: list[int] = []
    try:
        return _value(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, used), _value(node.right, used)
        return Fraction(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError("not an expression of numbers")


def solution(numbers: Sequence[int], target: int) -> str:
    tried = 0
    pending = [tuple((Fraction(number), str(number)) for number in numbers)]
    while pending and tried < MOST_TRIED:
        have = pending.pop()
        if len(have) == 1 and have[0][0] == target:
            return have[0][1]
        for i, j in combinations(range(len(have)), 2):
            rest = tuple(each for k, each in enumerate(have) if k not in (i, j))
            (a, left), (b, right) = have[i], have[j]
            made = [(a + b, f"({left} + {right})"), (a * b, f"({left} * {right})")]
            made += [(a - b, f"({left} - {right})"), (b - a, f"({right} - {left})")]
            made += [(a / b, f"({left} / {right})")] if b else []
            made += [(b / a, f"({right} / {left})")] if a else []
            pending += [(*rest, each) for each in made]
            tried += len(made)
    return ""
