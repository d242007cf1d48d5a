"""Compares two identities: a run and its continuation, or two runs."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from retrain.records.identity.code import ALL, UNSET
from retrain.records.identity.copies import FOLDER, copy_name, text_of
from retrain.records.reading import table_of
from retrain.records.run import VARIABLE
from retrain.text.secrets import HIDDEN

SHOWN_CHARS = 120
HIDDEN_CHARS = 2000  # longer lines with a secret are compared without hiding
MOST_HIDDEN = 50  # lines with a secret; of a file with more no line is shown
MOST_DIFF_LINES = 200
MOST_FILES = 8  # named of each kind; the others are counted
CHANGED, ADDED, REMOVED = "changed", "was not part of the run", "is no longer part of the run"
TOUCHED = "has another modification time; its size and the blocks that are compared of so large a file are equal"
UNKNOWN = "changed; the list of inputs, inputs/files.json, is missing or damaged"


class ChangeKind(StrEnum):
    CODE = "code"
    DATA = "data"
    MODEL = "model"
    PLUGIN = "plugin"
    PACKAGE = "package"
    VARIABLE = "variable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One input that differs.

    `file` is the path that was read, empty if unknown; `name` is the same on every machine; `owner` is the plugin
    distribution. `line` is the first differing line, 0 without a copy; `before` and `now` are the texts of that line. A
    change that does not `refuse` a resume is only reported.
    """

    kind: ChangeKind
    what: str
    name: str = ""
    file: str = ""
    owner: str = ""
    line: int = 0
    before: str = ""
    now: str = ""
    refuses: bool = True

    @property
    def where(self) -> str:
        """The place, as a user can open it: `plugins/reward.py:12`."""
        return f"{self.file or self.name}:{self.line}" if self.line else self.file or self.name

    def __str__(self) -> str:
        owner = f" of {self.owner}" if self.owner and self.name != self.owner else ""
        lines = f": {self.before!r} is now {self.now!r}" if self.line else ""
        return f"{self.where}{owner} {self.what}{lines}"


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return every difference of two identities, by file where both list files; an empty identity gives none."""
    if not before or not now:
        return []
    found: list[Change] = []
    for kind in (ChangeKind.CODE, ChangeKind.DATA, ChangeKind.MODEL):
        found += _section_changes(kind, before, now)
    for name in sorted({*table_of(before, "plugins"), *table_of(now, "plugins")}):
        found += _plugin_changes(name, before, now)
    packages_before, packages_now = table_of(before, "packages"), table_of(now, "packages")
    for name in sorted({*packages_before, *packages_now}):
        versions = [str(table.get(name) or "not used") for table in (packages_before, packages_now)]
        if versions[0] != versions[1]:
            what = f"was {versions[0]} and is now {versions[1]}"
            found.append(Change(kind=ChangeKind.PACKAGE, name=name, what=what))
    read_before, read_now = table_of(before, "variables"), table_of(now, "variables")
    for name in sorted({*read_before, *read_now} - {ALL}):
        old, new = (side.get(name, UNSET if ALL in side else None) for side in (read_before, read_now))
        # A variable that one side does not read came or went with code, and that change is reported itself.
        if old is not None and new is not None and old != new:
            what = "was set and is no longer" if new == UNSET else "is set now" if old == UNSET else CHANGED
            found.append(Change(kind=ChangeKind.VARIABLE, name=f"{VARIABLE} {name}", what=what, refuses=False))
    return found


def source_diff(change: Change, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the change as a unified diff of the copies, or of copy and file; empty if a side is missing."""
    kind = change.owner or str(change.kind)
    old, new = (_text(identity, kind, change.name) for identity in (before, now))
    if not (old or new) or (change.what == CHANGED and not (old and new)):
        return []
    lines = difflib.unified_diff(*_comparable(old, new), change.name, change.name, lineterm="")
    shown = list(islice(lines, MOST_DIFF_LINES + 1))
    return shown if len(shown) <= MOST_DIFF_LINES else [*shown[:MOST_DIFF_LINES], "..."]


def _section_changes(
    kind: ChangeKind, whole_before: Mapping[str, Any], whole_now: Mapping[str, Any], owner: str = ""
) -> list[Change]:
    before, now = (_section(whole, owner or kind) for whole in (whole_before, whole_now))
    if before.get("digest") == now.get("digest"):
        return []
    if "files" not in before or "files" not in now:
        return [Change(kind=kind, name=owner or kind, owner=owner, what=UNKNOWN)]
    files_before, files_now = table_of(before, "files"), table_of(now, "files")
    differing = [
        name
        for name in sorted({*files_before, *files_now})
        if _content(table_of(files_before, name)) != _content(table_of(files_now, name))
    ]
    found = []
    for name in differing[:MOST_FILES]:
        old, new = table_of(files_before, name), table_of(files_now, name)
        root = str((now if new else before).get("root", ""))
        file = os.path.join(root, str((new or old).get("path") or name))
        file = os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file
        what, difference = CHANGED, {}
        if not old or not new:
            what = REMOVED if old else ADDED
        elif problem := new.get("problem"):
            what = f"cannot be read now: {problem}"
        elif old.get("hash") == new.get("hash"):
            # Only sampled files record a time, since a change between the hashed blocks shows nowhere else.
            what = TOUCHED
        else:
            difference = _first_difference(*(_text(side, owner or kind, name) for side in (whole_before, whole_now)))
        found.append(Change(kind=kind, what=what, name=name, file=file, owner=owner, **difference))
    if more := len(differing) - MOST_FILES:
        what = f"changed in {more} more files"
        found += [Change(kind=kind, name=owner or kind, owner=owner, what=what)] if more > 0 else []
    return found


def _plugin_changes(name: str, whole_before: Mapping[str, Any], whole_now: Mapping[str, Any]) -> list[Change]:
    """Return the changes of a distribution; one of retrain's, or one that came or went, refuses nothing."""
    before, now = (table_of(whole, "plugins", name) for whole in (whole_before, whole_now))
    if not before or not now:
        what = f"{(before or now).get('version', '')} is {'no longer' if before else 'newly'} loaded"
        return [Change(kind=ChangeKind.PLUGIN, name=name, owner=name, what=what.strip(), refuses=False)]
    files = _section_changes(ChangeKind.PLUGIN, whole_before, whole_now, name)
    is_ours = bool(now.get("first_party"))
    versions = [str(side.get("version", "")) for side in (before, now)]
    if versions[0] == versions[1] and not (is_ours and files):
        return files
    what = CHANGED if versions[0] == versions[1] else f"was {versions[0]} and is now {versions[1]}"
    first = f" (first differing file: {files[0].file})" if files and files[0].file else ""
    return [Change(kind=ChangeKind.PLUGIN, name=name, owner=name, what=f"{what}{first}", refuses=not is_ours)]


def _content(file: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(file.get(key) for key in ("hash", "mtime_ns", "problem"))


def _text(identity: Mapping[str, Any], kind: str, name: str) -> str:
    """Return the text of a file: its copy where the identity belongs to a run, otherwise the file itself."""
    if FOLDER in identity:
        return text_of(Path(str(identity[FOLDER])) / copy_name(kind, name))
    section = _section(identity, kind)
    file = table_of(section, "files", name)
    return text_of(str(file.get("path") or os.path.join(str(section.get("root", "")), name))) if file else ""


def _first_difference(before: str, now: str) -> dict[str, Any]:
    """Return the first differing line of two texts; {} if one is missing or hidden."""
    if not before or not now:
        return {}
    for number, (old, new) in enumerate(zip_longest(*_comparable(before, now), fillvalue=""), start=1):
        if old != new:
            return {"line": number, "before": _shown(old), "now": _shown(new)}
    return {}


def _comparable(before: str, now: str) -> tuple[list[str], list[str]]:
    """Return the lines of both, with the same secrets hidden: the variables that name secrets may differ here."""
    # Values that are secrets come from the session's variables: a line may be hidden in the copy and plain in the file.
    sides = _lines(before), _lines(now)
    hidden = {line for side in sides for line in side if HIDDEN in line and len(line) <= HIDDEN_CHARS}
    patterns = {
        line: re.compile(".*".join(map(re.escape, line.split(HIDDEN, 2))))
        for line in sorted(hidden)
        if len(line.replace(HIDDEN, "").strip()) > 2  # else it would match any line
    }
    if len(hidden) > MOST_HIDDEN:
        return [], []
    return [_hidden_form(line, patterns) for line in sides[0]], [_hidden_form(line, patterns) for line in sides[1]]


def _lines(text: str) -> list[str]:
    """Split as an editor does: `splitlines` would also divide a line at a form feed or U+2028."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def _hidden_form(line: str, patterns: Mapping[str, re.Pattern[str]]) -> str:
    return next((form for form, pattern in patterns.items() if pattern.fullmatch(line)), line)


def _shown(line: str) -> str:
    text = line.strip().encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _section(identity: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return table_of(identity, kind) or table_of(identity, "plugins", kind)
