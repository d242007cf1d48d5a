"""`retrain`: finds the command or the configuration that was meant, runs it, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from retrain import __version__
from retrain.errors import EXIT_DONE, EXIT_RESUMABLE, EXIT_USAGE, ConfigError, Problem, RetrainError
from retrain.loop.configure import claim_of
from retrain.loop.interrupts import StopRequested
from retrain.loop.lines import printable
from retrain.plugins.first_party import promised_names
from retrain.plugins.manager import Plugins, load_plugins
from retrain.plugins.resolve import resolve
from retrain.records.secrets import hide_text
from retrain.types import Kind

TRAIN = "train"
EXIT_INTERRUPTED = 130
HELP = """Train a language model with verifiable rewards, as one TOML file says.

\b
  retrain                        train as ./retrain.toml says
  retrain my.toml --lr 1e-4      train as my.toml says, with one value changed
  retrain init --template tiny   write a retrain.toml that learns in a minute

Every key of the file is a flag (`--seed 42`, `--gtpo-beta=0.2`); `retrain explain --keys` lists them all.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `retrain` script; leaves through `sys.exit` with the exit code of the outcome."""
    _prepare_process()
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Errors meant for users go to stderr without a traceback."""
    try:
        group = RetrainGroup(load_plugins())
        with group.make_context("retrain", arguments) as context:  # not `main`, which says 1 for a closed pipe
            group.invoke(context)
    except click.exceptions.Exit as wanted:
        return wanted.exit_code
    except RetrainError as error:
        click.secho(f"retrain: {error.label}", fg="red", bold=True, err=True)
        click.echo("\n".join(map(printable, hide_text(str(error)).split("\n"))), err=True)
        return error.exit_code
    except StopRequested as stop:
        click.echo(
            f"retrain: stopped by {stop.reason}; the state is saved, `retrain --resume RUN` continues it", err=True
        )
        return EXIT_RESUMABLE
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (KeyboardInterrupt, click.Abort):
        click.echo("retrain: interrupted", err=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    return EXIT_DONE


class RetrainGroup(click.Group):
    """Commands come from plugins; anything else in first place is a configuration to train."""

    def __init__(self, plugins: Plugins) -> None:
        super().__init__(name="retrain", help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
        self.plugins = plugins
        self.params.append(_version_option())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every registered command but `train`, which needs no name."""
        return [entry.spec.name for entry in self.plugins.registered(Kind.COMMAND) if entry.spec.name != TRAIN]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        ctx.obj = self.plugins
        if not self.plugins.find(Kind.COMMAND, cmd_name):
            return None
        command: click.Command = resolve(self.plugins, Kind.COMMAND, cmd_name, where="command line").target
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, from the one-line summaries: no command is imported for it."""
        rows = [(entry.spec.name, entry.spec.summary) for entry in self.plugins.registered(Kind.COMMAND)]
        with formatter.section("Commands"):
            formatter.write_dl([row for row in rows if row[0] != TRAIN])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`retrain`, `retrain FILE`, `retrain --flag ...` mean `train`, or who claims that file; `help` is `--help`."""
        first = args[0] if args else ""
        if first == "help":
            args = ["--help"]
        elif not first or (first not in ("-h", "--help", "--version") and not self.plugins.find(Kind.COMMAND, first)):
            if first and not first.startswith("-"):
                self._refuse_misspelt_command(first)
            claim = claim_of(args, self.plugins)
            args = [claim.command if claim else TRAIN, *args]
        return super().parse_args(ctx, args)

    def _refuse_misspelt_command(self, word: str) -> None:
        if word.endswith(".toml") or Path(word).exists():
            return
        known = self.list_commands(click.Context(self))
        if word in promised_names(Kind.COMMAND):
            raise ConfigError(
                Problem(
                    where="command line",
                    what=f"`retrain {word}` is not built in this version",
                    fix="see `retrain --help`",
                )
            )
        near = get_close_matches(word, known, n=1)
        fix = f"did you mean `retrain {near[0]}`?" if near else f"commands: {', '.join(known)}; or give a .toml file"
        raise ConfigError(Problem(where="command line", what=f"{word!r} is neither a command nor a file", fix=fix))


def _version_option() -> click.Parameter:
    def show(ctx: click.Context, _: click.Parameter, wanted: Any) -> None:
        if wanted and not ctx.resilient_parsing:
            click.echo(f"retrain {__version__}")
            ctx.exit()

    option = click.Option(["--version"], is_flag=True, expose_value=False, is_eager=True, callback=show)
    option.help = "Show the version and exit."
    return option


def _prepare_process() -> None:
    """What a script cannot do for us: the current folder on the path, `.env`, quiet libraries."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if Path(".env").is_file():
        from dotenv import load_dotenv

        try:
            load_dotenv(".env", override=False)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a value that no environment can hold
            click.echo(f"retrain: .env cannot be used: {error}\n    fix: make it UTF-8 lines of NAME=value", err=True)
            sys.exit(EXIT_USAGE)
        click.echo("Loaded .env", err=True)
    for name, value in (
        ("OMP_WAIT_POLICY", "PASSIVE"),  # two busy processes must not spin at each other's barriers
        ("TRANSFORMERS_VERBOSITY", "error"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("DATASETS_VERBOSITY", "error"),
        ("HF_DATASETS_DISABLE_PROGRESS_BARS", "1"),
    ):
        os.environ.setdefault(name, value)
