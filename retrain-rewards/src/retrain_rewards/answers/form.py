r"""The form in which an answer is written, read by math-verify's own parser before anything in it is computed.

math-verify's converter evaluates on the way (`\binom{5}{2}` is 10 as soon as it is read, `\frac{6}{2}` is 3), so the
value does not show whether an answer was computed or merely restated. `form_of` converts the same parse tree and keeps
every operation; `is_finished` says whether something in it still has to be computed. Importing this loads sympy.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify.grader import should_treat_as_complex
from sympy.core.symbol import Str

from retrain_rewards.boxed import boxed

NORMALIZATION = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="last")
_CASED = ConversionConfig(lowercase_symbols=False)
_PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))  # how the parser writes the sign
_FUNCTIONS_THAT_COMPUTE = frozenset({"det", "Gamma", "gamma", "operatorname", "floor", "ceil"})
Form = Any  # a sympy object; lists, sets, tuples, intervals and relations are `Tuple(Str(kind), *parts)`


class Ratio(sympy.Function):  # type: ignore[misc]
    def doit(self, **hints: object) -> Form:
        return sympy.Rational(*self.args)


class Mixed(sympy.Function):  # type: ignore[misc]
    r"""A mixed number, `2\frac{1}{2}`."""

    def doit(self, **hints: object) -> Form:
        return self.args[0] + self.args[1].doit()


class Computed(sympy.Function):  # type: ignore[misc]
    """Something that the parser computes or drops on its way to a value, with its source as argument."""


_TO_DO = (Computed, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative, sympy.Mod)


def form_of(formula: str) -> Form:
    """Return the form of a formula without its unit; the parser's exception where it is no LaTeX mathematics."""
    latex = normalize_latex(boxed(formula), NORMALIZATION)
    return _Form(is_real=not should_treat_as_complex(latex), config=_CASED).parse(latex)


def value_of(formula: str, *, is_cased: bool = False) -> tuple[Form, str]:
    """Return what `math_verify.parse` gives for a box with the formula; an exception if it is no LaTeX mathematics."""
    latex = normalize_latex(boxed(formula), NORMALIZATION)
    config = _CASED if is_cased else ConversionConfig()
    return _Value(is_real=not should_treat_as_complex(latex), config=config).parse(latex), latex


@lru_cache(maxsize=64)
def syntax_tree(latex: str) -> Any:
    return _Latex2Sympy().create_parser(latex).math()


def kind_of(form: Form) -> str:
    """Return `list`, `{}`, `()`, `[)`, `=`, `<`, ... for forms of several parts, and "" for others."""
    return str(form.args[0]) if isinstance(form, sympy.Tuple) else ""


def fingerprint(form: Form) -> str:
    """Return a text that is equal for equal forms, whatever the order of terms and factors."""
    if isinstance(form, sympy.MatrixBase):
        return f"{form.shape}{[fingerprint(cell) for cell in form]}"
    if not form.args:
        return str(sympy.srepr(form)).lower()
    parts = [fingerprint(part) for part in form.args]
    return f"{type(form).__name__}{sorted(parts) if isinstance(form, sympy.Add | sympy.Mul) else parts}"


def reduced(form: Form) -> Form:
    return form if form.has(*_TO_DO) else form.doit()


def is_finished(form: Form) -> bool:
    r"""True if nothing in the form still has to be computed.

    Numbers, fractions of whole numbers (also unreduced), mixed numbers, `a \times 10^n`, percentages, constants and
    letters are finished. So are sums without like terms, products with one rational coefficient, roots, powers and
    functions of such parts, unless their value is rational (`\sqrt{4}`, `2^{10}`, `\log_2 8`) or a function has a value
    that needs none (`\sin\frac{\pi}{3}`). Next to letters, powers of whole numbers may stay: `x^2 + y^2 = 5^2`.
    """
    return _finished(form, beside_letters=bool(form.free_symbols))


def is_literal(form: Form) -> bool:
    """True if the form is one number as written, with at most a sign."""
    if not isinstance(form, sympy.Expr):
        return False
    if isinstance(form, Ratio | Mixed) or form.is_Number or form.is_NumberSymbol or form is sympy.I:
        return True
    if isinstance(form, sympy.Pow):
        return bool(form.base == 10 and form.exp.is_Integer)
    if isinstance(form, sympy.Mul):
        *sign, first, second = form.args
        if second == _PERCENT:
            return bool(first.is_Number and sign in ([], [-1]))
        if first == -1:
            return not sign and is_literal(second) and not second.is_Number
        return bool(not sign and first.is_Number and second.is_Pow and is_literal(second))
    return False


def _finished(form: Form, *, beside_letters: bool) -> bool:
    if isinstance(form, sympy.MatrixBase | sympy.Tuple | sympy.MatMul):
        if isinstance(form, sympy.MatMul) and sum(isinstance(part, sympy.MatrixBase) for part in form.args) != 1:
            return False
        parts = list(form) if isinstance(form, sympy.MatrixBase) else form.args[isinstance(form, sympy.Tuple) :]
        return all(_finished(part, beside_letters=beside_letters) for part in parts)
    if not isinstance(form, sympy.Expr):
        return isinstance(form, sympy.Set)  # a named one
    if form.is_Matrix or form.has(*_TO_DO):
        return False
    if form.is_Symbol or is_literal(form):
        return True
    if beside_letters and form.is_Pow and form.base.is_Integer and form.exp.is_Integer:
        return True
    if not form.free_symbols and not _is_closed(form):
        return False
    if form.is_Add:
        rests = [term.doit().as_coeff_Mul()[1] for term in form.args]
        if len(set(rests)) < len(rests) or 0 in form.args:  # like terms
            return False
    parts = list(form.args)
    if form.is_Mul:
        if not _has_one_coefficient(form):
            return False
        parts = [part.base if part.is_Pow and part.exp == -1 else part for part in parts]  # of a quotient
    if form.is_Pow:
        if form.exp in (0, 1) or form.base == 1:
            return False
        parts = [form.base] if form.exp.is_Rational else parts
    return all(_finished(part, beside_letters=beside_letters) for part in parts)


def _is_closed(form: Form) -> bool:
    r"""True if a number such as `2\sqrt{3}`, without a literal, is as simple as sympy makes it at once."""
    if form.is_Pow and form.exp.is_Integer and abs(form.exp) > 1 and not form.base.is_NumberSymbol:
        return False
    exact = {number: sympy.Rational(str(number)) for number in form.atoms(sympy.Float)}
    value = form.xreplace(exact).doit()
    if value.is_rational or value.is_finite is False:
        return False
    return not form.is_Function or bool(value.has(type(form)))


def _has_one_coefficient(form: Form) -> bool:
    letters = [factor for factor in form.args if factor.is_Symbol]
    signs = form.args.count(-1)
    is_quotient = any(factor.is_Pow and factor.exp == -1 for factor in form.args)
    if signs > 1 or len(set(letters)) < len(letters) or (1 in form.args and not is_quotient):
        return False
    above, below = _coefficients(form)
    return above <= 1 and below <= 1 and not any(factor.is_Pow and factor.base == 1 for factor in form.args)


def _coefficients(form: Form) -> tuple[int, int]:
    if isinstance(form, Ratio):
        return int(abs(form.args[0]) != 1), 1
    if isinstance(form, Mixed) or form.is_Number:
        return int(abs(form.doit()) != 1), 0
    if form.is_Pow and form.exp == -1:
        below, above = _coefficients(form.base)
        return above, below
    if not form.is_Mul:
        return 0, 0
    counts = [_coefficients(factor) for factor in form.args]
    return sum(above for above, _ in counts), sum(below for _, below in counts)


def _several(kind: str, *parts: Form) -> Form:
    return sympy.Tuple(Str(kind), *parts)


def _computed(tree: Any) -> Form:
    return Computed(Str(tree.getText()))


class _Value(_Latex2Sympy):  # type: ignore[misc]
    """math-verify's converter to values."""

    def create_parser(self, latex_str: str) -> Any:
        return SimpleNamespace(math=lambda: syntax_tree(latex_str))


class _Form(_Value):
    """Converts to the form: replaces each step that would evaluate, reorder or drop something."""

    def convert_relation(self, rel: Any) -> Form:
        if rel.expr():
            return self.convert_expr(rel.expr())
        sides = (self.convert_relation(side) for side in rel.relation())
        return _several("=" if rel.ASSIGNMENT() or rel.EQUAL() or rel.APPROX() else rel.getChild(1).getText(), *sides)

    def convert_set_relation(self, expr: Any) -> Form:
        if expr.atom_expr_list():
            left = self.convert_atom_expr_list(expr.atom_expr_list())
            right = self.convert_set_relation(expr.set_relation()[0])
            return _several(r"\notin" if expr.NOTIN() else "=", left, right)
        return _computed(expr) if expr.set_relation() else self.convert_set_minus(expr.minus_expr())

    def convert_set_elements_relation(self, expr: Any) -> Form:
        members = self.convert_semicolon_elements_no_relation(expr.semicolon_elements_no_relation())
        left = self.convert_atom_expr_list(expr.atom_expr_list())
        return _several("=", left, self.convert_elements_to_set_or_tuple(members))

    def convert_elements_to_set_or_tuple(self, elements: list[list[Form]]) -> Form:
        groups = [group[0] if len(group) == 1 else _several("list", *group) for group in elements]
        return groups[0] if len(groups) == 1 else _several("list", *groups)

    def convert_finite_set(self, expr: Any) -> Form:
        return _several("{}", *chain.from_iterable(self.convert_semicolon_elements(expr.semicolon_elements())))

    def convert_ordered_tuple(self, expr: Any) -> Form:
        members = list(chain.from_iterable(self.convert_semicolon_elements(expr.semicolon_elements())))
        return members[0] if len(members) == 1 else _several("()", *members)

    def convert_interval(self, expr: Any) -> Form:
        left = "[" if expr.L_BRACKET() or expr.L_BRACK() else "("
        right = "]" if expr.R_BRACKET() or expr.R_BRACK() else ")"
        return _several(left + right, *(self.convert_expr(end) for end in expr.expr()))

    def convert_set_minus(self, expr: Any) -> Form:
        if expr.union_expr():
            return self.convert_set_union(expr.union_expr())
        return _several("minus", *(self.convert_set_minus(part) for part in expr.minus_expr()))

    def convert_set_union(self, expr: Any) -> Form:
        if expr.intersection_expr():
            return self.convert_set_intersection(expr.intersection_expr())
        return _several("union", *(self.convert_set_union(part) for part in expr.union_expr()))

    def convert_set_intersection(self, expr: Any) -> Form:
        return self.convert_set_group(expr.set_group()) if expr.set_group() else _computed(expr)

    def convert_matrix(self, matrix: Any) -> Form:
        is_transformed = hasattr(matrix, "MATRIX_XRIGHTARROW") and matrix.MATRIX_XRIGHTARROW()
        return _computed(matrix) if is_transformed else super().convert_matrix(matrix).as_immutable()

    def convert_frac(self, frac: Any) -> Form:
        value = super().convert_frac(frac)
        if getattr(value, "is_Rational", False):
            return Ratio(self.convert_expr(frac.upper), self.convert_expr(frac.lower))
        return value

    def convert_mp(self, mp: Any) -> Form:
        if not (mp.DIV() or mp.CMD_DIV() or mp.COLON()):
            return super().convert_mp(mp)
        parts = mp.mp() if hasattr(mp, "mp") else mp.mp_nofunc()
        above, below = (self.convert_mp(part) for part in parts)
        if mp.getChild(1).getText() not in ("/", r"\over"):
            return _computed(mp)
        if above.is_Integer and below.is_Integer:
            return Ratio(above, below)
        return self.mul_flat(above, sympy.Pow(below, -1, evaluate=False))

    def convert_unary(self, unary: Any) -> Form:
        nested = unary.unary() if hasattr(unary, "unary") else unary.unary_nofunc()
        value = self.convert_unary(nested) if unary.SUB() else None
        if value is not None and value.is_Number and value < 0:
            return sympy.Mul(-1, value, evaluate=False)
        return super().convert_unary(unary)

    def convert_postfix_list(self, arr: list[Any], i: int = 0) -> Form:
        if i == len(arr) - 1:
            return super().convert_postfix_list(arr, i)
        first, rest = self.convert_postfix(arr[i]), self.convert_postfix_list(arr, i + 1)
        if isinstance(first, list):
            return sympy.Derivative(rest, first[0])
        if first.is_Integer and isinstance(rest, Ratio) and 0 < rest.args[0] < rest.args[1]:
            return Mixed(first, rest)
        if is_literal(first) and is_literal(rest) and first.doit().is_rational and rest.doit().is_rational:
            return Computed(Str(" ".join(part.getText() for part in arr[i:])))  # `348 217` reads as 565
        return self.mat_mul_flat(first, rest) if first.is_Matrix or rest.is_Matrix else self.mul_flat(first, rest)

    def convert_postfix(self, postfix: Any) -> Form:
        operators = postfix.postfix_op()
        value = super().convert_postfix(postfix)
        is_vector = isinstance(value, sympy.MatrixBase) and 1 in value.shape  # `(1, 2)^T` is how a column is written
        if any(op.eval_at() or (op.transpose() and not is_vector) for op in operators):
            return _computed(postfix)
        return value

    def convert_exp(self, exp: Any) -> Form:
        return _computed(exp) if exp.subexpr() else super().convert_exp(exp)

    def convert_comp(self, comp: Any) -> Form:
        if comp.det() or comp.norm_group() or comp.formatting_group() or comp.dot_product():
            return _computed(comp)
        return super().convert_comp(comp)

    def convert_binom(self, binom: Any) -> Form:
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def convert_atom(self, atom: Any) -> Form:
        number = atom.number_subexpr()
        return _computed(atom) if number and number.subexpr() else super().convert_atom(atom)

    def convert_func(self, func: Any) -> Form:
        single = func.func_normal_single_arg()
        if func.func_normal_multi_arg() or (single and single.start.text[1:] in _FUNCTIONS_THAT_COMPUTE):
            return _computed(func)
        return super().convert_func(func)

    def handle_exp(self, func: Any) -> Form:
        if not func.supexpr():
            return sympy.E
        sup = func.supexpr()
        power = self.convert_expr(sup.expr()) if sup.expr() else self.convert_atom(sup.atom())
        return sympy.Pow(sympy.E, power, evaluate=False)
