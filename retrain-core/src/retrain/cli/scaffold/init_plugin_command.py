"""`retrain init-plugin`: a plugin in one file, or as a distribution."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import click

from retrain.cli.scaffold.distribution import LICENSES, write_distribution
from retrain.cli.scaffold.naming import KINDS, Names, kind_of, names_from, refuse_taken, slug
from retrain.cli.scaffold.render import OneFile, render_file, scratch
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import json_option
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
@click.option("--kind", "-k", metavar="KIND", help=f"{', '.join(map(slug, KINDS))}.")
@click.option("--name", "-n", help="Name of the file or the distribution, and of the plugin.")
@click.option(
    "--output-dir",
    "-o",
    type=click.Path(path_type=Path),
    help=f"Its folder (default: {DEFAULT_DIR}; with --distribution this one).",
)
@click.option("--with-test", is_flag=True, help="Write tests/test_NAME_plugin.py as well.")
@click.option("--distribution", is_flag=True, help="Write a folder with tests, README and CI that pip installs.")
@click.option("--description", help="With --distribution: one sentence (default: a description of the example).")
@click.option("--author", help="With --distribution (default: your name from git or the system).")
@click.option(
    "--license",
    "licence",
    type=click.Choice(LICENSES),
    default=LICENSES[0],
    show_default=True,
    help="With --distribution.",
)
@click.option("--no-input", is_flag=True, help="With --distribution: ask nothing, use the defaults.")
@json_option("As JSON; asks nothing.")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    kind: str | None,
    name: str | None,
    output_dir: Path | None,
    with_test: bool,
    distribution: bool,
    as_json: bool,
    **about: Any,
) -> None:
    """Write a working plugin and print the TOML that selects it: a single file that is found through
    `[plugins] search_paths`, or with --distribution a folder with tests, README and CI."""
    if distribution:
        if with_test:
            raise click.UsageError("--with-test is for a single file; a distribution has tests")
        write_distribution(plugins, kind, name, output_dir or Path(), as_json=as_json, **about)
    elif kind is None or name is None:
        raise click.UsageError("--kind and --name are needed")
    elif about["description"] or about["author"] or about["no_input"]:
        raise click.UsageError("--description, --author and --no-input go with --distribution")
    else:
        _write_one_file(plugins, kind, name, output_dir or DEFAULT_DIR, with_test=with_test, as_json=as_json)


def _write_one_file(
    plugins: Plugins, kind: str, name: str, output_dir: Path, *, with_test: bool, as_json: bool
) -> None:
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
