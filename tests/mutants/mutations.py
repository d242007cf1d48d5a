"""The mutants of a module: one change each to a comparison, an operator, a number, a condition or a statement."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
CALLED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "sum": "max", "ceil": "floor",
    "floor": "ceil", "mean": "sum", "exp": "log", "log": "exp", "quantile": "median", "minimum": "maximum",
    "maximum": "minimum", "argmax": "argmin", "where": "maximum",
}  # fmt: skip
# What only words an error or describes: a change there is no fault of the numbers.
WORDING = {"Problem", "ValueError", "TypeError", "key", "field", "Field", "MetricSpec", "PluginSpec", "getLogger"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change to one module, and the module's source with it. At import: outside of functions, or a default."""

    line: int
    is_at_import: bool
    before: str
    after: str
    source: str


def sites(source: str) -> list[tuple[int, int]]:
    """Return node and change of every mutant of a module: the arguments of `mutant`."""
    tree = ast.parse(source)
    left_out = _left_out(tree)
    nodes = ((place, node) for place, node in enumerate(ast.walk(tree)) if id(node) not in left_out)
    return [(place, number) for place, node in nodes for number, _ in enumerate(_changes(node))]


def mutant(source: str, place: int, number: int) -> Mutant:
    """Return one mutant of a module."""
    tree = ast.parse(source)
    node = next(each for position, each in enumerate(ast.walk(tree)) if position == place)
    line, before = getattr(node, "lineno", 0), ast.unparse(node).splitlines()[0]
    functions = (each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef))
    is_at_import = not any(each.body[0].lineno <= line <= (each.end_lineno or 0) for each in functions)
    list(_changes(node))[number](node)
    after, changed = ast.unparse(node).splitlines()[0], ast.unparse(tree)
    return Mutant(line=line, is_at_import=is_at_import, before=before, after=after, source=changed)


def _left_out(tree: ast.Module) -> set[int]:
    """Return the nodes that are annotations, docstrings, words of errors, checks of zip, or the module's own level."""
    left_out: set[int] = set()
    for node in ast.walk(tree):
        skipped: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            skipped = [node] if name in WORDING or name.endswith(("Error", "Exception")) else []
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # zip checks lengths that are equal
            skipped = [node.value]
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            skipped = [node]
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            skipped = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            returns = getattr(node, "returns", None)
            skipped = [*node.decorator_list, *([returns] if returns else [])]
            skipped += [node.body[0]] if ast.get_docstring(node) is not None else []
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped = [node]
        left_out |= {id(inner) for each in skipped for inner in ast.walk(each)}
    inside = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    constants = {id(inner) for node in tree.body if isinstance(node, ast.Assign) for inner in ast.walk(node.value)}
    return left_out | ({id(node) for node in ast.walk(tree)} - inside - constants)


Change = Callable[[ast.AST], None]


def _changes(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield lambda twin: twin.ops.__setitem__(0, COMPARED[type(twin.ops[0])]())
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED and not _is_text(node):
        yield lambda twin: setattr(twin, "op", COMPUTED[type(twin.op)]())
    elif isinstance(node, ast.BoolOp):
        yield lambda twin: setattr(twin, "op", ast.Or() if isinstance(twin.op, ast.And) else ast.And())
        yield lambda twin: twin.values.pop()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda twin: setattr(twin, "operand", ast.UnaryOp(op=ast.Not(), operand=twin.operand))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield lambda twin: setattr(twin, "op", ast.UAdd())
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda twin: setattr(twin, "value", not twin.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield lambda twin: setattr(twin, "value", twin.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield lambda twin: setattr(twin, "test", ast.UnaryOp(op=ast.Not(), operand=twin.test))
    elif isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in CALLED:
        yield _call_another
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield lambda twin: setattr(twin, "value", ast.Constant(value=None))
    elif isinstance(node, ast.Break):
        yield lambda twin: setattr(twin, "__class__", ast.Continue)
    elif isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield lambda twin: setattr(twin, "op", COMPUTED[type(twin.op)]())
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield lambda twin: setattr(twin, "value", ast.Constant(value=None))


def _call_another(twin: ast.AST) -> None:
    assert isinstance(twin, ast.Call)
    name = "id" if isinstance(twin.func, ast.Name) else "attr"
    setattr(twin.func, name, CALLED[getattr(twin.func, name)])


def _is_text(node: ast.BinOp) -> bool:
    """True where a string is added or formatted."""
    sides = (node.left, node.right)
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)
