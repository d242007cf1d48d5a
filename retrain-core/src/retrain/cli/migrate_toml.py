"""Rewrites a configuration of an earlier version: its legacy keys in [backend] move to [backend.options]."""

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

from retrain.cli.legacy import LEGACY_KEYS, legacy_names, merged_options
from retrain.kernel.config.toml_file import parse_toml
from retrain.kernel.errors import ConfigError, Problem

BOM = "\ufeff"
_LINE = re.compile(r"[^\n]*\n|[^\n]+")  # TOML ends a line at LF and nowhere else


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A configuration before and after.

    `legacy_keys` are those in [backend] of `before`, in file order; `options` is the whole [backend.options] of
    `after`. Without legacy keys `after` equals `before`.
    """

    label: str
    before: str
    after: str
    legacy_keys: tuple[str, ...]
    options: Mapping[str, Any]

    def diff(self) -> str:
        """Unified diff from `label` to `label.migrated`; empty when nothing changes."""
        before, after = (_LINE.findall(text.removeprefix(BOM)) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, self.label, f"{self.label}.migrated")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def migrate(text: str, label: str) -> Migration:
    """Migrate a configuration, keeping comments, layout, line endings and byte order mark.

    A key already in [backend.options] wins over its legacy form. The result is parsed again and compared with the
    intended content. ConfigError when the text is not TOML or cannot be rewritten.
    """
    plain = text.removeprefix(BOM)
    document = parse_toml(plain, label)
    backend = document.get("backend")
    backend = backend if isinstance(backend, dict) else {}
    if not isinstance(backend.get("options", {}), dict):
        raise ConfigError(
            Problem(where=f"{label} [backend] options", what="must be a table", fix="write [backend.options]")
        )
    names, options, after = legacy_names(backend), merged_options(backend), text
    if names:
        kept = {name: value for name, value in backend.items() if name not in names}
        rewritten = _rewritten(plain, {**document, "backend": {**kept, "options": options}}, label)
        after = text[: len(text) - len(plain)] + rewritten
    return Migration(label=label, before=text, after=after, legacy_keys=names, options=options)


def _rewritten(text: str, intended: Mapping[str, Any], label: str) -> str:
    """The text with its legacy keys moved; ConfigError unless it then parses to `intended`."""
    try:
        document = tomlkit.parse(text)
        _move_legacy_keys(document, "\r\n" if 2 * text.count("\r\n") > text.count("\n") else "\n")
        after = tomlkit.dumps(document)
        if tomllib.loads(after) == intended:
            return after
    except (TOMLKitError, tomllib.TOMLDecodeError, LookupError, TypeError, ValueError, AttributeError):
        pass  # a layout that tomlkit cannot edit: better to refuse than to write something else
    what = "[backend] is written in a form that cannot be rewritten without changing its layout"
    fix = "gather its keys under one [backend], and try again"
    raise ConfigError(Problem(where=label, what=what, fix=fix))


def _move_legacy_keys(document: tomlkit.TOMLDocument, newline: str) -> None:
    # a document may write keys of [backend] in several places: a header, dotted keys, an inline table
    items = [item for key, item in document.body if key is not None and key.key == "backend"]
    tables = [item for item in items if isinstance(item, AbstractTable)]
    options: Any = next((table["options"] for table in tables if "options" in table), None)
    moved: list[tuple[list[Comment], str, Any]] = []
    for table in tables:
        for name in legacy_names(list(table)):
            if options is None or LEGACY_KEYS[name] not in options:
                moved.append((_take_comments_above(table.value, name), LEGACY_KEYS[name], table.item(name)))
            table.remove(name)
    if not moved:
        return
    last, is_new = tables[-1], options is None
    if is_new:
        options = tomlkit.inline_table() if isinstance(last, InlineTable) else tomlkit.table()
        options.trivia.trail = newline if not isinstance(last, InlineTable) else ""
    for comments, name, item in moved:
        for comment in comments:
            options.add(comment)
        if not isinstance(options, InlineTable) and not item.trivia.trail:
            item.trivia.trail = newline
        options.add(name, item)
    if is_new:
        body = last.value.body
        if body and isinstance(body[-1][1], Whitespace) and document.body[-1][1] is not last:
            options.add(Whitespace(newline))  # keep the blank line before the next table
        last.append("options", options)


def _take_comments_above(container: Container, name: str) -> list[Comment]:
    """Remove and return the comment lines directly above a key, which describe it and must move with it."""
    index = next(i for i, (key, _) in enumerate(container.body) if key is not None and key.key == name)
    found: list[Comment] = []
    while index > 0 and isinstance(comment := container.body[index - 1][1], Comment):
        index -= 1
        found.insert(0, comment)
        container.body[index] = (None, Null())
    return found
