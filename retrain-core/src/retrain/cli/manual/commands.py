"""Generated section `commands`: every installed command with its options, from click's description of it."""

from __future__ import annotations

from collections.abc import Iterator

import click

from retrain.cli.manual import markdown
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

TRAIN = "train"
TRAIN_USAGE = "retrain [CONFIG] [--KEY VALUE]..."


def commands(plugins: Plugins) -> str:
    """Usage, help and options of each command; `train`, the default, comes first."""
    sections = []
    entries = plugins.registered(Kind.COMMAND)
    for entry in sorted(entries, key=lambda entry: (entry.spec.name != TRAIN, entry.spec.name)):
        try:
            command: click.Command = entry.spec.load()
        except Exception as error:  # one broken plugin must not break the page
            sections += [f"### retrain {entry.spec.name}", f"Cannot be loaded: {type(error).__name__}."]
            continue
        for path, found in _walk(f"retrain {entry.spec.name}", command):
            also = "".join(f" Also called `{alias}`." for alias in entry.spec.aliases) if found is command else ""
            sections += _section(path, found, also)
    return "\n\n".join(sections)


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _walk(f"{path} {name}", inner)


def _section(path: str, command: click.Command, also: str) -> list[str]:
    is_train = path == f"retrain {TRAIN}"
    # click keeps the help option of the first context: without this, `-h` is lost for the rest of the process
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    usage = TRAIN_USAGE if is_train else " ".join([path, *command.collect_usage_pieces(context)])
    text = "\n\n".join(part for part in (markdown.prose(command.help) + also, markdown.prose(command.epilog)) if part)
    lines = [f"### {path}", f"```text\n{usage}\n```", text]
    rows = [
        (markdown.code(_spelling(option)), _default(option), option.help or "")
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    if rows:
        lines.append(markdown.table(("option", "default", "meaning"), rows))
    return [line for line in lines if line]


def _spelling(option: click.Option) -> str:
    names = ", ".join(sorted(option.opts, key=len, reverse=True) + list(option.secondary_opts))
    if option.is_flag or option.count:
        return names
    return f"{names} {option.make_metavar(click.Context(click.Command('retrain')))}"


def _default(option: click.Option) -> str:
    default = option.default
    if option.is_flag or option.multiple or callable(default) or not isinstance(default, str | int | float):
        return ""
    return markdown.value(default)
