"""The problems of a module, read from its source: each code with its texts, variables as placeholders.

The texts of a problem are rarely all at its code: `fix` may be a variable with one text per branch, the result of a
function of the module, or written in the function of the module that makes the problem. All these are followed;
nothing is imported or run.
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
                yield from ((code.value, made) for made in reader.made(call, texts))


class _Reader:
    """Turns expressions of one module into text."""

    def __init__(self, tree: ast.Module) -> None:
        self._depth = 0
        self.functions: dict[str, list[Function]] = {}
        for node in _all_statements(tree.body):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
        self.constants: Texts = {}
        self.containers: dict[str, ast.expr] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                self.constants |= self._assigned(node, self.constants)
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name) and isinstance(node.value, ast.Tuple | ast.List | ast.Dict):
                    self.containers[target.id] = node.value

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
                inner = texts | self._looped(node, texts) if isinstance(node, ast.For) else texts
                ends = []
                for block in blocks:
                    ends.append((yield from self.walk(block, inner, lines)))
                # every branch of these is written down; of the others, none may be taken
                is_complete = isinstance(node, ast.With | ast.AsyncWith) or (isinstance(node, ast.If) and node.orelse)
                going_on = [end for end in (*ends, *([] if is_complete else [texts])) if end is not None]
                if not going_on:
                    return None
                texts = _either(going_on)
        return texts

    def made(self, call: ast.Call, texts: Texts) -> Iterator[Texts]:
        """Yield the texts of the problems that a call with a code makes."""
        given = {each.arg: self.sentence(each.value, texts) for each in call.keywords if each.arg}
        makers = [each for each in self._called(call) if "code" in _parameters(each)]
        if not makers or self._depth == DEEPEST:
            # a function of another module that makes a problem takes its texts by position in this order
            first = {} if "what" in given else dict(zip(("what", "fix"), call.args, strict=False))
            given |= {name: self.sentence(value, texts) for name, value in first.items()}
            yield {name: text for name, text in given.items() if name in TEXTS}
            return
        self._depth += 1
        for maker in makers:
            bound = self._bound(maker, call, texts)
            for node, known in self.walk(maker.body, bound):
                for inner in _calls(node):
                    if any(each.arg == "code" and isinstance(each.value, ast.Name) for each in inner.keywords):
                        yield from self.made(inner, known)
        self._depth -= 1

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
            case ast.Call() if (returned := self._returned(node, texts)) and len(returned) <= MOST_CHARS:
                return returned
        return _placeholder(node)

    def _returned(self, call: ast.Call, texts: Texts) -> str:
        """Return the texts that a function of the module can return; empty if they have no word."""
        if self._depth == DEEPEST:
            return ""
        self._depth += 1
        found = []
        for function in self._called(call):
            for node, known in self.walk(function.body, self._bound(function, call, texts)):
                if isinstance(node, ast.Return) and node.value:
                    found.append(self.text(node.value, known))
        self._depth -= 1
        return _alternatives(text for text in found if " " in text and _has_word(text))

    def _called(self, call: ast.Call) -> list[Function]:
        match call.func:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.functions.get(name, [])
        return []

    def _bound(self, function: Function, call: ast.Call, texts: Texts) -> Texts:
        """Return the texts of a function's parameters in a call; a parameter without a text is a placeholder."""
        names, arguments = _parameters(function), function.args
        defaults = zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults), strict=False)
        keyword_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        given: dict[str, ast.expr | None] = {each.arg: value for each, value in chain(defaults, keyword_only)}
        own = {name: self._known(value, {}) for name, value in given.items() if value}
        passed = [*zip(names, call.args, strict=False), *((each.arg, each.value) for each in call.keywords if each.arg)]
        return own | {name: self._known(value, texts) for name, value in passed}

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

    def _looped(self, loop: ast.For, texts: Texts) -> Texts:
        """Return the texts that the variables of a loop over a tuple, list or dictionary of the module can have."""
        match loop.iter:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="items")) | ast.Name(id=name):
                container: ast.expr | None = self.containers.get(name)
            case other:
                container = other
        match container:
            case ast.Dict(keys=keys, values=values):
                rows: list[ast.expr] = [ast.Tuple([key, value]) for key, value in zip(keys, values, strict=True) if key]
            case ast.Tuple(elts=rows) | ast.List(elts=rows):
                pass
            case _:
                return {}
        found: dict[str, list[str]] = {}
        for row in rows:
            for target, value in _pairs(loop.target, row):
                found.setdefault(target.id, []).append(self.text(value, texts))
        return {name: _alternatives(each) for name, each in found.items() if any(map(_has_word, each))}


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield each variable of an assignment with its value: `what, fix = "...", "..."` too."""
    if isinstance(target, ast.Name):
        yield target, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for each in zip(target.elts, value.elts, strict=True):
            yield from _pairs(*each)


def _holds(node: ast.stmt, lines: set[int]) -> bool:
    return not lines.isdisjoint(range(node.lineno, (node.end_lineno or 0) + 1))


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if names[:1] == ["self"] else names
    return [*names, *(each.arg for each in arguments.kwonlyargs)]


def _blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """Return the blocks of statements within a statement."""
    own = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
    inner = [each.body for each in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    return [block for block in (*own, *inner) if block]


def _all_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        for block in _blocks(node):
            yield from _all_statements(block)


def _calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement, without those of the statements within it."""
    inner = (ast.stmt, ast.excepthandler, ast.match_case)
    waiting = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, inner)]
    for each in waiting:
        yield from (node for node in ast.walk(each) if isinstance(node, ast.Call))


def _either(ends: list[Texts]) -> Texts:
    """Return the texts of variables after branches."""
    names = dict.fromkeys(chain.from_iterable(ends))
    return {name: _alternatives(end.get(name, "") for end in ends) for name in names}


def _alternatives(texts: Iterable[str]) -> str:
    each = chain.from_iterable(text.split(" / ") for text in texts)
    return " / ".join(dict.fromkeys(filter(None, each)))


def _has_word(text: str) -> bool:
    return bool(re.search(r"\w", WITHIN.sub("", text)))


def _placeholder(node: ast.expr) -> str:
    """Return a placeholder that is named after the first variable of an expression."""
    nodes = list(ast.walk(node))
    named = [each for each in nodes if isinstance(each, ast.Attribute | ast.Name)]
    names = [each.attr if isinstance(each, ast.Attribute) else each.id for each in named]
    called = {each.func.attr for each in nodes if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)}
    skipped = FORMATTING | called
    return f"{{{next((name for name in names if name not in skipped and not hasattr(builtins, name)), '...')}}}"
