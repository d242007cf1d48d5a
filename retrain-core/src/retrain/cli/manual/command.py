"""`retrain man`: prints the manual, whole or by topic, and keeps its generated sections current."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import click

from retrain.cli.manual.markdown import MANUAL, Generate, find_topic, regenerated, topics, without_markers
from retrain.cli.manual.problems import problems
from retrain.cli.manual.sections import commands, flags, hooks, keys, metrics, parts
from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import json_option
from retrain.text.tables import table_lines

FORMATS = ("text", "json", "troff", "html")
TITLE = "The manual of retrain"
EPILOG = """\b
Examples:
  retrain man quickstart                    one topic; --list-topics lists them
  retrain man -f troff > retrain.1          a man page: man -l retrain.1
  retrain man -f json --topic metrics       for programs
  retrain man --check my_page.md            are its generated sections current?

\b
Exit codes: 0; 1 --check found stale sections; 2 usage error, no such topic, or a file that cannot be used.
"""


def _complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [topic.name for topic in topics(_read(MANUAL)) if topic.name.startswith(incomplete)]


@click.command("man", epilog=EPILOG)
@click.option("--topic", "-t", metavar="NAME", shell_complete=_complete_topic, help="Only this topic.")
@click.option("--format", "-f", "form", type=click.Choice(FORMATS), default="text", help="Format of the output.")
@json_option("The same as --format json.")
@click.option("--list-topics", is_flag=True, help="List the topics and exit.")
@click.option("--path", "show_path", is_flag=True, help="Print the path of the manual, a Markdown file.")
@click.option("--sync", is_flag=True, help="Regenerate the generated sections of FILES in place.")
@click.option("--check", is_flag=True, help="Exit with 1 when --sync would change anything.")
@click.argument("files", metavar="[TOPIC | FILES...]", nargs=-1, type=click.Path(path_type=Path))
@click.pass_obj
def command(
    plugins: Plugins,
    topic: str | None,
    form: str,
    as_json: bool,
    list_topics: bool,
    show_path: bool,
    sync: bool,
    check: bool,
    files: tuple[Path, ...],
) -> None:
    """Read the manual.

    The sections about keys, commands, plugins, metrics and hooks are generated from the installed schemas and
    specs. --sync and --check work on the installed manual, or on FILES: Markdown pages with such sections.
    """
    if sync and check:
        raise click.UsageError("--sync and --check exclude each other")
    if files and not (sync or check):
        if files[0].suffix or files[0].exists():
            raise ConfigError(
                Problem(
                    code="help.files-not-expected",
                    where=str(files[0]),
                    what="files are for --sync and --check",
                    fix="add --check",
                )
            )
        topic, *more = [*([topic] if topic else []), *map(str, files)]
        if more:
            raise click.UsageError("only one topic at a time")
    generate = generator(plugins)
    if sync or check:
        _keep_current(files or (MANUAL,), generate, write=sync)
    elif show_path:
        click.echo(MANUAL)
    elif list_topics:
        rows = [{"name": topic.name, "summary": topic.summary} for topic in topics(_read(MANUAL))]
        lines = table_lines(("", ""), [tuple(row.values()) for row in rows], num_names=2)
        is_json = as_json or form == "json"
        click.echo(json.dumps(rows, indent=2) if is_json else "\n".join(lines[1:]))
    else:
        _print(_read(MANUAL), generate, topic=topic, form="json" if as_json else form)


def _keep_current(files: tuple[Path, ...], generate: Generate, *, write: bool) -> None:
    """Rewrite the pages with stale generated sections, or exit with 1 when there are any."""
    stale = []
    for file in files:
        before = _read(file)
        after = regenerated(before, generate)
        state = "already up to date" if before == after else "updated" if write else "stale"
        if before != after:
            stale.append(file)
            try:
                if write:
                    file.write_text(after, encoding="utf-8")
            except OSError as error:
                fix = "run it as the user who installed retrain; `retrain man` prints current sections in any case"
                raise ConfigError(
                    Problem(code="help.page-unwritable", where=str(file), what=f"cannot be written: {error}", fix=fix)
                ) from None
        click.echo(f"{file} ({state})")
    if stale and not write:
        named = " ".join(map(str, stale)) if files != (MANUAL,) else ""
        click.echo(f"fix: retrain man --sync {named}".rstrip(), err=True)
        raise click.exceptions.Exit(EXIT_FAILED)


def _print(text: str, generate: Generate, *, topic: str | None, form: str) -> None:
    chosen = find_topic(text, topic) if topic is not None else None
    shown = without_markers(regenerated(chosen.text if chosen else text, generate)).strip()
    if form == "json":
        content: dict[str, object] = {"tool": "retrain", "path": str(MANUAL)}
        if chosen:
            content |= {"topic": chosen.name, "section": chosen.heading, "content": shown}
        else:
            content |= {"topics": [topic.name for topic in topics(text)], "manual": shown}
        click.echo(json.dumps(content, indent=2, ensure_ascii=False))
    elif form in ("troff", "html"):
        from retrain.cli.manual.renderings import html_page, man_page

        title = f"retrain: {chosen.heading}" if chosen else TITLE
        click.echo(man_page(shown) if form == "troff" else html_page(shown, title=title), nl=False)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        console = Console()
        with nullcontext() if chosen else console.pager(styles=True):
            console.print(Markdown(shown))
    else:
        click.echo(shown)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = "give a Markdown file in UTF-8" if file != MANUAL else "reinstall retrain-core"
        raise ConfigError(
            Problem(code="help.page-unreadable", where=str(file), what=f"cannot be read: {error}", fix=fix)
        ) from None


GENERATORS: dict[str, Callable[..., str]] = {
    **{each.__name__: each for each in (keys, flags, commands, metrics, hooks, problems)},
    "plugins": parts,
}


def generator(plugins: Plugins, generators: Mapping[str, Callable[..., str]] = GENERATORS) -> Generate:
    """`generate("keys")` for the installed plugins: Markdown with headings from the third level on."""

    def generate(what: str) -> str:
        name, *arguments = what.split()
        if name not in generators:
            fix = f"use one of: {', '.join(generators)}"
            raise ConfigError(
                Problem(code="help.unknown-section", what=f"there is no generated section {name!r}", fix=fix)
            )
        return generators[name](plugins, *arguments)

    return generate
