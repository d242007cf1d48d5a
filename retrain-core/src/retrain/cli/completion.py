"""Completions of a command line, as the script of `retrain --completion SHELL` requests them; misspelt commands.

The script runs `retrain` with `_RETRAIN_COMPLETE` set; click implements the shells' protocols.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from retrain.cli.plugin import COMPLETION, PUBLIC_NAMES, TRAIN, VARIABLE
from retrain.kernel.declared import Kind
from retrain.kernel.errors import EXIT_DONE, EXIT_USAGE, ConfigError, Problem, RetrainError
from retrain.kernel.plugins.first_party import promised_names
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins

if TYPE_CHECKING:
    from retrain.kernel.config.keys import Key

Item = CompletionItem[str]
FILES = [CompletionItem("", type="file")]
NAMES_OF = {  # command options whose value names a registered part
    "--template": Kind.TEMPLATE,
    "--transform": Kind.TRANSFORM,
    "--advantage": Kind.ADVANTAGE,
    "--uncertainty": Kind.UNCERTAINTY,
}
FORMER_NAMES = PUBLIC_NAMES | {
    "completion": COMPLETION,
    "forecast": "status RUN --forecast",
    "ledger": "compare --ledger",
    "merge": "export RUN --format transformers",
    "plugin": "init-plugin --distribution",
    "push": "export RUN --push REPO",
    "resume-check": "status RUN --resume",
    "schema": "explain --schema",
    "score": "audit --replay PATH",
}
PATH_KEYS = ("path", "dir", "from")  # endings of keys that hold a file or folder


def answer(request: str, plugins: Plugins, params: Sequence[click.Parameter]) -> int:
    """Print the completions; `request` is the variable's value (`bash_complete`), `params` belong to `retrain`.

    Returns the exit code. It never fails loudly: pressing TAB must not show a traceback.
    """
    shell, _, action = request.partition("_")
    protocol = completion_protocol(shell)
    if protocol is None or action not in ("complete", "source"):
        return EXIT_USAGE
    if action == "source":
        click.echo(protocol.source(), nl=False)
        return EXIT_DONE
    try:
        words, typed = protocol.get_completion_args()
        found = candidates(plugins, words, typed, params)
    except Exception:
        # A broken plugin or an open quote: a traceback would land in the line that the user is typing.
        return EXIT_DONE
    click.echo("\n".join(map(protocol.format_completion, found)))
    return EXIT_DONE


def candidates(
    plugins: Plugins, words: Sequence[str], typed: str, group_params: Sequence[click.Parameter] = ()
) -> list[Item]:
    """The completions of `typed`, the word at the cursor, after the complete `words` (without `retrain`)."""
    if words and words[0] == "help":
        return _matching(_commands(plugins), typed) if len(words) == 1 else []
    if not words and not typed.startswith("-"):
        return _matching([*_commands(plugins), *_configurations()], typed) or FILES
    is_command = bool(words) and bool(plugins.find(Kind.COMMAND, words[0]))
    try:
        name = words[0] if is_command else TRAIN
        command: click.Command = resolve(plugins, Kind.COMMAND, name, where="completion").target
    except RetrainError:
        return []
    params = [*command.params, *([] if is_command else group_params)]
    options = [param for param in params if isinstance(param, click.Option)]
    takes_keys = bool(command.context_settings.get("ignore_unknown_options"))
    keys = _keys(plugins) if takes_keys else {}
    flag, value, prefix = _flag_and_value(words, typed)
    values = _values_of(options, flag, keys, plugins) if flag else None
    if values is not None:
        found = _matching(values, value)
        return [CompletionItem(prefix + item.value, item.type, item.help) if item.value else item for item in found]
    if typed.startswith("-"):
        own = {max(option.opts, key=len): option.help or "" for option in options if not option.hidden}
        own["--help"] = "Show help."
        if keys:
            from retrain.kernel.config.load import PARAM_FLAGS

            own["--set"] = "Set TABLE.KEY=VALUE."
            own |= {flag: f"NAME=VALUE for {path}." for flag, path in PARAM_FLAGS.items()}
        return _matching(_items(own | {flag: key.description for flag, key in keys.items()}), typed)
    before = words[1:] if is_command else words
    arguments = [param for param in params if isinstance(param, click.Argument)]
    if takes_keys and not before:
        return _matching(_configurations(), typed) or FILES
    if not any(not word.startswith("-") for word in before):
        for choice in (each.type for each in arguments if isinstance(each.type, click.Choice)):
            return _matching([CompletionItem(str(each)) for each in choice.choices], typed)
    return FILES if arguments else []


def _commands(plugins: Plugins) -> list[Item]:
    rows = {entry.spec.name: entry.spec.summary for entry in plugins.registered(Kind.COMMAND)}
    return _items({name: text for name, text in rows.items() if name != TRAIN} | {"help": "Help of a command."})


def _configurations() -> list[Item]:
    names = sorted(path.name for path in Path().glob("*.toml") if path.name != "pyproject.toml")
    return [CompletionItem(name) for name in names]


def _keys(plugins: Plugins) -> dict[str, Key]:
    # Imported here, because it loads pydantic and only keys need it.
    from retrain.kernel.config.load import FLAG_ALIASES, all_keys
    from retrain.run.tables import registered_tables

    keys = all_keys(registered_tables(plugins))
    by_path = {key.path: key for key in keys}
    flags = {f"--{key.flag}": key for key in keys if not key.pending}
    return flags | {flag: by_path[path] for flag, path in FLAG_ALIASES.items() if path in by_path}


def _flag_and_value(words: Sequence[str], typed: str) -> tuple[str, str, str]:
    """The flag whose value is being typed, the value so far, and the prefix before it in the same word.

    bash splits `--flag=value` into three words; the other shells do not.
    """
    if typed.startswith("--") and "=" in typed:
        flag, _, value = typed.partition("=")
        return flag, value, f"{flag}="
    # bash passes the sign as a word; it is the last one until a value is typed.
    if typed == "=" and words:
        return words[-1], "", ""
    if len(words) > 1 and words[-1] == "=":
        return words[-2], typed, ""
    if words and words[-1].startswith("-") and not typed.startswith("-"):
        return words[-1], typed, ""
    return "", "", ""


def _values_of(
    options: Sequence[click.Option], flag: str, keys: Mapping[str, Key], plugins: Plugins
) -> list[Item] | None:
    """The values of a flag; [] when any text will do, None when it takes no value or is unknown."""
    option = next((option for option in options if flag in option.opts), None)
    if option is not None:
        if option.is_flag:
            return None
        if kinds := [NAMES_OF[name] for name in option.opts if name in NAMES_OF]:
            return _names(plugins, kinds[0])
        if "--kind" in option.opts and not isinstance(option.type, click.Choice):
            return [CompletionItem(kind.replace(" ", "-")) for kind in Kind]
        return option.shell_complete(click.Context(click.Command("retrain")), "")
    if flag == "--set" and keys:
        return [CompletionItem(f"{key.path}=", help=key.description) for key in keys.values()]
    if flag not in keys:
        return None
    key = keys[flag]
    if key.names is not None and key.annotation is str:
        return _names(plugins, key.names)
    if get_origin(key.annotation) is Literal:
        return [CompletionItem(str(value)) for value in get_args(key.annotation)]
    if key.annotation is bool:
        return [CompletionItem("true"), CompletionItem("false")]
    return FILES if key.annotation is str and key.name.endswith(PATH_KEYS) else []


def _names(plugins: Plugins, kind: Kind) -> list[Item]:
    return _items({entry.spec.name: entry.spec.summary for entry in plugins.registered(kind)})


def _items(rows: Mapping[str, str]) -> list[Item]:
    return [CompletionItem(name, help=text or None) for name, text in rows.items()]


def _matching(items: Iterable[Item], typed: str) -> list[Item]:
    return [item for item in items if item.type != "plain" or item.value.startswith(typed)]


def completion_protocol(shell: str) -> ShellComplete | None:
    """click's protocol for a shell on TAB; None for a shell that it does not know."""
    protocol = get_completion_class(shell)
    return protocol(click.Command("retrain"), {}, "retrain", VARIABLE) if protocol else None


def refuse_misspelt(word: str, plugins: Plugins) -> None:
    """ConfigError on a first word that is neither a command nor a file."""
    known = [entry.spec.name for entry in plugins.registered(Kind.COMMAND) if entry.spec.name != TRAIN]
    if word in promised_names(Kind.COMMAND):
        what, fix = f"`retrain {word}` is not part of this installation", "see `retrain --help`, or reinstall"
        raise ConfigError(Problem(code="usage.command-not-installed", where="command line", what=what, fix=fix))
    if word in FORMER_NAMES:
        what, fix = f"the command {word!r} was renamed", f"use `retrain {FORMER_NAMES[word]}`"
        raise ConfigError(Problem(code="usage.former-command", where="command line", what=what, fix=fix))
    near = get_close_matches(word, [*known, TRAIN], n=1)
    others = f"commands: {', '.join(known)}; or give a .toml file"
    what, fix = f"{word!r} is neither a command nor a file", f"did you mean `retrain {near[0]}`?" if near else others
    raise ConfigError(Problem(code="usage.unknown-command", where="command line", what=what, fix=fix))
