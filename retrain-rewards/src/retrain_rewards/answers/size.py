r"""Refuses formulas whose evaluation could run away, before anything evaluates them.

Computer algebra evaluates `9^{9^{9^9}}`, `10^{10}!` or `\binom{10^9}{10^8}` in full, and fills the memory inside one C
call that no timer can interrupt. The bound here is crude and on the safe side: a formula is read as brackets, numbers,
letters, powers and factorials, and the decimal digits of the largest number it can mean are bounded from above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

# Characters; the parser's time grows faster than the text.
MAX_LENGTH = 1000
# Nested brackets; math-verify needs seconds at 30 and gives up silently at 80.
MAX_DEPTH = 20
MAX_DIGITS = 20_000
# A letter or a command stays symbolic: only whole numbers are ever written out.
SYMBOL = (1.0, 0.0)
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:[.,][0-9]+)*|\*\*|\S", re.DOTALL)
_OPENERS, _CLOSERS = frozenset({"{", "(", "[", r"\{"}), frozenset({"}", ")", "]", r"\}"})
_BINOMIALS = frozenset({r"\binom", r"\dbinom", r"\tbinom"})
_NEUTRAL = frozenset("+-*/=<>,.;:&|_$") | {r"\frac", r"\dfrac", r"\tfrac", r"\cdot", r"\times", r"\left", r"\right"}

Bound = tuple[float, float]  # (most decimal digits, largest absolute value), infinite when unbounded


def refusal(formula: str) -> str:
    """Return why the formula is not evaluated (`is longer than ...`); empty when it is harmless."""
    if len(formula) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    try:
        digits, _ = _Formula(formula).group(closed=False)
    except RecursionError:
        return f"nests more than {MAX_DEPTH} levels deep"
    if digits > MAX_DIGITS:
        return f"can mean a number of more than {MAX_DIGITS} digits"
    return ""


class _Formula:
    """One pass over the tokens; recursion is bounded by `MAX_DEPTH`."""

    def __init__(self, formula: str) -> None:
        self.tokens = _TOKEN.findall(formula)
        self.position = 0
        self.depth = 0

    def group(self, *, closed: bool) -> Bound:
        """Read up to a closing bracket; the product of (value + 1) bounds sum, product and quotient alike."""
        bounds: list[Bound] = []
        while self.position < len(self.tokens):
            token = self.tokens[self.position]
            if token in _CLOSERS or token in _NEUTRAL:
                self.position += 1
                if closed and token in _CLOSERS:
                    break
                continue
            bounds.append(self.factor())
        if len(bounds) == 1:
            return bounds[0]
        return sum(digits for digits, _ in bounds), math.prod(value + 1.0 for _, value in bounds)

    def factor(self) -> Bound:
        bound = self.atom()
        while self.position < len(self.tokens) and self.tokens[self.position] in ("^", "**", "!"):
            self.position += 1
            bound = (
                _factorial(bound) if self.tokens[self.position - 1] == "!" else _power(bound, self._deeper(self.factor))
            )
        return bound

    def atom(self) -> Bound:
        if self.position >= len(self.tokens):
            return 0.0, 1.0
        token = self.tokens[self.position]
        self.position += 1
        if token in _OPENERS:
            return self._deeper(partial(self.group, closed=True))
        if token in _BINOMIALS:
            upper, _ = self._deeper(self.factor), self._deeper(self.factor)
            return upper[1], _power((1.0, 2.0), upper)[1]
        return _number(token) if token[0] in "0123456789" else SYMBOL

    def _deeper(self, read: Callable[[], Bound]) -> Bound:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError
        bound = read()
        self.depth -= 1
        return bound


def _number(token: str) -> Bound:
    """Bound a number. Decimals count as digits of the value, because it may be a denominator: 1/0.001."""
    whole, _, decimals = token.replace(",", "").partition(".")
    size = max(len(whole), len(decimals))
    value = max(float(whole), 10.0 ** len(decimals)) if size < 300 else math.inf
    return float(len(token)), value


def _power(base: Bound, exponent: Bound) -> Bound:
    digits, value = base
    times = max(1.0, exponent[1])
    magnitude = times * math.log10(max(value, 1.0))
    return max(1.0, digits) * times, 10.0**magnitude if magnitude < 300 else math.inf


def _factorial(bound: Bound) -> Bound:
    value = max(2.0, bound[1])
    digits = value * math.log10(value)
    return bound[0] + digits, 10.0**digits if digits < 300 else math.inf
