"""`retrain migrate-config`: rewrites a configuration that has keys of an earlier version, or says that it must be."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.kernel.whole_file import write_bytes
from retrain.rooms.cli.migrate_toml import Migration, migrate

STDIN = "<stdin>"
EPILOG = """\b
Examples:
  retrain migrate-config retrain.toml                   what would change
  retrain migrate-config retrain.toml --write --backup
  retrain migrate-config retrain.toml --check           for CI

\b
Exit codes: 0 done, or nothing to change; 1 --check found legacy keys; 2 usage or configuration error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to do with the result; `mode` is preview, check, write, output or stdout."""

    mode: str
    output: Path | None = None
    backup: bool = False


@click.command("migrate-config", epilog=EPILOG)
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 when the file has legacy keys.")
@click.option("--write", is_flag=True, help="Rewrite CONFIG in place.")
@click.option("--backup", is_flag=True, help="With --write: keep the old file as CONFIG.bak.")
@click.option("--output", "-o", type=click.Path(path_type=Path), metavar="P", help="Write the result to a new file.")
@click.option("--stdin", "from_stdin", is_flag=True, help="Read the configuration from standard input.")
@click.option("--stdout", "to_stdout", is_flag=True, help="Print the result instead of the difference.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found and done as JSON.")
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
    """Move the legacy prime_rl_* keys of [backend] to [backend.options]; comments and layout stay.

    Without an option it prints the difference and writes nothing.
    """
    chosen = {"--check": check, "--write": write, "--output": output is not None, "--stdout": to_stdout}
    wish = Wish(mode=_mode([name for name, wanted in chosen.items() if wanted]), output=output, backup=backup)
    if backup and not write:
        raise _usage("--backup keeps the file that --write replaces", "add --write, or leave --backup out")
    if from_stdin and write:
        raise _usage("--write rewrites a file, and --stdin is none", "use --stdout or --output P")
    if from_stdin == (config is not None):
        what = "CONFIG and --stdin exclude each other" if from_stdin else "no configuration was given"
        raise _usage(what, "give one of the two: `retrain migrate-config retrain.toml`")
    found = migrate(_stdin() if config is None else _read(config), STDIN if config is None else str(config))
    written = _store(found, wish, config)
    if as_json:
        click.echo(json.dumps(as_data(found, wish, written, config), indent=2, ensure_ascii=False, default=str))
    else:
        _show(found, wish, written)
    if check and found.is_needed:
        ctx.exit(EXIT_FAILED)


def as_data(found: Migration, wish: Wish, written: Path | None, config: Path | None) -> dict[str, Any]:
    """The documented JSON form; in mode `stdout` it has the result as `text`."""
    kept = written is not None and wish.backup and config is not None
    return {
        "config": found.label,
        "mode": wish.mode,
        "needs_migration": found.is_needed,
        "changed": found.after != found.before,
        "legacy_keys": list(found.legacy_keys),
        "merged_backend_options": dict(found.options),
        "diff": found.diff(),
        "written": written is not None,
        "output_path": str(written) if written else None,
        "backup_path": str(_backup_of(config)) if kept and config else None,
        **({"text": found.after} if wish.mode == "stdout" else {}),
    }


def _mode(chosen: list[str]) -> str:
    if len(chosen) > 1:
        raise _usage(f"{' and '.join(chosen)} exclude each other", "keep one")
    return chosen[0].removeprefix("--") if chosen else "preview"


def _stdin() -> str:
    content = sys.stdin.buffer.read()
    if not content.strip():
        raise ConfigError(Problem(where=STDIN, what="nothing came in", fix="pipe a configuration into it"))
    return _decoded(content, STDIN)


def _read(config: Path) -> str:
    try:
        return _decoded(config.read_bytes(), str(config))
    except FileNotFoundError:
        raise ConfigError(Problem(where=str(config), what="file not found", fix="check the path")) from None
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise ConfigError(Problem(where=str(config), what=what, fix="give a UTF-8 text file")) from None


def _decoded(content: bytes, label: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(where=label, what=f"cannot be read: {error}", fix="give a UTF-8 text file")) from None


def _store(found: Migration, wish: Wish, config: Path | None) -> Path | None:
    """Write what is to be written; returns the file, or None when none was."""
    if wish.mode == "output" and wish.output is not None:
        return _write_new(wish.output, found.after)
    if wish.mode != "write" or config is None or found.after == found.before:
        return None
    if wish.backup:
        _write_new(_backup_of(config), found.before, like=config)
    target = Path(os.path.realpath(config))  # a link stays a link
    try:
        mode = target.stat().st_mode
        write_bytes(target, found.after.encode("utf-8"))
        target.chmod(mode)
    except OSError as error:
        raise _unwritable(target, error) from None
    return config


def _backup_of(config: Path) -> Path:
    return config.with_name(f"{config.name}.bak")


def _write_new(path: Path, text: str, like: Path | None = None) -> Path:
    """Write a file that must not exist yet."""
    try:
        with path.open("xb") as stream:
            stream.write(text.encode("utf-8"))
        if like is not None:
            shutil.copymode(like, path)
    except FileExistsError:
        what = "the file exists already; nothing was written"
        raise ConfigError(Problem(where=str(path), what=what, fix="remove it, or choose another name")) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def _unwritable(path: Path, error: OSError) -> ConfigError:
    what = f"cannot be written: {error.strerror or error}"
    return ConfigError(Problem(where=str(path), what=what, fix="choose a file that you may write: --output P"))


def _usage(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where="retrain migrate-config", what=what, fix=fix))


def _show(found: Migration, wish: Wish, written: Path | None) -> None:
    names = ", ".join(found.legacy_keys)
    if wish.mode == "stdout":
        click.echo(found.after.encode("utf-8"), nl=False)
    elif wish.mode == "check":
        click.echo(f"{found.label}: {f'legacy keys: {names}' if names else 'nothing to migrate'}")
    elif written is not None:
        click.echo(f"Wrote {written}" + (f": moved {names} to [backend.options]" if names else ": nothing to migrate"))
    elif not names:
        click.echo(f"{found.label}: nothing to migrate")
    else:
        click.echo(found.diff(), nl=False)
