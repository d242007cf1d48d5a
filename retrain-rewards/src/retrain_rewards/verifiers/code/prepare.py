"""Code of tests, made ready for the process in which it runs.

Three changes. Handlers and `suppress` also take the harmless form of exceptions that would steer the tests. Changes of
arguments show once the statement of the call has ended. Test functions and test cases that nothing calls are called.
"""

from __future__ import annotations

import ast
import marshal
from functools import lru_cache

from retrain_rewards.verifiers.code.usual import modules_read

EXPECTING = ("raises", "assertRaises", "assertRaisesRegex", "suppress")
ENDING = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@lru_cache(maxsize=1024)
def ready(source: str) -> bytes:
    """The compiled code as `marshal` writes it; the completions of a group share it."""
    tree = ast.parse(source)
    tree.body += ast.parse(_calls(tree)).body
    imports = "\n".join(f"import {name}" for name in sorted(modules_read(source)))
    tree = _Prepared().visit(tree)
    is_future = [isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body]
    start = len(is_future) - is_future[::-1].index(True) if True in is_future else 0
    tree.body[start:start] = ast.parse(imports).body
    return marshal.dumps(compile(ast.fix_missing_locations(tree), "tests.py", "exec", dont_inherit=True))


def _calls(tree: ast.Module) -> str:
    """Calls of the test functions and test cases of a module that its own statements do not run."""
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
    """A block that advances an iterator itself ends with its StopIteration, not with one of the program."""

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
    """A statement, and the settling of changes after it where it may have called the program."""
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
