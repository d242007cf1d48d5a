"""Finds the command of a command line: a registered one, training, or the one that claims the configuration."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.discover import KERNEL, offered_plugins
from retrain.kernel.plugins.first_party import promised_names
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.version import __version__
from retrain.text.process import is_interactive

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

TRAIN = "train"
MISSPELT = 0.8  # similarity above which a word counts as a misspelt option
DEFAULT_FILE = "retrain.toml"
HELP, VERSION, COMPLETION = "--help", "--version", "--completion"
HELP_FLAGS = ("-h", HELP)
SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_RETRAIN_COMPLETE"  # set by the scripts that these shells run on TAB
GROUPS = ("train", "look", "compare", "use", "extend", "tools")  # of `--help`; a plugin's command names its own
PUBLIC_NAMES = {  # of the public retrain: they go on working
    "backends": "plugins --kind backend",
    "top": "status --follow --active",
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
TEXT = """Train a language model with verifiable rewards, configured by one TOML file.

\b
  retrain                        train with ./retrain.toml
  retrain my.toml --lr 1e-4      train with my.toml and one value changed
  retrain init --template tiny   write a retrain.toml that trains in a minute
  retrain init --interactive     answer a few questions instead
  retrain help COMMAND           what a command does, with examples

Every key of the file is a flag (`--seed 42`, `--gtpo-beta=0.2`); `retrain explain --keys` lists them all.
"""
EPILOG = """\b
Exit codes: 0 done; 1 the run or check failed; 2 usage or configuration error;
            75 stopped by a signal with its state saved, resume it; 130 interrupted.
Environment: NO_COLOR, FORCE_COLOR; RETRAIN__TABLE__KEY sets a key; .env is loaded.
"""


class RetrainGroup(click.Group):
    """Commands come from plugins; any other first word is a configuration to train."""

    def __init__(self, plugins: Plugins) -> None:
        super().__init__(
            name="retrain",
            help=TEXT,
            epilog=EPILOG,
            subcommand_metavar="[CONFIG | COMMAND] [ARGS]...",
            context_settings={"help_option_names": list(HELP_FLAGS)},
        )
        self.plugins = plugins
        about, shells = "Show the version of each distribution and exit (with --json: as JSON).", click.Choice(SHELLS)
        self.params.append(click.Option([VERSION], is_flag=True, expose_value=False, help=about))
        about = "Print the completion script of a shell and exit."
        script = click.Option([COMPLETION], type=shells, expose_value=False, callback=_print_script, help=about)
        self.params.append(script)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.spec.name for entry in self.plugins.registered(Kind.COMMAND) if entry.spec.name != TRAIN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        ctx.obj = self.plugins
        if not self.plugins.find(Kind.COMMAND, cmd_name):
            return None
        command: click.Command = resolve(self.plugins, Kind.COMMAND, cmd_name, where="command line").target
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The lists in `--help`, one per group, built from summaries without importing a command."""
        rows: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for spec in (entry.spec for entry in self.plugins.registered(Kind.COMMAND)):
            if spec.name != TRAIN:
                rows[spec.traits if spec.traits in GROUPS else "tools"].append((spec.name, spec.summary))
        width = max(len(name) for group in rows.values() for name, _ in group)
        for group in filter(rows.get, GROUPS):
            with formatter.section(group.capitalize()):
                formatter.write_dl([(name.ljust(width), summary) for name, summary in rows[group]])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Without a command it is `train`, or the command that claims the file; `help X` means `X --help`."""
        first, *rest = args or [""]
        if first == "help":
            return self.parse_args(ctx, [*rest[:1], HELP])
        if first in PUBLIC_NAMES and not self.plugins.find(Kind.COMMAND, first):
            click.echo(f"retrain: `retrain {first}` is now `retrain {PUBLIC_NAMES[first]}`", err=True)
            return self.parse_args(ctx, [*PUBLIC_NAMES[first].split(), *rest])
        if first == VERSION:
            _show_versions(as_json="--json" in rest)
            ctx.exit()
        asks = not args and not Path(DEFAULT_FILE).exists() and is_interactive()
        if asks and click.confirm(f"There is no {DEFAULT_FILE} in this folder. Create one now?", default=True):
            args = ["init", "--interactive"]
        elif first.partition("=")[0] not in (*HELP_FLAGS, COMPLETION) and not self.plugins.find(Kind.COMMAND, first):
            if args and not first.startswith("-"):
                self._refuse_misspelt_command(first)
            args = [self._command_for(args), *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse a misspelt option of a command that takes the flags of all keys."""
        name, command, rest = super().resolve_command(ctx, args)
        if command and command.context_settings.get("ignore_unknown_options"):
            options = [text for param in command.params if isinstance(param, click.Option) for text in param.opts]
            options += [HELP, VERSION] if name == TRAIN else [HELP]
            for flag in (word.partition("=")[0] for word in rest if word.startswith("--")):
                near = [] if flag in options else get_close_matches(flag, options, n=1, cutoff=MISSPELT)
                if near:
                    from retrain.kernel.config.load import all_keys  # imports pydantic, as such a command does anyway
                    from retrain.run.tables import registered_tables

                    if flag not in {f"--{key.flag}" for key in all_keys(registered_tables(self.plugins))}:
                        raise click.NoSuchOption(flag, possibilities=near, ctx=click.Context(command, ctx, name))
        return name, command, rest

    def _command_for(self, args: list[str]) -> str:
        from retrain.run.configure import claim_of  # not needed for `--help` and completion
        from retrain.text.terminal_text import QUIET_FLAGS

        claim = claim_of([word for word in args if word not in QUIET_FLAGS], self.plugins)
        return claim.command if claim else TRAIN

    def _refuse_misspelt_command(self, word: str) -> None:
        if word.endswith(".toml") or (word and Path(word).exists()):
            return
        known = self.list_commands(click.Context(self))
        if word in promised_names(Kind.COMMAND):
            what, fix = f"`retrain {word}` is not part of this installation", "see `retrain --help`, or reinstall"
        elif word in FORMER_NAMES:
            what, fix = f"there is no command {word!r} any more", f"use `retrain {FORMER_NAMES[word]}`"
        else:
            what, near = f"{word!r} is neither a command nor a file", get_close_matches(word, [*known, TRAIN], n=1)
            others = f"commands: {', '.join(known)}; or give a .toml file"
            fix = f"did you mean `retrain {near[0]}`?" if near else others
        raise ConfigError(Problem(where="command line", what=what, fix=fix))


def completion_protocol(shell: str) -> ShellComplete | None:
    """click's protocol for a shell on TAB; None for a shell that it does not know."""
    from click.shell_completion import get_completion_class  # only completion needs it

    protocol = get_completion_class(shell)
    return protocol(click.Command("retrain"), {}, "retrain", VARIABLE) if protocol else None


def _print_script(ctx: click.Context, option: click.Parameter, shell: str | None) -> None:
    if shell and (protocol := completion_protocol(shell)):
        click.echo(protocol.source(), nl=False)
        ctx.exit()


def _show_versions(*, as_json: bool) -> None:
    installed = {offer.distribution: offer.version for offer in offered_plugins() if offer.distribution}
    versions = {KERNEL: __version__} | {name: installed[name] for name in sorted(installed) if name != KERNEL}
    if as_json:
        click.echo(json.dumps(versions, indent=2))
        return
    others = [f"{name} {version}" for name, version in versions.items() if name != KERNEL]
    click.echo("\n  ".join([f"retrain {__version__}", *others]))
