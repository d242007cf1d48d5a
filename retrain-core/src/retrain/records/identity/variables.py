"""Environment variables that a project's code reads: names from its syntax, values as short hashes.

A reward that reads a variable changes with it. Where the code reads names that are not literals, or the environment as
a whole, every variable counts except those of terminals and sessions.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b

from retrain.text.secrets import is_secret_variable

ALL = "*"  # an entry that says that all variables are listed: one that is absent was not set
UNSET, SECRET = "not set", "set"
HASH_BYTES = 4  # enough to see a change, too few to find a value by its hash
READERS = frozenset({"environ", "environb", "getenv", "getenvb"})
METHODS = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})
OTHER_READERS = frozenset({"expandvars", "/proc/self/environ"})
MARK = re.compile(rb"environ|getenv|expandvars")
# Differ between terminals, sessions and runs of one campaign, whatever the code.
OF_THE_SESSION = re.compile(
    r"_|(?:OLD)?PWD|SHLVL|TERM.*|COLUMNS|LINES|COLORTERM|LS_COLORS|PS\d|TMUX.*|STY|WINDOWID|DISPLAY|WAYLAND_.*|XDG_.*"
    r"|SSH_.*|DBUS_.*|GPG_.*|VSCODE_.*|SLURM_.*|RAY_.*|PYTEST_.*|RETRAIN_.*|WANDB_.*|CUDA_VISIBLE_DEVICES|INVOCATION_ID"
    r"|JOURNAL_STREAM|HISTFILE|HOSTNAME|LOGNAME|USER|HOME|TMPDIR|MAIL|LESS.*|PAGER|EDITOR|VISUAL|.*_PID|.*_THREADS"
)


def variables_read(sources: Iterable[bytes], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a hash of each variable that the sources read, by name; for a secret, only if it is set."""
    names: set[str] = set()
    for source in sources:
        if MARK.search(source):
            names.update(_names(source))
    if ALL in names:
        names |= {name for name in environ if not OF_THE_SESSION.fullmatch(name)}
    return {name: ALL if name == ALL else _shown(name, environ.get(name)) for name in sorted(names)}


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return UNSET
    if is_secret_variable(name):
        return SECRET
    return blake2b(f"{name}={value}".encode("utf-8", "surrogateescape"), digest_size=HASH_BYTES).hexdigest()


def _names(source: bytes) -> Iterator[str]:
    """Yield the names that one module reads; `ALL` if they are unknown."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield ALL
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if any(each.name in READERS | OTHER_READERS and each.asname for each in node.names):
                yield ALL
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value in READERS | OTHER_READERS:
                yield ALL
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OTHER_READERS:
                yield ALL
            elif name in READERS and (read := _read(node, parents, constants)) is not None:
                yield read


def _read(node: ast.expr, parents: Mapping[ast.AST, ast.AST], constants: Mapping[str, object]) -> str | None:
    """Return the variable that an expression around `os.environ` or `os.getenv` reads; None where it only writes."""
    parent = parents.get(node)
    key: ast.expr | None = None
    if isinstance(parent, ast.Subscript) and parent.value is node:
        if not isinstance(parent.ctx, ast.Load):
            return None
        key = parent.slice
    elif isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.In | ast.NotIn):
        key = parent.left
    elif isinstance(parent, ast.Call) and parent.func is node and parent.args:
        key = parent.args[0]
    elif isinstance(parent, ast.Attribute) and parent.attr in METHODS:
        call = parents.get(parent)
        key = call.args[0] if isinstance(call, ast.Call) and call.func is parent and call.args else None
    value = key.value if isinstance(key, ast.Constant) else constants.get(key.id) if isinstance(key, ast.Name) else None
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) else ALL
