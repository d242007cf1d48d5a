"""The program in a completion: which of its fenced blocks it is."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

from retrain_rewards.verifiers.code.usual import FAULTS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    language: str
    text: str


def last_program(text: str) -> str:
    """The last fenced block that is a program; empty when there is none.

    A block of Python is one unless it only shows values, as the output or the use of a program does. A block that names
    no language is one if it does anything. Where no block is a program by that, it is the last one of either kind.
    """
    blocks = [block for block in _blocks(text) if block.language in ("", *PYTHON)]
    for block in reversed(blocks):
        if _is_program(block):
            return block.text
    return blocks[-1].text if blocks else ""


def _blocks(text: str) -> list[_Block]:
    """The fenced blocks. The last one need not end: a completion may stop after its program."""
    found = list[_Block]()
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


def _block(language: str, lines: list[str], indent: int) -> _Block:
    """A block without the indentation of its fence, and without the prompts and outputs of a session."""
    lines = [line[min(indent, len(line) - len(line.lstrip())) :] for line in lines]
    first = next((line.lstrip() for line in lines if line.strip()), "")
    if first.startswith(PROMPTS[0]):
        dedented = textwrap.dedent("\n".join(lines)).split("\n")
        typed = [line[3:].removeprefix(" ") for line in dedented if line.startswith(PROMPTS)]
        return _Block(language="pycon", text="\n".join(typed))
    return _Block(language=language, text="\n".join(lines))


def _is_program(block: _Block) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's own escape sequences
            body = ast.parse(block.text).body
    except FAULTS:
        return bool(block.language)
    calls = [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    if block.language in ("python", "py"):
        return bool(calls) or any(not isinstance(node, ast.Expr) for node in body)
    prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
    return prints or any(isinstance(node, WORKING) for node in body)
