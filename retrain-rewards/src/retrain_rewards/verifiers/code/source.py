"""Source code: the program in a completion, the names that it uses unimported, and tests made ready to run.

Graders of programs put the usual imports in front of an answer. Code of tests gets three changes. Handlers and
`suppress` also take the harmless form of exceptions that would steer the tests. Changes of arguments show once the
statement of the call has ended. Test functions and test cases that nothing calls are called.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import marshal
import re
import symtable
import textwrap
import warnings
from collections.abc import Iterable
from functools import lru_cache

FENCE = "```"
OPENING = re.compile(r"(`{3,}|~{3,})\s*(.*)")
# ```python, py3, Python3.11, {.python .numberLines}, {code-block} python, python title="x"
LANGUAGE = re.compile(r"(?:\{(?:code-block|code-cell|code)\}\s*)?\{?\s*\.?([a-z_+#-]*[a-z_+#]|)[\d.]*(?=$|[^\w+#-])")
PYTHON = ("python", "py", "ipython", "pycon", "python-repl", "pyrepl")
PROMPTS = (">>>", "...")
WORKING = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom),
    *(ast.For, ast.While, ast.If, ast.With, ast.Try),
)
Block = tuple[str, str]  # language and text


def last_program(text: str) -> str:
    """Return the last fenced block that is a program; empty without one.

    A block of Python is one unless it only shows values, as the output or the use of a program does. A block that names
    no language is one if it does anything. If no block is a program by that, it is the last one of either kind.
    """
    blocks = [block for block in _blocks(text) if block[0] in ("", *PYTHON)]
    for block in reversed(blocks):
        if _is_program(block):
            return block[1]
    return blocks[-1][1] if blocks else ""


def _blocks(text: str) -> list[Block]:
    found = list[Block]()
    lines = list[str]()
    fence, language, indent = "", "", 0
    for line in text.splitlines():
        bare = line.strip()
        if not fence:
            opening = OPENING.fullmatch(bare)
            if opening and not (opening[1][0] == "`" and "`" in opening[2]):  # that is code within a line
                info = opening[2].casefold()
                named = LANGUAGE.match(info)
                fence, language, lines = opening[1], named[1] if named else info, []
                indent = len(line) - len(line.lstrip())
        elif bare and set(bare) == {fence[0]} and len(bare) >= len(fence):
            found.append(_block(language, lines, indent))
            fence = ""
        else:
            lines.append(line)
    return [*found, _block(language, lines, indent)] if fence else found


def _block(language: str, lines: list[str], indent: int) -> Block:
    lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines]
    first = next((line.lstrip() for line in lines if line.strip()), "")
    if first.startswith(PROMPTS[0]):
        dedented = textwrap.dedent("\n".join(lines)).split("\n")
        typed = [line[3:].removeprefix(" ") for line in dedented if line.startswith(PROMPTS)]
        return "pycon", "\n".join(typed)
    return language, "\n".join(lines)


def _is_program(block: Block) -> bool:
    language, text = block
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's own escape sequences
            body = ast.parse(text).body
    except FAULTS:
        return bool(language)
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    if language in ("python", "py"):
        return bool(calls) or any(not isinstance(node, ast.Expr) for node in body)
    prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
    return prints or any(isinstance(node, WORKING) for node in body)


# If two modules have a name, the later one gives it.
STARS = (
    *("string", "re", "datetime", "fractions", "decimal", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "json", "abc", "enum", "dataclasses", "typing"),
)
OTHERS = (
    *("sys", "os", "time", "asyncio", "contextlib", "threading", "queue", "cmath", "calendar", "textwrap", "array"),
    *("struct", "types"),
)
MODULES = (*STARS, *OTHERS)
FROM_LATE = {"stdin": "sys", "stdout": "sys", "setrecursionlimit": "sys", "maxsize": "sys", "perf_counter": "time"}


def prelude(names: Iterable[str], *, has_numpy: bool = False) -> str:
    usual = _usual() | ({"np": "import numpy as np", "numpy": "import numpy"} if has_numpy else {})
    return "\n".join(usual[name] for name in sorted(names) if name in usual)


def unbound(source: str) -> set[str]:
    """Return the global names that code reads and never defines, builtins aside; one of `FAULTS` if it is no code."""
    with warnings.catch_warnings(action="ignore"):  # of the model's own escape sequences
        top = symtable.symtable(source, "code.py", "exec")
    read, made = set[str](), set[str]()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table is top:
                (made if symbol.is_assigned() or symbol.is_imported() else read).add(symbol.get_name())
                if symbol.is_namespace():
                    made.add(symbol.get_name())
    return read - made - BUILTIN


def modules_read(source: str) -> set[str]:
    tree = ast.parse(source)
    of_attribute = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bare = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in of_attribute}
    return (unbound(source) & {*MODULES}) - bare


FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError)
BUILTIN = frozenset((*dir(builtins), "exit", "quit", "__file__", "__name__"))


@lru_cache(maxsize=1)
def _usual() -> dict[str, str]:
    found: dict[str, str] = {}
    for module in STARS:
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", None) or [name for name in dir(loaded) if not name.startswith("_")]
        found |= {name: f"from {module} import {name}" for name in names}
    found |= {name: f"from {module} import {name}" for name, module in FROM_LATE.items()}
    return found | {module: f"import {module}" for module in MODULES}


EXPECTING = ("raises", "assertRaises", "assertRaisesRegex", "suppress")
ENDING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@lru_cache(maxsize=1024)
def ready(source: str) -> bytes:
    tree = ast.parse(source)
    tree.body += ast.parse(_calls(tree)).body
    imports = "\n".join(f"import {name}" for name in sorted(modules_read(source)))
    tree = _Prepared().visit(tree)
    is_future = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body]
    start = len(is_future) - is_future[::-1].index(True) if True in is_future else 0
    tree.body[start:start] = ast.parse(imports).body
    return marshal.dumps(compile(ast.fix_missing_locations(tree), "tests.py", "exec", dont_inherit=True))


def _calls(tree: ast.Module) -> str:
    outside = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    read = {node.id for each in outside for node in ast.walk(each) if isinstance(node, ast.Name)}
    attributes = {node.attr for each in outside for node in ast.walk(each) if isinstance(node, ast.Attribute)}
    lines = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.name not in read:
            required = len(node.args.args) - len(node.args.defaults)
            lines += [f"{node.name}()"] if node.decorator_list or not required else []
        if isinstance(node, ast.ClassDef) and not {"main", "TextTestRunner", "run"} & attributes:
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            if "TestCase" in bases:
                lines.append("__import__('unittest').main(argv=['tests'])")
            elif node.name.startswith("Test"):
                lines += [f"{node.name}().{name}()" for name in methods if name.startswith("test")]
    return "\n".join(dict.fromkeys(lines))


class _Prepared(ast.NodeTransformer):
    """Rewrites code. A block that advances an iterator itself ends with its StopIteration, not one of the program."""

    _advances = False

    def visit_Try(self, node: ast.Try | ast.With) -> ast.AST:
        calls = [_name(each.func) for part in node.body for each in ast.walk(part) if isinstance(each, ast.Call)]
        before, self._advances = self._advances, not {"next", "__next__", "send"}.isdisjoint(calls)
        made = self.generic_visit(node)
        self._advances = before
        return made

    visit_With = visit_Try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        if node.type and not self._advances:
            node.type = _call("__expected__", node.type)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _name(node.func)
        if name in EXPECTING and node.args and not self._advances:
            number = len(node.args) if name == "suppress" else 1
            kinds = _call("__expected__", ast.Tuple(node.args[:number], ast.Load()))
            node.args[:number] = [ast.Starred(kinds, ast.Load()) if name == "suppress" else kinds]
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                setattr(node, field, [each for statement in statements for each in _settled(statement)])
        return node


def _settled(statement: ast.stmt) -> list[ast.stmt]:
    calls = any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(statement))
    if not calls or isinstance(statement, ENDING):
        return [statement]
    settle: ast.stmt = ast.Expr(_call("__settle__"))
    if isinstance(statement, ast.For | ast.While | ast.If | ast.With):
        statement.body.insert(0, settle)
    return [statement, settle]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
