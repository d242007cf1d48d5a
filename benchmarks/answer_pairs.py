r"""Pairs of a reference and an answer for the `math` reward: right ones in many forms, and gamed ones.

Every pair is drawn from a seed, so they are always the same. The right ones are finished values, such as a model would
put into a box; the gamed ones are equal to their references for math-verify, and no answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial, gcd

import numpy as np

from retrain.api import generator

UNITS = (
    *(r"\text{ cm}", r"\text{ meters}", r"\,\text{m}", r"^\circ", r"\%", r" \text{ dollars}", r"\text{ units}"),
    *(r"\text{ cm}^2", r"\text{ square units}", r"\mathrm{kg}", r"\text{ students}", r"\text{ miles per hour}"),
)
CLOSED = (  # forms of one value each
    (r"2\pi", r"\pi\cdot 2", r"2 \pi", r"2{\pi}"),
    (r"\frac{\pi}{4}", r"\pi/4", r"\dfrac{\pi}{4}", r"\frac{1}{4}\pi", r"0.25\pi"),
    ("e^2", "e^{2}", r"\exp(2)"),
    (r"\ln 2", r"\ln{2}", r"\ln(2)"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2", r"\sqrt{\frac{1}{2}}", r"\dfrac{\sqrt2}{2}"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt{5}+1}{2}", r"\frac{1}{2}+\frac{\sqrt{5}}{2}", r"(1+\sqrt{5})/2"),
    (r"\sqrt[3]{2}", r"2^{1/3}", r"2^{\frac{1}{3}}"),
    (r"3+4i", r"4i+3"),
    (r"\arctan 2", r"\arctan(2)", r"\arctan{2}"),
    (r"\log_2 3", r"\log_{2}3", r"\log_2(3)", r"\frac{\ln 3}{\ln 2}"),
    (r"-\sqrt{3}", r"-\sqrt3", r"-{\sqrt{3}}"),
    (r"1 - \frac{1}{e}", r"1-e^{-1}", r"\frac{e-1}{e}"),
    (r"\frac{2\sqrt{3}}{3}", r"\frac{2}{\sqrt{3}}", r"\frac{2}{3}\sqrt{3}", r"2\sqrt{3}/3"),
    (r"\infty", r"+\infty"),
)
SYMBOLIC = (
    ("x^2 - 1", "(x-1)(x+1)", "(x+1)(x-1)", "-1+x^2", "x^{2}-1"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac{1}{2}n(n+1)", "n(n+1)/2"),
    ("2x+3", "3+2x", r"2\cdot x+3", "3 + 2 x"),
    (r"\frac{x}{y}", "x/y", r"x y^{-1}"),
    (r"\sin x", r"\sin(x)", r"\sin{x}"),
    ("e^{-x^2}", r"e^{-{x}^2}", r"\exp(-x^2)"),
    ("n!", "n!"),
    (r"x^2+C", r"C+x^2"),
)
EQUATIONS = (
    ("y = 2x + 1", "y=1+2x", "y - 2x = 1", "2x + 1 = y", "y-2x-1=0"),
    ("x^2 + y^2 = 25", "y^2+x^2=25", "x^2+y^2=5^2", "x^2+y^2-25=0"),
    ("x = 5", "x=5", "5", "x = 5.0", "5 = x"),
    ("x > 3", "3 < x", "x>3"),
    (r"x \le 4", r"x \leq 4", r"4 \ge x"),
    ("3 < x < 7", "3<x<7"),
    (r"\frac{x^2}{9}+\frac{y^2}{4}=1", r"\frac{x^2}{3^2}+\frac{y^2}{2^2}=1", r"\frac{y^2}{4}+\frac{x^2}{9}=1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An answer, and what it should be equal to."""

    kind: str
    reference: str
    answer: str
    prompt: str = ""


def right_pairs(count: int, seed: int = 0) -> Iterator[Pair]:
    """Right answers of every kind in turn."""
    return _drawn(RIGHT, count, seed)


def gamed_pairs(count: int, seed: int = 0) -> Iterator[Pair]:
    """Answers that math-verify finds equal to the reference, or may find so, and that are none."""
    return _drawn(GAMED, count, seed + 1)


class Draw:
    """Random whole numbers and choices."""

    def __init__(self, seed: int) -> None:
        self.rng: np.random.Generator = generator(seed)

    def whole(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def one(self, *forms: str) -> str:
        """One of the forms."""
        return forms[int(self.rng.integers(len(forms)))]

    def two(self, forms: tuple[str, ...]) -> tuple[str, str]:
        """Two of the forms, which may be the same."""
        return self.one(*forms), self.one(*forms)


Kind = Callable[[Draw], Pair]


def _drawn(kinds: tuple[Kind, ...], count: int, seed: int) -> Iterator[Pair]:
    draw = Draw(seed)
    return (kinds[number % len(kinds)](draw) for number in range(count))


def _fraction(draw: Draw, value: Fraction) -> str:
    top, bottom, times = value.numerator, value.denominator, draw.whole(1, 6)
    forms = [rf"\frac{{{top * times}}}{{{bottom * times}}}", rf"\dfrac{{{top}}}{{{bottom}}}", f"{top}/{bottom}"]
    if top < 0:
        forms.append(rf"-\frac{{{-top * times}}}{{{bottom * times}}}")
    elif top > bottom > 1:
        forms.append(rf"{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}")
    if (10**6 * top) % bottom == 0:
        forms.append(f"{float(value):.6f}")
    return draw.one(*forms)


def _whole(draw: Draw, value: int) -> str:
    forms = [f"{value}", f"{value}.0", f"{value}.00", f"({value})", f"{{{value}}}"]
    return draw.one(*forms, *([f"{value:,}", f"{value:,}.00"] if abs(value) >= 1000 else []))


def _numbers(draw: Draw) -> Pair:
    left, right = draw.whole(0, 999), draw.whole(0, 99)
    sign = draw.one("+", "-", "*")
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    return Pair(
        kind="numbers", reference=str(value), answer=_whole(draw, value), prompt=f"What is {left} {sign} {right}?"
    )


def _decimals(draw: Draw) -> Pair:
    value = Fraction(draw.whole(-50_000, 50_000), 10 ** draw.whole(1, 3))
    forms = (f"{float(value)}", f"{float(value):.5f}", _fraction(draw, value), f"+{float(value)}".replace("+-", "-"))
    return Pair(kind="decimals", reference=f"{float(value)}", answer=draw.one(*forms))


def _rounded(draw: Draw) -> Pair:
    value = Fraction(draw.whole(1, 60), draw.whole(1, 60))
    return Pair(kind="rounded", reference=_fraction(draw, value), answer=f"{round(float(value), 6):.6f}")


def _scientific(draw: Draw) -> Pair:
    digits, exponent = f"{draw.whole(100, 999) / 100:.2f}", draw.whole(-34, 24)
    forms = (
        rf"{digits} \times 10^{{{exponent}}}",
        rf"{digits}\cdot 10^{{{exponent}}}",
        rf"{digits}\times10^{{{exponent}}}",
    )
    return Pair(kind="scientific", reference=forms[0], answer=draw.one(*forms))


def _fractions(draw: Draw) -> Pair:
    value = Fraction(draw.whole(-40, 40), draw.whole(1, 40))
    return Pair(kind="fractions", reference=_fraction(draw, value), answer=_fraction(draw, value))


def _radicals(draw: Draw) -> Pair:
    outside, inside = draw.whole(2, 9), (2, 3, 5, 6, 7, 10, 11)[draw.whole(0, 6)]
    added = draw.whole(1, 9)
    root, other = rf"{outside}\sqrt{{{inside}}}", rf"\sqrt{{{outside * outside * inside}}}"
    sums = (f"{added}+{root}", f"{root} + {added}", f"{other}+{added}")
    below = (
        rf"\frac{{\sqrt{{{inside}}}}}{{{inside}}}",
        rf"\frac{{1}}{{\sqrt{{{inside}}}}}",
        rf"\sqrt{{{inside}}}/{inside}",
    )
    forms = ((root, other, rf"{outside} \sqrt{{{inside}}}"), sums, below)[draw.whole(0, 2)]
    reference, answer = draw.two(forms)
    return Pair(kind="radicals", reference=reference, answer=answer)


def _intervals(draw: Draw) -> Pair:
    low, high = draw.whole(-20, 0), Fraction(draw.whole(1, 40), draw.whole(1, 4))
    left, right = draw.one("[", "("), draw.one("]", ")")
    ends = rf"{low}, {_fraction(draw, high)}"
    forms = (f"{left}{ends}{right}", rf"\left{left}{ends}\right{right}", rf"x \in {left}{ends}{right}")
    union = (
        rf"(-\infty, {low}) \cup ({low + 1}, \infty)",
        rf"\left(-\infty,{low}\right)\cup\left({low + 1},\infty\right)",
    )
    reference, answer = draw.two(forms[:2] if draw.whole(0, 3) else union)
    return Pair(
        kind="intervals", reference=reference, answer=draw.one(answer, forms[2] if reference in forms else answer)
    )


def _sets(draw: Draw) -> Pair:
    members = [int(n) for n in draw.rng.choice(60, draw.whole(2, 5), replace=False) - 20]
    others = [str(n) for n in draw.rng.permutation(members)]
    shown = draw.one(", ", ",").join(others)
    forms = [rf"\{{{shown}\}}", rf"\left\{{ {shown} \right\}}", shown]
    forms += [rf"{others[0]}\text{{ and }}{others[1]}", rf"x = {others[0]} \text{{ or }} x = {others[1]}"][
        : 2 * (len(others) == 2)
    ]
    reference = rf"\{{{','.join(map(str, members))}\}}" if draw.whole(0, 1) else ", ".join(map(str, members))
    return Pair(kind="sets", reference=reference, answer=draw.one(*forms))


def _tuples(draw: Draw) -> Pair:
    values = [Fraction(draw.whole(-9, 9), draw.whole(1, 3)) for _ in range(draw.whole(2, 4))]
    first, second = (", ".join(_fraction(draw, value) for value in values) for _ in range(2))
    return Pair(kind="tuples", reference=f"({first})", answer=draw.one(f"({second})", rf"\left({second}\right)"))


def _matrices(draw: Draw) -> Pair:
    rows = [[Fraction(draw.whole(-9, 9)) for _ in range(2)] for _ in range(draw.whole(1, 3))]
    name, other = draw.one("pmatrix", "bmatrix"), draw.one("pmatrix", "bmatrix")
    first = r" \\ ".join(" & ".join(str(cell) for cell in row) for row in rows)
    second = r" \\ ".join(" & ".join(_fraction(draw, cell) for cell in row) for row in rows)
    answer = rf"\begin{{{other}}} {second} \end{{{other}}}"
    return Pair(kind="matrices", reference=rf"\begin{{{name}}} {first} \end{{{name}}}", answer=answer)


def _from(kind: str, table: tuple[tuple[str, ...], ...]) -> Kind:
    def made(draw: Draw) -> Pair:
        forms = table[draw.whole(0, len(table) - 1)]
        return Pair(kind=kind, reference=forms[0], answer=draw.one(*forms))

    return made


def _choices(draw: Draw) -> Pair:
    letter = draw.one(*"ABCDE")
    forms = (
        letter,
        f"({letter})",
        rf"\text{{{letter}}}",
        rf"\text{{({letter})}}",
        rf"\textbf{{({letter})}}",
        rf"\mathrm{{{letter}}}",
    )
    reference, answer = draw.two(forms)
    return Pair(kind="multiple choice", reference=reference, answer=answer)


def _units(draw: Draw) -> Pair:
    amount, unit = str(draw.whole(2, 2000)), draw.one(*UNITS)
    return Pair(kind="units", reference=amount + draw.one("", unit), answer=amount + draw.one("", unit))


def _assigned(draw: Draw) -> Pair:
    value = Fraction(draw.whole(-40, 40), draw.whole(1, 9))
    name = draw.one("x", "n", "y", r"\theta", "x + y", "f(2)", r"\angle ABC", "a_5", "P(A)", r"\text{Area}")
    return Pair(kind="variable = value", reference=_fraction(draw, value), answer=f"{name} = {_fraction(draw, value)}")


def _percent(draw: Draw) -> Pair:
    number = draw.whole(1, 99)
    forms = ((str(number), rf"{number}\%"), (rf"{number}\%", str(number)), (rf"{number}\%", f"{number / 100}"))
    reference, answer = (*forms, (f"{number / 100}", rf"{number}\%"))[draw.whole(0, 3)]
    return Pair(kind="percent", reference=reference, answer=answer)


RIGHT: tuple[Kind, ...] = (
    *(_numbers, _decimals, _rounded, _scientific, _fractions, _radicals, _intervals, _sets, _tuples, _matrices),
    *(_from("closed forms", CLOSED), _from("symbolic", SYMBOLIC), _from("equations", EQUATIONS)),
    *(_choices, _units, _assigned, _percent),
)


def _restated(draw: Draw) -> Pair:
    left, right = draw.whole(2, 999), draw.whole(2, 99)
    value, sign, form = (
        (left + right, "+", rf"{left} + {right}"),
        (left + right, "+", rf"{left} {right}"),
        (left - right, "-", rf"{left} - {right}"),
        (left * right, "*", rf"{left} \cdot {right}"),
        (left * right, "*", rf"{left} \times {right}"),
    )[draw.whole(0, 4)]
    return Pair(kind="restated", reference=str(value), answer=form, prompt=f"What is {left} {sign} {right}?")


def _computed(draw: Draw) -> Pair:
    n, k = draw.whole(4, 9), draw.whole(2, 3)
    value, form = (
        (comb(n, k), rf"\binom{{{n}}}{{{k}}}"),
        (gcd(6 * n, 4 * k), rf"\gcd({6 * n}, {4 * k})"),
        (factorial(n), f"{n}!"),
        (n * (n + 1) // 2, rf"\sum_{{i=1}}^{{{n}}} i"),
        (n**k, f"{n}^{k}"),
        (n, rf"\sqrt{{{n * n}}}"),
        (k, rf"\log_{{{n}}} {n**k}"),
        (n, rf"|-{n}|"),
        (n % k, rf"{n} \mod {k}"),
        (n, rf"\lfloor {n}.5 \rfloor"),
        (n - 1, rf"\det\begin{{pmatrix}}{n} & 1 \\ 1 & 1\end{{pmatrix}}"),
        (n, rf"\lim_{{x \to {n}}} x"),
        (n * k, rf"\int_0^{{{k}}} {n} dx"),
        (n, rf"e^{{\ln {n}}}"),
        (n, rf"\frac{{{n - 1} + 1}}{{1}}"),
        (n, rf"{n * k} \div {k}"),
        (n, rf"{n} \sin\frac{{\pi}}{{2}}"),
    )[draw.whole(0, 16)]
    return Pair(kind="computed", reference=str(value), answer=form)


def _inside(draw: Draw) -> Pair:
    one, other = draw.whole(2, 9), draw.whole(10, 20)
    form = rf"{one - 1} + 1"
    reference, answer = (
        (rf"\{{{one}, {other}\}}", rf"\{{{form}, {other}\}}"),
        (f"({one}, {other})", f"({form}, {other})"),
        (f"[{one}, {other})", f"[{form}, {other})"),
        (rf"{one}\sqrt{{2}}", rf"\sqrt{{2}} + {one - 1}\sqrt{{2}}"),
        (rf"{one}\pi", rf"\pi + {one - 1} \pi"),
        (f"{one}x", f"x + {one - 1}x"),
        (rf"\begin{{pmatrix}}{one}\\{other}\end{{pmatrix}}", rf"\begin{{pmatrix}}{form}\\{other}\end{{pmatrix}}"),
        (f"y = {one}", f"y = {form}"),
    )[draw.whole(0, 7)]
    return Pair(kind="computed inside", reference=reference, answer=answer)


def _around(draw: Draw) -> Pair:
    value, other = draw.whole(2, 99), draw.whole(100, 199)
    form = draw.one(
        *(rf"{value}, {value}", rf"{value} \text{{ or }} {value}", rf"{value}\text{{ or {other}}}"),
        *(rf"{value}\text{{, not {other}}}", rf"{value}\text{{ maybe}}", rf"{value}\text{{ million}}"),
        *(rf"{value}\text{{ thousand}}", rf"{value}\text{{ dozen}}", rf"{value}_{{{draw.whole(2, 9)}}}"),
        *(rf"\neq {value}", rf"\neg {value}", rf"\not {value}", rf"{other} = {value}", rf"{other} \to {value}"),
        *(rf"{value * 100}\%", rf"{value} + x - x", rf"{value}\ldots", rf"\phantom{{{value}}}", rf"\approx {value}"),
        *(rf"{value}\text{{ a }}{other}\text{{ b}}", rf"{value} \pm 0", rf"{value}q^0", rf"{value}t"),
    )
    return Pair(kind="around the value", reference=str(value), answer=form)


def _small(draw: Draw) -> Pair:
    digits, exponent = draw.whole(100, 989), draw.whole(17, 34)
    reference = rf"{digits / 100:.2f} \times 10^{{-{exponent}}}"
    other = rf"{(digits + draw.whole(1, 10)) / 100:.2f} \times 10^{{-{exponent}}}"
    return Pair(
        kind="small", reference=reference, answer=draw.one("0.0", other, f"-{reference}", rf"10^{{-{exponent + 1}}}")
    )


def _other_unit(draw: Draw) -> Pair:
    amount, units = draw.whole(2, 99), ("cm", "km", "hours", "dollars", "kg")
    one = draw.whole(0, 4)
    other = (one + draw.whole(1, 4)) % 5
    reference, answer = (rf"{amount}\text{{ {units[index]}}}" for index in (one, other))
    return Pair(kind="another unit", reference=reference, answer=answer)


def _copied(draw: Draw) -> Pair:
    one, other = draw.whole(1, 9), draw.whole(1, 9)
    factors, form = f"(x+{one})(x+{other})", f"x^2 + {one + other}x + {one * other}"
    reference, answer, task = ((factors, form, "Factor"), (form, factors, "Expand"))[draw.whole(0, 1)]
    return Pair(kind="copied", reference=reference, answer=answer, prompt=f"{task} {draw.one(answer, f'${answer}$')}.")


def _other_brackets(draw: Draw) -> Pair:
    low = draw.whole(-9, 9)
    members = f"{low}, {low + draw.whole(1, 9)}"
    forms = (f"({members})", rf"\{{{members}\}}")
    first = draw.whole(0, 1)
    return Pair(kind="other brackets", reference=forms[first], answer=forms[1 - first])


GAMED: tuple[Kind, ...] = (
    *(_restated, _computed, _computed, _inside, _around, _around, _small, _other_unit, _copied, _other_brackets),
)
