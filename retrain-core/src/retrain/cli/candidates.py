"""Completions of a command line: commands, files, flags, and the values of flags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem

from retrain.kernel.declared import Kind
from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins

if TYPE_CHECKING:
    from retrain.kernel.config.keys import Key

Item = CompletionItem[str]
TRAIN = "train"
SHELLS = ("bash", "zsh", "fish")
FILES = [CompletionItem("", type="file")]
NAMES_OF = {  # command options whose value names a registered part
    "--template": Kind.TEMPLATE,
    "--transform": Kind.TRANSFORM,
    "--advantage": Kind.ADVANTAGE,
    "--uncertainty": Kind.UNCERTAINTY,
}
PATH_KEYS = ("path", "dir", "from")  # endings of keys that hold a file or folder


def candidates(plugins: Plugins, words: Sequence[str], typed: str) -> list[Item]:
    """The completions of `typed`, the word at the cursor, after the complete `words` (without `retrain`)."""
    words = list(words)
    if words[:1] == ["help"]:
        return _matching(_commands(plugins), typed) if len(words) == 1 else []
    if not words and not typed.startswith("-"):
        found = _matching([*_commands(plugins), *map(CompletionItem, _configurations())], typed)
        return found or FILES
    if words == ["--completion"]:
        return _matching(map(CompletionItem, SHELLS), typed)
    is_command = bool(words) and bool(plugins.find(Kind.COMMAND, words[0]))
    command = _load(plugins, words[0] if is_command else TRAIN)
    before = words[1:] if is_command else words
    while isinstance(command, click.Group) and before:
        command, before = command.get_command(click.Context(command), before[0]), before[1:]
    if command is None:
        return []
    if isinstance(command, click.Group):
        return _matching(map(CompletionItem, command.list_commands(click.Context(command))), typed)
    keys = _keys(plugins) if _takes_overrides(command) else {}
    flag, value, prefix = _flag_and_value(words, typed)
    if flag:
        values = _values_of(command, flag, keys, plugins)
        if values is not None:
            return [_prefixed(item, prefix) for item in _matching(values, value)]
    if typed.startswith("-"):
        first_only = {
            "--version": "Show the version of each distribution.",
            "--completion": "Print a completion script.",
        }
        at_first = [] if words else _items(first_only)
        return _matching([*at_first, *_flags(command, keys)], typed)
    return _arguments(command, before, typed)


def _commands(plugins: Plugins) -> list[Item]:
    rows = {entry.spec.name: entry.spec.summary for entry in plugins.registered(Kind.COMMAND)}
    return _items({name: text for name, text in rows.items() if name != TRAIN} | {"help": "What a command does."})


def _configurations() -> list[str]:
    return sorted(path.name for path in Path().glob("*.toml") if path.name != "pyproject.toml")


def _load(plugins: Plugins, name: str) -> click.Command | None:
    try:
        command: click.Command = resolve(plugins, Kind.COMMAND, name, where="completion").target
    except RetrainError:
        return None
    return command


def _takes_overrides(command: click.Command) -> bool:
    return bool(command.context_settings.get("ignore_unknown_options"))


def _keys(plugins: Plugins) -> dict[str, Key]:
    from retrain.kernel.config.load import all_keys  # imports pydantic, which only keys need
    from retrain.kernel.config.overrides import FLAG_ALIASES
    from retrain.run.tables import registered_tables

    keys = all_keys(registered_tables(plugins))
    by_path = {key.path: key for key in keys}
    flags = {f"--{key.flag}": key for key in keys if not key.pending}
    return flags | {flag: by_path[path] for flag, path in FLAG_ALIASES.items() if path in by_path}


def _flag_and_value(words: list[str], typed: str) -> tuple[str, str, str]:
    """The flag whose value is being typed, the value so far, and the prefix before it in the same word.

    bash splits `--flag=value` into three words; the other shells do not.
    """
    if typed.startswith("--") and "=" in typed:
        flag, _, value = typed.partition("=")
        return flag, value, f"{flag}="
    if typed == "=" and words:
        return words[-1], "", ""
    if words[-1:] == ["="] and len(words) > 1:
        return words[-2], typed, ""
    if words and words[-1].startswith("-") and not typed.startswith("-"):
        return words[-1], typed, ""
    return "", "", ""


def _values_of(command: click.Command, flag: str, keys: dict[str, Key], plugins: Plugins) -> list[Item] | None:
    """The values of a flag; [] when any text will do, None when it takes no value or is unknown."""
    for param in command.params:
        if isinstance(param, click.Option) and flag in param.opts:
            if param.is_flag:
                return None
            for name in param.opts:
                if name in NAMES_OF:
                    return _names(plugins, NAMES_OF[name])
            if "--kind" in param.opts and not isinstance(param.type, click.Choice):
                return [CompletionItem(kind.replace(" ", "-")) for kind in Kind]
            return param.shell_complete(click.Context(command), "")
    if flag == "--set" and keys:
        return [CompletionItem(f"{key.path}=", help=key.description) for key in keys.values()]
    return _values_of_key(keys[flag], plugins) if flag in keys else None


def _values_of_key(key: Key, plugins: Plugins) -> list[Item]:
    if key.names is not None and key.annotation is str:
        return _names(plugins, key.names)
    if get_origin(key.annotation) is Literal:
        return [CompletionItem(str(value)) for value in get_args(key.annotation)]
    if key.annotation is bool:
        return [CompletionItem("true"), CompletionItem("false")]
    return FILES if key.annotation is str and key.name.endswith(PATH_KEYS) else []


def _names(plugins: Plugins, kind: Kind) -> list[Item]:
    return _items({entry.spec.name: entry.spec.summary for entry in plugins.registered(kind)})


def _flags(command: click.Command, keys: dict[str, Key]) -> list[Item]:
    own = {
        max(param.opts, key=len): param.help or ""
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
    }
    own["--help"] = "Show help."
    if keys:
        from retrain.kernel.config.overrides import PARAM_FLAGS

        own["--set"] = "Set TABLE.KEY=VALUE."
        own |= {flag: f"NAME=VALUE for {path}." for flag, path in PARAM_FLAGS.items()}
    return _items(own | {flag: key.description for flag, key in keys.items()})


def _arguments(command: click.Command, before: Sequence[str], typed: str) -> list[Item]:
    """The positional words: choices of an argument, or files."""
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    position = sum(not word.startswith("-") for word in before)
    for argument in arguments:
        if isinstance(argument.type, click.Choice) and position == 0:
            return _matching([CompletionItem(str(choice)) for choice in argument.type.choices], typed)
    if _takes_overrides(command) and not before:
        return _matching(map(CompletionItem, _configurations()), typed) or FILES
    return FILES if arguments else []


def _items(rows: dict[str, str]) -> list[Item]:
    return [CompletionItem(name, help=text or None) for name, text in rows.items()]


def _matching(items: Iterable[Item], typed: str) -> list[Item]:
    return [item for item in items if item.type != "plain" or item.value.startswith(typed)]


def _prefixed(item: Item, prefix: str) -> Item:
    return item if item.type != "plain" else CompletionItem(f"{prefix}{item.value}", help=item.help)
