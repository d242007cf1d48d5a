"""The codes of all problems, with fault and fix, read from the sources of installed packages.

A code is a literal next to its sentences: `Problem(code="data.column-missing", what=f"no column {name!r}")`.
Nothing is imported and nothing is listed twice.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from retrain.cli.manual import markdown
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.discover import offered_plugins
from retrain.kernel.registry import Plugins

CODE = re.compile(r"[a-z][a-z-]*\.[a-z0-9-]+")
WITHIN = re.compile(r"\{[^}]*\}")  # a placeholder
TEXTS = ("what", "why", "fix")
# These only format their argument, so a placeholder is named after the argument.
FORMATTING = {"printable", "first_line", "reason_of", "toml_text", "hide_text", "_show", "_shown", "_type_name"}
Explained = dict[str, dict[str, list[str]]]  # code -> name of a text -> the different texts, in order


def problems(plugins: Plugins) -> str:
    """Return a table of every code with its fault and fix."""
    rows = [
        (markdown.code(code), "; or ".join(texts["what"]), "; or ".join(texts["fix"]))
        for code, texts in sorted(known_problems().items())
    ]
    return markdown.table(("code", "what is wrong", "fix"), rows)


def explanation(code: str) -> str:
    """Return the text that `retrain help CODE` prints. ConfigError when no installed package has the code."""
    known = known_problems()
    if code not in known:
        near = get_close_matches(code, known, n=3, cutoff=0.5)
        fix = f"one of: {', '.join(near)}" if near else "`retrain man problems` lists all codes"
        raise ConfigError(Problem(code="help.unknown-code", what=f"no problem has the code {code!r}", fix=fix))
    lines = [f"{name:5}{text}" for name in TEXTS for text in known[code][name]]
    return "\n".join([f"[{code}]", *lines])


@cache
def known_problems() -> Explained:
    """Return the texts of every code in the packages of all installed distributions that offer plugins."""
    found: Explained = {}
    for source in _sources():
        for code, texts in _of_scope(ast.parse(source), {}):
            kept = found.setdefault(code, {name: [] for name in TEXTS})
            for name, text in texts.items():
                kept[name] += [text] if text and text not in kept[name] else []
    return found


def _sources() -> Iterator[str]:
    packages = {"retrain"} | {offer.entry.module.partition(".")[0] for offer in offered_plugins()}
    for spec in filter(None, map(find_spec, sorted(packages))):
        for folder in map(Path, spec.submodule_search_locations or ()):
            texts = (file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py")))
            # Parsing only the files that hold a code takes a third of the time.
            yield from (text for text in texts if "code=" in text)


def _of_scope(scope: ast.AST, outer: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the problems of a module or function in source order, with the texts of the variables that they name."""
    texts = dict(outer)
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_scope(node, texts)
            continue
        if isinstance(node, ast.Assign):
            targets, values = (getattr(each, "elts", [each]) for each in (node.targets[0], node.value))
            if len(targets) == len(values):  # `what, fix = "...", "..."` too
                pairs = zip(targets, values, strict=True)
                named = {target.id: _text(value, texts) for target, value in pairs if isinstance(target, ast.Name)}
                # a variable whose text has no word is shown by its name, since that says more
                texts |= {name: text if re.search(r"\w", WITHIN.sub("", text)) else "" for name, text in named.items()}
        if isinstance(node, ast.Call):
            given = {each.arg: each.value for each in node.keywords if each.arg}
            match given.get("code"):
                case ast.Constant(value=str(code)) if CODE.fullmatch(code):
                    # a function that makes a problem takes its sentences by position, in this order
                    strings = [each for each in node.args if isinstance(each, ast.JoinedStr | ast.Constant)]
                    given = dict(zip(("what", "fix"), strings, strict=False)) | given
                    yield code, {name: _sentence(given[name], texts) for name in TEXTS if name in given}
        waiting[:0] = ast.iter_child_nodes(node)


def _sentence(node: ast.expr, texts: dict[str, str]) -> str:
    """Return an expression as text, empty if nothing of it is known before the program runs."""
    text = _text(node, texts)
    return "" if re.fullmatch(r"(\{[^}]*\}\W*)*", text) else " ".join(text.split())


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """Return an expression as text with placeholders: `no column {name}`."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, texts) for part in parts)
        case ast.FormattedValue(value=value) | ast.Await(value=value):
            return _text(value, texts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, texts) + _text(right, texts)
        case ast.IfExp(body=body, orelse=orelse):
            return " / ".join(filter(None, (_text(body, texts), _text(orelse, texts))))
        case ast.BoolOp(op=ast.Or(), values=values):
            return " / ".join(filter(None, (_sentence(value, texts) for value in values)))
        case ast.Attribute(attr="__name__", value=ast.Call(func=ast.Name(id="type"))):
            return "{type}"
        case ast.Name(id=name):
            return texts.get(name) or f"{{{name}}}"
    # a placeholder, named after the first variable of the expression
    names = [
        each.attr if isinstance(each, ast.Attribute) else each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute | ast.Name)
    ]
    skipped = FORMATTING | {
        each.func.attr for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)
    }
    return f"{{{next((name for name in names if name not in skipped and not hasattr(builtins, name)), '...')}}}"
