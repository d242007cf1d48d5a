"""`retrain init-plugin --distribution`: a plugin as a distribution with tests, README and CI."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click

from retrain.cli.scaffold.naming import Names, kind_of, names_from, plain_text, refuse_taken, slug
from retrain.cli.scaffold.render import description_of, render_distribution, scratch
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.text.terminal_text import program

LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause")
DEFAULT_KIND = Kind.TRANSFORM


def write_distribution(
    plugins: Plugins,
    kind: str | None,
    name: str | None,
    output_dir: Path,
    *,
    description: str | None,
    author: str | None,
    licence: str,
    no_input: bool,
    as_json: bool,
) -> None:
    """Write a working plugin with tests, README and CI into a folder below `output_dir`, asking for what is missing."""
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not no_input and not as_json
    chosen = kind_of(_answer("Kind", kind, slug(DEFAULT_KIND), asks))
    names = names_from(_name(name, asks), where="--name")
    refuse_taken(names, chosen, plugins, where="--name", targets=lambda wanted: [output_dir / wanted.distribution])
    given = {
        "description": plain_text(
            _answer("Description", description, description_of(chosen), asks), where="--description"
        ),
        "author": plain_text(_answer("Author", author, _own_name(), asks), where="--author"),
        "license": licence,
    }
    target = output_dir / names.distribution
    with scratch(output_dir) as folder:
        made, toml = render_distribution(chosen, names, folder, given)
        shutil.move(made, target)
    (_print_json if as_json else _print_text)(chosen, names, target, toml)


def _print_text(kind: Kind, names: Names, target: Path, toml: str) -> None:
    click.echo(f"Wrote {_shown(target)}: {kind} {names.part!r}. Next:")
    for line in _next_commands(target):
        click.echo(f"  {line}")
    click.echo("Then name it in your TOML:")
    click.echo("\n".join(f"  {line}".rstrip() for line in toml.splitlines()))


def _print_json(kind: Kind, names: Names, target: Path, toml: str) -> None:
    content = {
        "kind": kind.value,
        "name": names.part,
        "distribution": names.distribution,
        "module": names.module,
        "folder": str(target),
        "files": sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()),
        "toml": toml,
        "next": _next_commands(target),
    }
    click.echo(json.dumps(content, indent=2))


def _next_commands(target: Path) -> list[str]:
    return [
        f'{program("pip")} install -e "{_shown(target)}[dev]"',
        f"{program('pytest')} {shlex.quote(_shown(target))}",
    ]


def _shown(path: Path) -> str:
    return str(path) if path.is_absolute() else f".{os.sep}{path}"


def _answer(question: str, given: str | None, default: str, asks: bool) -> str:
    """The option, else the user's answer, else the default."""
    if given is not None or not asks:
        return default if given is None else given
    answer: str = click.prompt(question, default=default)
    return answer


def _name(given: str | None, asks: bool) -> str:
    if given is None and not asks:
        fix = "add --name entropy-floor"
        raise ConfigError(Problem(where="retrain init-plugin", what="a name is needed", fix=fix))
    name: str = click.prompt("Name") if given is None else given
    return name


def _own_name() -> str:
    """The user's name from git, else from the system."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        asked = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=5, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout.strip()
    with suppress(OSError, KeyError):  # a container without a user
        return getpass.getuser()
    return "Its author"
