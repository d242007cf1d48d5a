"""`retrain init-plugin`: a plugin in one file, or as a distribution."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click

from retrain.cli.scaffold import render
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.text.command_options import json_option
from retrain.text.process import is_interactive
from retrain.text.terminal_text import program

DEFAULT_DIR = Path("plugins")
EPILOG = """\b
Examples:
  retrain init-plugin --kind transform --name sharpen
  retrain init-plugin --kind reward --name exact --with-test
  retrain init-plugin --distribution --kind transform --name entropy-floor
  retrain init-plugin --distribution --kind reward --name close-number --output-dir ~/src --no-input

\b
Exit codes: 0 written; 2 usage error, or the name, a file or the folder is taken.
"""


@click.command("init-plugin", epilog=EPILOG)
@click.option("--kind", "-k", metavar="KIND", help=f"{', '.join(map(render.slug, render.KINDS))}.")
@click.option("--name", "-n", help="Name of the file or the distribution, and of the plugin.")
@click.option(
    "--output-dir",
    "-o",
    type=click.Path(path_type=Path),
    help=f"Its folder (default: {DEFAULT_DIR}; with --distribution this one).",
)
@click.option("--with-test", is_flag=True, help="Write tests/test_NAME_plugin.py as well.")
@click.option("--distribution", is_flag=True, help="Write a folder with tests, README and CI that pip installs.")
@click.option("--no-input", is_flag=True, help="With --distribution: no questions, use the defaults.")
@json_option("As JSON; without questions.")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    kind: str | None,
    name: str | None,
    output_dir: Path | None,
    with_test: bool,
    distribution: bool,
    no_input: bool,
    as_json: bool,
) -> None:
    """Write a working plugin and print the TOML that selects it: a single file that is found through
    `[plugins] search_paths`, or with --distribution a folder with tests, README and CI."""
    if distribution:
        if with_test:
            raise click.UsageError("--with-test is for a single file; a distribution has tests")
        _distribution(plugins, kind, name, output_dir or Path(), no_input=no_input, as_json=as_json)
    elif kind is None or name is None:
        raise click.UsageError("--kind and --name are needed")
    elif no_input:
        raise click.UsageError("--no-input goes with --distribution")
    else:
        _one_file(plugins, kind, name, output_dir or DEFAULT_DIR, with_test=with_test, as_json=as_json)


def _distribution(
    plugins: Plugins,
    kind: str | None,
    name: str | None,
    output_dir: Path,
    *,
    no_input: bool,
    as_json: bool,
) -> None:
    """Write a folder with tests, README and CI below `output_dir`, asking for missing values."""
    asks = is_interactive() and not no_input and not as_json

    def answer(question: str, given: str | None, default: str | None) -> str:
        if given is None and asks:
            given = click.prompt(question, default=default)
        if given is None and default is None:
            raise click.UsageError("a name is needed: add --name entropy-floor")
        return str(default if given is None else given)

    chosen = render.kind_of(answer("Kind", kind, render.slug(Kind.TRANSFORM)))
    names = render.names_from(answer("Name", name, None), where="--name")
    render.refuse_taken(
        names, chosen, plugins, where="--name", targets=lambda wanted: [output_dir / wanted.distribution]
    )
    target = output_dir / names.distribution
    with render.scratch(output_dir) as folder:
        made, toml = render.render_distribution(chosen, names, folder, author=_own_name())
        shutil.move(made, target)
    shown = str(target) if target.is_absolute() else f".{os.sep}{target}"
    commands = [f'{program("pip")} install -e "{shown}[dev]"', f"{program('pytest')} {shlex.quote(shown)}"]
    if as_json:
        content = {
            "kind": chosen.value,
            "name": names.part,
            "distribution": names.distribution,
            "module": names.module,
            "folder": str(target),
            "files": sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()),
            "toml": toml,
            "next": commands,
        }
        click.echo(json.dumps(content, indent=2))
        return
    _print_block(f"Wrote {shown}: {chosen} {names.part!r}. Next:", commands)
    _print_block("Then name it in your TOML:", toml.splitlines())


def _own_name() -> str:
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        asked = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=5, check=False)
        if asked.returncode == 0 and asked.stdout.strip():
            return render.plain_text(asked.stdout)
    # A container may run under a number that no user has.
    with suppress(OSError, KeyError):
        return render.plain_text(getpass.getuser())
    return "Its author"


def _one_file(plugins: Plugins, kind: str, name: str, output_dir: Path, *, with_test: bool, as_json: bool) -> None:
    chosen = render.kind_of(kind)
    names = render.names_from(name, where="--name")
    try:
        parts = output_dir.resolve().relative_to(Path.cwd()).parts
    except ValueError:
        parts = ("..",)
    if not all(part.isidentifier() for part in parts):
        where, what = "--output-dir", f"{str(output_dir)!a} is not a folder that a plugin can be imported from"
        why = "names in the TOML are resolved from the folder where retrain runs: plugins/mine.py is plugins.mine"
        fix = "give a folder below this one, named with letters, digits and underscores, such as plugins"
        raise ConfigError(Problem(code="plugin.folder-not-importable", where=where, what=what, why=why, fix=fix))

    def files_of(wanted: render.Names) -> list[Path]:
        test = Path("tests") / f"test_{wanted.module}_plugin.py"
        return [output_dir / f"{wanted.module}.py", *([test] if with_test else [])]

    render.refuse_taken(names, chosen, plugins, where="--name", targets=files_of)
    files = files_of(names)
    made = render.render_file(chosen, names, ".".join(parts))
    written: list[Path] = []
    for file, text in zip(files, (made.module, made.test), strict=False):
        try:
            with render.scratch(file.parent) as folder:
                (folder / file.name).write_text(text, encoding="utf-8")
                shutil.move(folder / file.name, file)
        # Both files or none: a module without its requested test would block the second try.
        except ConfigError:
            for each in written:
                each.unlink()
            raise
        written.append(file)
    commands = [f"{program('python')} -m pytest {shlex.quote(str(test))}" for test in files[1:]]
    commands += [f"{program()} explain", program()][: 2 - len(commands)]
    if as_json:
        content = {"kind": chosen.value, "name": made.selected, "files": list(map(str, files)), "toml": made.toml}
        click.echo(json.dumps({**content, "next": commands}, indent=2))
        return
    _print_block(f"Wrote {' and '.join(map(str, files))}. Name it in your TOML:", made.toml.splitlines())
    _print_block("Next:", commands)


def _print_block(title: str, lines: Sequence[str]) -> None:
    click.echo("\n".join([title, *(f"  {line}".rstrip() for line in lines)]))
