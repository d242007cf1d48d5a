"""The problems that the tiny model is taught: its home task and three small reasoning-gym data sets."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

INSTRUCTION = r"Put your final answer in \boxed{}."
OPERATORS = ("+", "-", "*")
HOME_FORMS = ("What is {}?",) * 6 + ("Compute {}.", "Calculate {}.")
CHAIN_SUM_FORM = "State the final answer to the following arithmetic problem: {} ="
PRODUCTS_FORM = "Solve the following multiplication: {}. Give only the result as your final answer."
GCD_FORM = "Find the Greatest Common Divisor (GCD) of these numbers: {}. Give only the GCD as your final answer."
GCD_LIMIT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with the numbers it was made of and its exact answer."""

    task: str
    question: str
    terms: tuple[int, ...]
    operators: tuple[str, ...]
    answer: int


def evaluate(terms: tuple[int, ...], operators: tuple[str, ...]) -> int:
    """Left-to-right value of a chain of additions and subtractions, or of one product."""
    total = terms[0]
    for operator, term in zip(operators, terms[1:], strict=True):
        total = total * term if operator == "*" else total + term if operator == "+" else total - term
    return total


def expression(terms: tuple[int, ...], operators: tuple[str, ...]) -> str:
    """The chain as written in a question: `47 + 38 - 5`."""
    return str(terms[0]) + "".join(f" {o} {t}" for o, t in zip(operators, terms[1:], strict=True))


def _digits(rng: random.Random, digits: int) -> int:
    """A number of exactly that many digits (zero counts as one digit)."""
    return rng.randint(0, 9) if digits == 1 else rng.randint(10 ** (digits - 1), 10**digits - 1)


def arithmetic(rng: random.Random) -> Problem:
    """The home task: `+` and `-` up to two digits, one digit times two digits."""
    operator = rng.choice(OPERATORS)
    terms = (rng.randint(0, 99), rng.randint(0, 99))
    if operator == "*":
        terms = (rng.randint(1, 9), rng.randint(10, 99))
        terms = terms if rng.random() < 0.7 else terms[::-1]
    question = rng.choice(HOME_FORMS).format(expression(terms, (operator,)))
    if operator == "*" and rng.random() < 0.1:
        question = question.replace("*", rng.choice("x\u00d7"))
    return Problem(
        task="arithmetic", question=question, terms=terms, operators=(operator,), answer=evaluate(terms, (operator,))
    )


def chain_sum(rng: random.Random) -> Problem:
    """reasoning-gym `chain_sum` with two or three terms of one or two digits."""
    length = rng.randint(2, 3)
    digits = rng.randint(1, 2)
    terms = tuple(_digits(rng, digits) for _ in range(length))
    operators = tuple(rng.choice("+-") for _ in range(length - 1))
    question = CHAIN_SUM_FORM.format(expression(terms, operators))
    return Problem(
        task="chain_sum", question=question, terms=terms, operators=operators, answer=evaluate(terms, operators)
    )


def products(rng: random.Random) -> Problem:
    """reasoning-gym `products` with two factors of one or two digits."""
    digits = rng.randint(1, 2)
    terms = (_digits(rng, digits), _digits(rng, digits))
    question = PRODUCTS_FORM.format(expression(terms, ("*",)))
    return Problem(task="products", question=question, terms=terms, operators=("*",), answer=evaluate(terms, ("*",)))


def gcd(rng: random.Random) -> Problem:
    """reasoning-gym `gcd` of two numbers up to forty, which also tries three times for a divisor above one."""
    for _ in range(3):
        terms = (rng.randint(1, GCD_LIMIT), rng.randint(1, GCD_LIMIT))
        if math.gcd(*terms) > 1:
            break
    question = GCD_FORM.format(", ".join(map(str, terms)))
    return Problem(task="gcd", question=question, terms=terms, operators=("gcd",), answer=math.gcd(*terms))
