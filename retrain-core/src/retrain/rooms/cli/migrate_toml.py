"""Rewrites configurations of earlier versions: the seven `prime_rl_*` keys of [backend] became [backend.options]."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AbstractTable, Comment, InlineTable, Null, Whitespace

from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.cli.legacy import LEGACY_KEYS, legacy_names, merged_options

BOM = "\ufeff"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # as TOML counts lines: nothing but LF ends one


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A configuration before and after.

    `legacy_keys` stand in [backend] of `before`, in its order; `options` is [backend.options] of `after`, with every
    key that it has then. A file without legacy keys comes out as it went in.
    """

    label: str
    before: str
    after: str
    legacy_keys: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def is_needed(self) -> bool:
        """Whether the file has legacy keys."""
        return bool(self.legacy_keys)

    def diff(self) -> str:
        """Unified diff, from `label` to `label.migrated`; empty when nothing changes."""
        before, after = (_LINE.findall(text.removeprefix(BOM)) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.label, f"{self.label}.migrated")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def migrate(text: str, label: str) -> Migration:
    """The migration of a configuration; comments, layout, line ends and byte order mark stay.

    A key that [backend.options] has already wins over its legacy form. The result is read back and compared with what
    it should say before anybody sees it. ConfigError when the text is not TOML, or cannot be rewritten.
    """
    mark = BOM if text.startswith(BOM) else ""
    plain = text.removeprefix(BOM)
    document = _parse(plain, label)
    backend = document.get("backend")
    backend = backend if isinstance(backend, dict) else {}
    names = legacy_names(backend)
    if not isinstance(backend.get("options", {}), dict):
        raise ConfigError(
            Problem(where=f"{label} [backend] options", what="must be a table", fix="write [backend.options]")
        )
    options = merged_options(backend)
    after = text
    if names:
        kept = {name: value for name, value in backend.items() if name not in LEGACY_KEYS}
        wanted = {**document, "backend": {**kept, "options": options}}
        after = mark + _with_line_ends_of(plain, _rewritten(plain.replace("\r\n", "\n"), wanted, label))
    return Migration(label=label, before=text, after=after, legacy_keys=names, options=options)


def _parse(text: str, label: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(Problem(where=label, what=f"not valid TOML: {error}", fix="correct that line")) from None


def _rewritten(text: str, wanted: Mapping[str, Any], label: str) -> str:
    """The text with the keys moved; refused unless it then says exactly what is wanted."""
    try:
        document = tomlkit.parse(text)
        _move_legacy_keys(document)
        after = tomlkit.dumps(document)
        if tomllib.loads(after) == wanted:
            return after
    except (TOMLKitError, tomllib.TOMLDecodeError, LookupError, TypeError, ValueError, AttributeError):
        pass  # a layout that the editor cannot handle: better no file than another one
    what = "[backend] is written in a form that cannot be rewritten without changing its layout"
    fix = "gather its keys under one [backend], and try again"
    raise ConfigError(Problem(where=label, what=what, fix=fix))


def _move_legacy_keys(document: tomlkit.TOMLDocument) -> None:
    # one item per place where the document writes keys of [backend]: a header, a dotted key, an inline table
    parts = [item for key, item in document.body if key is not None and key.key == "backend"]
    tables = [item for item in parts if isinstance(item, AbstractTable)]
    options = next((table["options"] for table in tables if "options" in table), None)
    moved: list[tuple[list[Comment], str, Any]] = []
    for table in tables:
        for name in legacy_names(list(table)):
            if options is None or LEGACY_KEYS[name] not in options:
                moved.append((_comments_above(table.value, name), LEGACY_KEYS[name], table.item(name)))
            table.remove(name)
    if not moved:
        return
    target: Any = options if options is not None else _new_options(tables[-1])
    for comments, name, item in moved:
        for comment in comments:
            target.add(comment)
        target.add(name, item)
    if options is None:
        _add_options(document, tables[-1], target)


def _new_options(table: AbstractTable) -> AbstractTable:
    return tomlkit.inline_table() if isinstance(table, InlineTable) else tomlkit.table()


def _add_options(document: tomlkit.TOMLDocument, table: AbstractTable, options: AbstractTable) -> None:
    """Append [backend.options], parted from the table after it as [backend] was."""
    body = table.value.body
    if body and isinstance(body[-1][1], Whitespace) and document.body[-1][1] is not table:
        options.add(tomlkit.nl())
    table.append("options", options)


def _comments_above(container: Container, name: str) -> list[Comment]:
    """The comment lines directly above a key, taken out of the container: they speak of it."""
    index = next(i for i, (key, _) in enumerate(container.body) if key is not None and key.key == name)
    found: list[Comment] = []
    while index > 0 and isinstance(comment := container.body[index - 1][1], Comment):
        index -= 1
        found.insert(0, comment)
        container.body[index] = (None, Null())
    return found


def _with_line_ends_of(old: str, new: str) -> str:
    """`new`, whose lines end in LF, with the line ends of the same lines of `old`; new lines get its usual one."""
    if "\r\n" not in old:
        return new
    old_lines, new_lines = old.split("\n"), new.split("\n")
    usual = "\r" if 2 * old.count("\r\n") > old.count("\n") else ""
    shown = [line.removesuffix("\r") for line in old_lines]
    result: list[str] = []
    for kind, start, end, new_start, new_end in difflib.SequenceMatcher(
        None, shown, new_lines, autojunk=False
    ).get_opcodes():
        if kind == "equal":
            result += old_lines[start:end]
        else:
            result += [f"{line}{usual}" for line in new_lines[new_start:new_end]]
    return "\n".join(result)
