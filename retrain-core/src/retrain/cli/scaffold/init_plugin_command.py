"""`retrain init-plugin --kind KIND --name NAME`: a plugin in one file, found through `[plugins] search_paths`."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import click

from retrain.cli.scaffold.kinds import KINDS, kind_of, slug
from retrain.cli.scaffold.naming import Names, names_from, refuse_taken
from retrain.cli.scaffold.render import OneFile, render_file, scratch
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.typed_command import program

DEFAULT_DIR = Path("plugins")
EPILOG = """\b
Examples:
  retrain init-plugin --kind transform --name sharpen
  retrain init-plugin --kind reward --name exact --with-test

\b
Exit codes: 0 written; 2 usage error, or the name or a file is taken.
"""


@click.command("init-plugin", epilog=EPILOG)
@click.option("--kind", "-k", required=True, metavar="KIND", help=f"{', '.join(map(slug, KINDS))}.")
@click.option("--name", "-n", required=True, help="Name of the file and of the plugin.")
@click.option(
    "--output-dir", "-o", type=click.Path(path_type=Path), default=DEFAULT_DIR, show_default=True, help="Its folder."
)
@click.option("--with-test", is_flag=True, help="Write tests/test_NAME_plugin.py as well.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def command(plugins: Plugins, kind: str, name: str, output_dir: Path, with_test: bool, as_json: bool) -> None:
    """Write a working plugin as a single file, and print the TOML that selects it."""
    chosen = kind_of(kind)
    names = names_from(name, where="--name")
    prefix = search_path(output_dir)

    def files_of(wanted: Names) -> list[Path]:
        test = Path("tests") / f"test_{wanted.module}_plugin.py"
        return [output_dir / f"{wanted.module}.py", *([test] if with_test else [])]

    refuse_taken(names, chosen, plugins, where="--name", targets=files_of)
    targets = files_of(names)
    file, test = targets[0], targets[-1] if with_test else None
    made = render_file(chosen, names, prefix)
    _write(made, file, test)
    commands = [f"{program('python')} -m pytest {shlex.quote(str(test))}"] if test else []
    commands += [f"{program()} explain", program()][: 2 - len(commands)]
    if as_json:
        content = {"kind": chosen.value, "name": made.selected, "files": list(map(str, targets)), "toml": made.toml}
        click.echo(json.dumps({**content, "next": commands}, indent=2))
        return
    click.echo(f"Wrote {' and '.join(map(str, targets))}. Name it in your TOML:")
    click.echo("\n".join(f"  {line}".rstrip() for line in made.toml.splitlines()))
    click.echo("Next:")
    for line in commands:
        click.echo(f"  {line}")


def search_path(folder: Path) -> str:
    """The import prefix of modules in a folder below this one; ConfigError when Python cannot import from there."""
    try:
        parts = folder.resolve().relative_to(Path.cwd()).parts
    except ValueError:
        parts = ("..",)
    if all(part.isidentifier() for part in parts):
        return ".".join(parts)
    raise ConfigError(
        Problem(
            where="--output-dir",
            what=f"{str(folder)!a} is not a folder that a plugin can be imported from",
            why="names in the TOML are resolved from the folder where retrain runs: plugins/mine.py is plugins.mine",
            fix="give a folder below this one, named with letters, digits and underscores, such as plugins",
        )
    )


def _write(made: OneFile, file: Path, test: Path | None) -> None:
    """Both files or none."""
    for target, text in ((file, made.module), (test, made.test)):
        if target is None:
            continue
        try:
            with scratch(target.parent) as folder:
                whole = folder / target.name
                whole.write_text(text, encoding="utf-8")
                shutil.move(whole, target)
        except ConfigError:
            if target is test:
                file.unlink(missing_ok=True)
            raise
