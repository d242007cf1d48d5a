"""The problems of a module, read from its source: each code with its texts, variables as placeholders.

The texts of a problem are rarely all at its code: `fix` may be a variable with one text per branch, the result of a
function of the module, or written in the function of the module that makes the problem. These are followed, but not
arguments of functions and loops over tables; nothing is imported or run.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Generator, Iterable, Iterator
from itertools import chain

CODE = re.compile(r"[a-z][a-z-]*\.[a-z0-9-]+")
LITERAL = re.compile(rf'code="{CODE.pattern}"')
WITHIN = re.compile(r"\{[^}]*\}")  # a placeholder
TEXTS = ("what", "why", "fix")
DEEPEST = 3  # functions that call each other for a text
MOST_CHARS = 400  # of alternatives that functions return; a longer text is shown by its placeholder
# These only format their argument, so a placeholder is named after the argument.
FORMATTING = {"printable", "first_line", "reason_of", "toml_text", "hide_text", "_show", "_shown", "_type_name"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Texts = dict[str, str]  # by the name of a variable or keyword
Walk = Generator[tuple[ast.stmt, Texts], None, Texts | None]


def problems_in(source: str) -> Iterator[tuple[str, Texts]]:
    """Yield every code of a module in source order, with the texts that its problem can have."""
    tree = ast.parse(source)
    reader = _Reader(tree)
    coded = {number for number, line in enumerate(source.splitlines(), start=1) if LITERAL.search(line)}
    for node, texts in reader.walk(tree.body, {}, coded):
        for call in _calls(node) if _holds(node, coded) else ():
            code = {each.arg: each.value for each in call.keywords}.get("code")
            if isinstance(code, ast.Constant) and isinstance(code.value, str) and CODE.fullmatch(code.value):
                yield code.value, reader.made(call, texts)


class _Reader:
    """Turns expressions of one module into text."""

    def __init__(self, tree: ast.Module) -> None:
        self._depth = 0
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
        self.constants: Texts = {}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self.constants |= self._assigned(node, self.constants)

    def walk(self, body: list[ast.stmt], texts: Texts, lines: set[int] | None = None) -> Walk:
        """Yield each statement with the texts of the variables before it; return the texts after the last one.

        None when the last one leaves the block. With `lines`, functions without any of these lines are left out.
        """
        for node in body:
            yield node, texts
            if isinstance(node, ast.Return | ast.Raise | ast.Continue | ast.Break):
                return None
            if isinstance(node, Function | ast.ClassDef):
                if lines is None or _holds(node, lines):
                    yield from self.walk(node.body, texts, lines)
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                texts = texts | self._assigned(node, texts)
            elif blocks := _blocks(node):
                ends = []
                for block in blocks:
                    ends.append((yield from self.walk(block, texts, lines)))
                # every branch of these is written down; of the others, none may be taken
                is_complete = isinstance(node, ast.With | ast.AsyncWith) or (isinstance(node, ast.If) and node.orelse)
                going_on = [end for end in (*ends, *([] if is_complete else [texts])) if end is not None]
                if not going_on:
                    return None
                names = dict.fromkeys(chain.from_iterable(going_on))
                texts = {name: _alternatives(end.get(name, "") for end in going_on) for name in names}
        return texts

    def made(self, call: ast.Call, texts: Texts) -> Texts:
        """Return the texts of the problem that a call with a code makes."""
        given = {each.arg: each.value for each in call.keywords if each.arg}
        # a function that makes a problem takes its texts by position in this order
        given |= {} if "what" in given else dict(zip(("what", "fix"), call.args, strict=False))
        found = {name: self.sentence(given[name], texts) for name in TEXTS if name in given}
        maker = self._called(call)
        for inner in ast.walk(maker) if maker else ():
            if isinstance(inner, ast.Call) and any(each.arg == "code" for each in inner.keywords):
                own = {each.arg: self.sentence(each.value, {}) for each in inner.keywords if each.arg in TEXTS}
                found = own | {name: text for name, text in found.items() if text}
        return found

    def sentence(self, node: ast.expr, texts: Texts) -> str:
        return " ".join(self._known(node, texts).split())

    def _known(self, node: ast.expr, texts: Texts) -> str:
        """Return an expression as text, empty if nothing of it is known before the program runs."""
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return _alternatives(self._known(value, texts) for value in node.values)
        text = self.text(node, texts)
        return text if _has_word(text) else ""

    def text(self, node: ast.expr, texts: Texts) -> str:
        """Return an expression as text with placeholders: `no column {name}`; alternatives as `one / two`."""
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.JoinedStr(values=parts):
                return "".join(self.text(part, texts) for part in parts)
            case ast.FormattedValue(value=value) | ast.Await(value=value):
                return self.text(value, texts)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left, texts) + self.text(right, texts)
            case ast.IfExp(body=body, orelse=orelse):
                return _alternatives(self.text(each, texts) for each in (body, orelse))
            case ast.BoolOp(op=ast.Or(), values=values):
                return _alternatives(self.text(value, texts) for value in values)
            case ast.Attribute(attr="__name__", value=ast.Call(func=ast.Name(id="type"))):
                return "{type}"
            case ast.Name(id=name):
                return texts.get(name) or self.constants.get(name) or f"{{{name}}}"
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name in FORMATTING:
                return self.text(first, texts)
            case ast.Call(func=ast.Attribute(value=value, attr="replace")) if self._known(value, texts):
                return self.text(value, texts)
            case ast.Call() if (returned := self._returned(node)) and len(returned) <= MOST_CHARS:
                return returned
        # A placeholder that is named after the first variable of the expression.
        nodes = list(ast.walk(node))
        named = [each for each in nodes if isinstance(each, ast.Attribute | ast.Name)]
        names = [each.attr if isinstance(each, ast.Attribute) else each.id for each in named]
        called = {
            each.func.attr for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
        }
        skipped = FORMATTING | called
        return f"{{{next((name for name in names if name not in skipped and not hasattr(builtins, name)), '...')}}}"

    def _returned(self, call: ast.Call) -> str:
        """Return the texts that a function of the module can return; empty if they have no word."""
        function = self._called(call)
        if function is None or self._depth == DEEPEST:
            return ""
        self._depth += 1
        walked = list(self.walk(function.body, {}))
        found = [self.text(node.value, known) for node, known in walked if isinstance(node, ast.Return) and node.value]
        self._depth -= 1
        return _alternatives(text for text in found if " " in text and _has_word(text))

    def _called(self, call: ast.Call) -> Function | None:
        match call.func:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.functions.get(name)
        return None

    def _assigned(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, texts: Texts) -> Texts:
        """Return the texts that a statement gives to variables."""
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is None:
            return {}
        # a variable whose text has no word is shown by its name, since that says more
        named = {each.id: self._known(value, texts) for each, value in _pairs(target, node.value)}
        if isinstance(node, ast.AugAssign):
            return {name: texts.get(name, "") + text for name, text in named.items()}
        return named


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield each variable of an assignment with its value: `what, fix = "...", "..."` too."""
    if isinstance(target, ast.Name):
        yield target, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each in zip(target.elts, value.elts, strict=True):
            yield from _pairs(*each)


def _holds(node: ast.stmt, lines: set[int]) -> bool:
    return not lines.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks of statements within a statement."""
    own = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    inner = [each.body for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    return [block for block in (*own, *inner) if block]


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement, without those of the statements within it."""
    inner = (ast.stmt, ast.excepthandler, ast.match_case)
    waiting = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, inner)]
    for each in waiting:
        yield from (node for node in ast.walk(each) if isinstance(node, ast.Call))


def _alternatives(texts: Iterable[str]) -> str:
    each = chain.from_iterable(text.split(" / ") for text in texts)
    return " / ".join(dict.fromkeys(filter(None, each)))


def _has_word(text: str) -> bool:
    return bool(re.search(r"\w", WITHIN.sub("", text)))
