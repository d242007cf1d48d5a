"""`retrain migrate-config`: rewrites a configuration that still has keys of an earlier version."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.container import Container
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AbstractTable, Comment, InlineTable, Null, Whitespace

from retrain.cli.plugin import LEGACY_KEYS
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.toml_file import key_lines, parse_toml
from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.records.files import write_bytes
from retrain.run.public_package import names_in
from retrain.run.tables import registered_tables
from retrain.text.command_options import json_option
from retrain.text.terminal_text import printable

STDIN = "<stdin>"
BOM = "\ufeff"
# TOML ends a line at LF and nowhere else, unlike `str.splitlines`.
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
EPILOG = """\b
Examples:
  retrain migrate-config retrain.toml                   show what would change
  retrain migrate-config retrain.toml --write --backup
  retrain migrate-config retrain.toml --check           for CI

\b
Exit codes: 0 done, or nothing to change; 1 --check found legacy keys or names of the public retrain package;
2 usage or configuration error.
"""


@click.command("migrate-config", epilog=EPILOG)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when the file needs a change.")
@click.option("--write", is_flag=True, help="Rewrite CONFIG in place.")
@click.option("--backup", is_flag=True, help="With --write: keep the old file as CONFIG.bak.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="P", help="Write the result to a new file.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the configuration from standard input.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print the result instead of the difference.")
@json_option("Print findings and result as JSON.")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.pass_context
def command(
    ctx: click.Context,
    config: Path | None,
    check: bool,
    write: bool,
    backup: bool,
    output: Path | None,
    from_stdin: bool,
    to_stdout: bool,
    as_json: bool,
) -> None:
    """Move the legacy prime_rl_* keys of [backend] to [backend.options], keeping comments and layout.

    Without an option it prints the difference and writes nothing. Names of the public retrain package and their
    replacements are listed on stderr, for you to decide.
    """
    modes = {"check": check, "write": write, "output": output is not None, "stdout": to_stdout}
    mode, *others = [name for name, wanted in modes.items() if wanted] or ["preview"]
    if others:
        raise click.UsageError(f"--{mode} and --{others[0]} exclude each other")
    if backup and not write:
        raise click.UsageError("--backup keeps the file that --write replaces: add --write, or leave --backup out")
    if from_stdin == (config is not None) or (from_stdin and write):
        raise click.UsageError("give either CONFIG, or --stdin without --write")
    found = migrate(_read(config), STDIN if config is None else str(config))
    plain = found.before.removeprefix(BOM)
    lines, keys = key_lines(plain), all_keys(registered_tables(ctx.obj))
    # The loader records no line for a name within a condition: it is shown at the line of [campaign].
    notes = [
        {"path": path, "line": lines.get(path, lines.get("campaign", 1)), "note": note}
        for path, note in names_in(tomllib.loads(plain), keys, ctx.obj)
    ]
    written = kept = None
    if output is not None:
        written = _write(output, found.after)
    elif write and config is not None and found.legacy_keys:
        kept = _write(config.with_name(f"{config.name}.bak"), found.before, like=config) if backup else None
        written = _write(config, found.after, like=config)
    if as_json:
        content = {
            "config": found.label,
            "mode": mode,
            "needs_migration": bool(found.legacy_keys or notes),
            "changed": found.after != found.before,
            "legacy_keys": list(found.legacy_keys),
            "merged_backend_options": dict(found.options),
            "diff": found.diff(),
            "public_names": notes,
            "written": written is not None,
            "output_path": str(written) if written else None,
            "backup_path": str(kept) if kept else None,
            **({"text": found.after} if mode == "stdout" else {}),
        }
        click.echo(json.dumps(content, indent=2, ensure_ascii=False, default=str))
    else:
        _print_text(found, notes, mode, written)
    if check and (found.legacy_keys or notes):
        ctx.exit(EXIT_FAILED)


def _print_text(found: Migration, notes: list[dict[str, Any]], mode: str, written: Path | None) -> None:
    names = ", ".join(found.legacy_keys)
    for text in dict.fromkeys(note["note"] for note in notes):
        places = (f"{note['line']} {printable(note['path'])}" for note in notes if note["note"] == text)
        click.echo(f"{found.label}: {text}\n    line {', '.join(places)}", err=True)
    if mode == "stdout":
        click.echo(found.after.encode("utf-8"), nl=False)
    elif mode == "check" and names:
        click.echo(f"{found.label}: legacy keys: {names}")
    elif written is not None:
        click.echo(f"Wrote {written}: {f'moved {names} to [backend.options]' if names else 'nothing to migrate'}")
    elif names:
        click.echo(found.diff(), nl=False)
    elif not notes:
        click.echo(f"{found.label}: nothing to migrate")


def _read(config: Path | None) -> str:
    label = STDIN if config is None else str(config)
    try:
        content = sys.stdin.buffer.read() if config is None else config.read_bytes()
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what, fix = f"cannot be read: {getattr(error, 'strerror', None) or error}", "give a UTF-8 text file"
        raise ConfigError(Problem(code="config.unreadable", where=label, what=what, fix=fix)) from None
    if config is None and not text.strip():
        what, fix = "standard input is empty", "pipe a configuration into it"
        raise ConfigError(Problem(code="migrate.empty-input", where=STDIN, what=what, fix=fix))
    return text


def _write(path: Path, text: str, *, like: Path | None = None) -> Path:
    """Write a new file, or replace `path` if it is the one that it is `like`; permissions and links stay."""
    try:
        if like == path:
            target = Path(os.path.realpath(path))
            mode = target.stat().st_mode
            write_bytes(target, text.encode("utf-8"))
            target.chmod(mode)
        else:
            with path.open("xb") as stream:
                stream.write(text.encode("utf-8"))
            if like is not None:
                shutil.copymode(like, path)
    except FileExistsError:
        what, fix = "the file exists already; nothing was written", "remove it, or choose another name"
        raise ConfigError(Problem(code="migrate.file-exists", where=str(path), what=what, fix=fix)) from None
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror or error}", "choose a file you can write to: --output P"
        raise ConfigError(Problem(code="migrate.unwritable", where=str(path), what=what, fix=fix)) from None
    return path


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
        where, fix = f"{label} [backend] options", "write [backend.options]"
        raise ConfigError(Problem(code="migrate.options-not-a-table", where=where, what="must be a table", fix=fix))
    names, after = tuple(name for name in backend if name in LEGACY_KEYS), text
    options = {LEGACY_KEYS[name]: backend[name] for name in names} | backend.get("options", {})
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
        # A layout that tomlkit cannot edit is refused like one whose result has another meaning.
        pass
    what = "[backend] is written in a form that cannot be rewritten without changing its layout"
    fix = "gather its keys under one [backend], and try again"
    raise ConfigError(Problem(code="migrate.layout-unsupported", where=label, what=what, fix=fix))


def _move_legacy_keys(document: tomlkit.TOMLDocument, newline: str) -> None:
    # A document may write keys of [backend] in several places: a header, dotted keys, an inline table.
    items = [item for key, item in document.body if key is not None and key.key == "backend"]
    tables = [item for item in items if isinstance(item, AbstractTable)]
    options: Any = next((table["options"] for table in tables if "options" in table), None)
    moved: list[tuple[list[Comment], str, Any]] = []
    for table in tables:
        for name in [str(key) for key in table if key in LEGACY_KEYS]:
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
        # The blank line before the next table belongs to this one in tomlkit, and must stay between the two.
        if body and isinstance(body[-1][1], Whitespace) and document.body[-1][1] is not last:
            options.add(Whitespace(newline))
        last.append("options", options)


def _take_comments_above(container: Container, name: str) -> list[Comment]:
    """Remove and return the comment lines directly above a key: they describe it and must move with it."""
    index = next(i for i, (key, _) in enumerate(container.body) if key is not None and key.key == name)
    found: list[Comment] = []
    while index > 0 and isinstance(comment := container.body[index - 1][1], Comment):
        index -= 1
        found.insert(0, comment)
        container.body[index] = (None, Null())
    return found
