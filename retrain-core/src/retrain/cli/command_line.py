"""`retrain`: runs one command line, and turns failures into a message and an exit code; `train` is the default."""

from __future__ import annotations

import errno
import gc
import json
import os
import shlex
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import click

from retrain.cli.plugin import COMPLETION, PUBLIC_NAMES, TRAIN, VARIABLE
from retrain.kernel.declared import Kind
from retrain.kernel.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    EXIT_USAGE,
    ConfigError,
    Problem,
    RetrainError,
    StopRequested,
)
from retrain.kernel.plugins.discover import KERNEL, load_plugins, offered_plugins
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.version import __version__
from retrain.text.command_options import config_argument, quiet_option
from retrain.text.process import drop_stdout, is_interactive, prepare_process, prepare_streams, wants_color

TRAIN_EPILOG = """\b
Examples:
  retrain                               train with ./retrain.toml
  retrain my.toml --seed 42 --lr 1e-4   change two values
  retrain --set training.lr=1e-4        set a key by its table and name
  retrain my.toml -q > run.log          print only the outcome
  retrain --resume logs/train           continue a stopped run

`retrain explain --keys` lists every key, its flag and its default; `retrain explain CONFIG` describes the run.

\b
Exit codes: 0 done; 1 the run failed; 2 usage or configuration error;
            75 stopped by a signal with its state saved, `--resume` continues it.
"""
EXIT_INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `retrain` script; ends in `sys.exit`."""
    prepare_streams()
    # A shell on TAB expects completions and no other output.
    request = os.environ.get(VARIABLE)
    try:
        if prepare_process() and not request:
            click.echo("Loaded .env", err=True)
    except ConfigError as error:
        if not request:
            _print_error("config error", str(error))
            sys.exit(EXIT_USAGE)
    if request:
        from retrain.cli.completion import answer

        plugins = load_plugins()
        sys.exit(answer(request, plugins, RetrainGroup(plugins).params))
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    # Frozen objects spare the interpreter a last pass of the garbage collector on its way out.
    gc.freeze()
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Errors for users go to stderr without a traceback."""
    try:
        group = RetrainGroup(load_plugins())
        # Not `group.main`: it exits with 1 on a closed pipe.
        with group.make_context("retrain", arguments, color=wants_color()) as context:
            group.invoke(context)
    except click.exceptions.Exit as wanted:
        return wanted.exit_code
    except RetrainError as error:
        _print_error(error.label, str(error))
        return error.exit_code
    except StopRequested as stop:
        from retrain.text.terminal_text import program  # only a stopped run needs it

        how = f"`{program()} --resume {shlex.quote(str(stop.folder)) if stop.folder else 'RUN'}` continues it"
        click.echo(f"retrain: stopped by {stop.reason}; the state is saved, {how}", err=True)
        return EXIT_RESUMABLE
    except click.ClickException as error:
        return _print_usage_error(error)
    except (KeyboardInterrupt, click.Abort):
        click.echo("retrain: interrupted", err=True)
        return EXIT_INTERRUPTED
    # The reader closed the pipe, as `| head` does after its lines.
    except BrokenPipeError:
        drop_stdout()
        return EXIT_DONE
    # rich exits by itself when its pipe is closed.
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            return EXIT_DONE
        raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        drop_stdout()
        what, fix = f"the output cannot be written: {error.strerror}", "free some space, or redirect it"
        _print_error("error", str(Problem(code="output.disk-full", what=what, fix=fix)))
        return EXIT_FAILED
    return EXIT_DONE


def _print_error(label: str, text: str) -> None:
    from retrain.text.secrets import hide_text
    from retrain.text.terminal_text import printable  # only errors need these

    color = wants_color()
    click.secho(f"retrain: {label}", fg="red", bold=True, err=True, color=color)
    click.echo("\n".join(map(printable, hide_text(text).split("\n"))), err=True, color=color)


def _print_usage_error(error: click.ClickException) -> int:
    """Print a usage error of click in the format of all our errors."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    # A group without a command; by name, as click 8.1 does not have the class.
    if context and type(error).__name__ == "NoArgsIsHelpError":
        click.echo(context.get_help(), err=True, color=wants_color())
        return EXIT_USAGE
    path = context.command_path if context else "retrain"
    what, near = f"cannot be used: {' '.join(error.format_message().split())}", getattr(error, "possibilities", None)
    fix = f"use {near[0]}" if near else f"`{path} --help` lists its options"
    problem = Problem(code="usage.bad-arguments", where=path, what=what, fix=fix)
    if isinstance(error, click.NoSuchOption):
        problem = Problem(code="usage.unknown-option", where=path, what=f"no such option: {error.option_name}", fix=fix)
    _print_error("usage error", str(problem))
    return EXIT_USAGE


@click.command(
    "train",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]},
    epilog=TRAIN_EPILOG,
)
@quiet_option("Print only warnings, errors and the outcome.")
@config_argument()
@click.pass_obj
def train(plugins: Plugins, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Train with CONFIG (default: ./retrain.toml); `--kebab-case` flags override its keys."""
    # Imported here to keep the training loop out of help and completion.
    from retrain.run.collector import paused_collector

    with paused_collector():
        from retrain.run.configure import load_checked, refuse_defaults

        checked = load_checked(arguments, plugins, starts_run=True)
        refuse_defaults(checked.config, arguments)
        from retrain.observe.console.console import run_console
        from retrain.run.session import train as train_run  # only after the checks

        with run_console(plugins, is_quiet=is_quiet):
            train_run(checked, plugins)


MISSPELT = 0.8  # similarity above which a word counts as a misspelt option
DEFAULT_FILE = "retrain.toml"
HELP, VERSION = "--help", "--version"
HELP_FLAGS = ("-h", HELP)
SHELLS = ("bash", "zsh", "fish")
GROUPS = ("train", "look", "compare", "use", "extend", "tools")  # of `--help`; a plugin's command names its own
TEXT = """Train a language model with verifiable rewards, configured by one TOML file.

\b
  retrain                        train with ./retrain.toml
  retrain my.toml --lr 1e-4      train with my.toml and one value changed
  retrain init --template tiny   write a retrain.toml that trains in a minute
  retrain init --interactive     answer a few questions instead
  retrain help COMMAND           help and examples of a command
  retrain help CODE              what an error's [code] means

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
        about = "Show the version of each distribution and exit (with --json: as JSON)."
        self.params.append(click.Option([VERSION], is_flag=True, expose_value=False, help=about))
        about, shells = "Print the completion script of a shell and exit.", click.Choice(SHELLS)
        self.params.append(
            click.Option([COMPLETION], type=shells, expose_value=False, callback=_print_script, help=about)
        )

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
        """Add `train`, or the command that claims the file, where no command is given; `help X` means `X --help`."""
        first, *rest = args or [""]
        if first == "help":
            if rest and "." in rest[0]:
                # Imported here, because it reads the sources of all packages.
                from retrain.cli.manual.problems import explanation

                click.echo(explanation(rest[0]))
                ctx.exit()
            return self.parse_args(ctx, [*rest[:1], HELP])
        if first in PUBLIC_NAMES and not self.plugins.find(Kind.COMMAND, first):
            click.echo(f"retrain: `retrain {first}` is now `retrain {PUBLIC_NAMES[first]}`", err=True)
            return self.parse_args(ctx, [*PUBLIC_NAMES[first].split(), *rest])
        if first == VERSION:
            installed = {offer.distribution: offer.version for offer in offered_plugins() if offer.distribution}
            versions = {KERNEL: __version__} | {name: installed[name] for name in sorted(installed) if name != KERNEL}
            lines = [f"retrain {__version__}", *(f"{name} {versions[name]}" for name in list(versions)[1:])]
            click.echo(json.dumps(versions, indent=2) if "--json" in rest else "\n  ".join(lines))
            ctx.exit()
        asks = not args and not Path(DEFAULT_FILE).exists() and is_interactive()
        if asks and click.confirm(f"There is no {DEFAULT_FILE} in this folder. Create one now?", default=True):
            args = ["init", "--interactive"]
        elif first.partition("=")[0] not in (*HELP_FLAGS, COMPLETION) and not self.plugins.find(Kind.COMMAND, first):
            is_file = first.endswith(".toml") or (bool(first) and Path(first).exists())
            if args and not first.startswith("-") and not is_file:
                from retrain.cli.completion import refuse_misspelt  # only an error needs it

                refuse_misspelt(first, self.plugins)
            # Imported here, because `--help` and completion do not need it.
            from retrain.run.configure import claim_of
            from retrain.text.terminal_text import QUIET_FLAGS

            claim = claim_of([word for word in args if word not in QUIET_FLAGS], self.plugins)
            args = [claim.command if claim else TRAIN, *args]
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
                    # These import pydantic; a command that takes all keys has imported it already.
                    from retrain.kernel.config.load import all_keys
                    from retrain.run.tables import registered_tables

                    if flag not in {f"--{key.flag}" for key in all_keys(registered_tables(self.plugins))}:
                        raise click.NoSuchOption(flag, possibilities=near, ctx=click.Context(command, ctx, name))
        return name, command, rest


def _print_script(ctx: click.Context, option: click.Parameter, shell: str | None) -> None:
    if shell:  # click calls this for every command line
        from retrain.cli.completion import completion_protocol

        if protocol := completion_protocol(shell):
            click.echo(protocol.source(), nl=False)
            ctx.exit()
