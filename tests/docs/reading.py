"""How the tests read the documentation: pages, fenced blocks, links, headings, command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import click

from docs.generate import PAGES as GENERATED
from docs.generate import filled
from retrain.kernel.config.load import all_keys, from_arguments
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.types import Kind
from retrain.run.tables import registered_tables

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "pages"
MANUAL = ROOT / "retrain-core/src/retrain/cli/manual/manual.md"
SITE_PAGES = sorted(SITE.rglob("*.md"))
REFERENCE = [SITE / name for name in GENERATED]  # pages that only the built site has
WRITTEN = [*sorted(ROOT.glob("*.md")), *SITE_PAGES, *sorted(ROOT.glob("retrain-*/README.md")), MANUAL]
PAGES = [*WRITTEN, *REFERENCE]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]\n]*\]\(([^)\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
# A comment of the shell, and before it whatever is quoted.
COMMENT = re.compile(r"""^((?:[^\s'"#]|'[^']*'|"[^"]*"|\s+(?!\#)|(?<=\S)\#)*)\s*(?:\#.*)?$""", re.VERBOSE)
SHELL = ("bash", "sh", "console")
ENDS_A_COMMAND = {"&&", "||", "|", ";", ">", ">>", "2>", "<", "&"}


def name_of(page: Path) -> str:
    """Its path in the repository, for the names of tests."""
    return str(page.relative_to(ROOT))


@cache
def text_of(page: Path) -> str:
    """Return a page as the site shows it, with its generated sections."""
    text = GENERATED.get(str(page.relative_to(SITE))) if page.is_relative_to(SITE) else None
    return filled(text if text is not None else page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks in these languages, without their common indentation."""
    found = []
    for match in FENCE.finditer(text_of(page)):
        if match["language"] in languages:
            indent = len(match["indent"])
            found.append("\n".join(line[indent:] for line in match["body"].splitlines()) + "\n")
    return found


def prose(page: Path) -> str:
    return FENCE.sub("", text_of(page))


def rows_of_keys(trainer: str) -> list[tuple[str, str]]:
    """The table of keys for those who come from another trainer: its name of a key, and ours."""
    section = text_of(SITE / "coming-from.md").partition(f"\n## {trainer}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]*\|$", section, re.MULTILINE)
    return [row for row in rows if "---" not in row[0]][1:]


def anchors(page: Path) -> set[str]:
    """The ids that the site gives to the headings of a page."""
    from markdown.extensions.toc import slugify, unique

    used: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+?)\s*#*$", prose(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading).replace("\\", "")
        unique(slugify(plain, "-"), used)
    return used


def typed_lines(page: Path) -> list[str]:
    """What a page tells people to type into a shell, line by line, without comments and with continuations joined."""
    return [line for block in blocks(page, *SHELL) for line in typed_in(block)]


def typed_in(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]  # the others are output
    bare = (COMMENT.sub(r"\1", line) for line in prompted or lines)
    return [" ".join(line.split()) for line in bare if line.strip()]


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each command on a line, without variables in front of it and without what the shell does with it."""
    words = shlex.split(line, comments=True)
    while words:
        end = next((i for i, word in enumerate(words) if word in ENDS_A_COMMAND), len(words))
        command = words[:end]
        while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
            command = command[1:]
        if command:
            yield command
        words = words[end + 1 :]


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of every `retrain ...` that a page shows in a shell block, without what the shell does with them."""
    for line in typed_lines(page):
        for command in commands_of(line):
            if command[:1] == ["retrain"]:
                yield command[1:]


def faults(words: Sequence[str]) -> list[str]:
    """What the real commands, options and flags say against a command line; nothing is run."""
    plugins = load_plugins({})
    first = words[0] if words else ""
    if first in ("", "--help", "-h", "help", "--version", "--completion"):
        return []
    if first.startswith("-") or first.endswith(".toml"):
        return _flag_faults([word for word in words if word not in ("-q", "--quiet")])
    if not plugins.find(Kind.COMMAND, first):
        return [f"no command {first!r}"]
    command: click.Command = resolve(plugins, Kind.COMMAND, first, where="page").target
    rest = list(words[1:])
    while isinstance(command, click.Group):
        name = rest.pop(0)
        if name not in command.commands:
            return [f"no command {first} {name}"]
        command = command.commands[name]
    return _option_faults(command, rest)


def _option_faults(command: click.Command, words: list[str]) -> list[str]:
    # click keeps the first help option that it makes for a command: it must be that of the real command line
    settings = {"help_option_names": ["-h", "--help"], **command.context_settings}
    context = click.Context(command, info_name=command.name, **settings)
    try:
        given, _, _ = command.make_parser(context).parse_args(list(words))
        for param in command.params:
            if isinstance(param.type, click.Choice) and param.name in given:
                param.type_cast_value(context, given[param.name])
    except click.UsageError as error:
        return [error.format_message()]
    if not command.context_settings.get("ignore_unknown_options"):
        return []
    free = next(param.name for param in command.params if isinstance(param, click.Argument) and param.nargs == -1)
    words_given = given.get(free or "")
    rest = list(words_given) if isinstance(words_given, list | tuple) else []  # click's own mark when there are none
    while rest and not rest[0].startswith("--"):
        rest.pop(0)
    return _flag_faults(rest)


def _flag_faults(words: Sequence[str]) -> list[str]:
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        rest.pop(0)  # the configuration
    return [str(problem) for problem in from_arguments(rest, _keys())[1]]


@cache
def _keys() -> tuple[object, ...]:
    return tuple(all_keys(registered_tables(load_plugins({}))))
