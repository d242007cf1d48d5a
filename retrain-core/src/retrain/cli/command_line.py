"""`retrain`: runs one command line, and turns failures into a message and an exit code; `train` is the default."""

from __future__ import annotations

import errno
import gc
import os
import shlex
import sys
from collections.abc import Sequence

import click

from retrain.cli.dispatch import VARIABLE, RetrainGroup
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
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.text.command_options import config_argument, quiet_option
from retrain.text.process import drop_stdout, prepare_process, prepare_streams, wants_color

EPILOG = """\b
Examples:
  retrain                               train with ./retrain.toml
  retrain my.toml --seed 42 --lr 1e-4   change two values
  retrain --set training.lr=1e-4        set a key by its table and name
  retrain my.toml -q > run.log          print only the outcome
  retrain --resume logs/train           continue a stopped run

`retrain explain --keys` lists every key, its flag and its default; `retrain explain CONFIG` shows what a run would do.

\b
Exit codes: 0 done; 1 the run failed; 2 usage or configuration error;
            75 stopped by a signal with its state saved, `--resume` continues it.
"""
EXIT_INTERRUPTED = 130
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `retrain` script; ends in `sys.exit`."""
    prepare_streams()
    request = os.environ.get(VARIABLE)  # a shell that asks for completions gets nothing else
    try:
        if prepare_process() and not request:
            click.echo("Loaded .env", err=True)
    except ConfigError as error:
        if not request:
            _print_error("config error", str(error))
            sys.exit(EXIT_USAGE)
    if request:
        from retrain.cli.completion import answer

        sys.exit(answer(request, load_plugins()))
    code = run(list(sys.argv[1:] if arguments is None else arguments))
    gc.freeze()  # spares the garbage collector a last pass over all live objects
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line; returns its exit code. Errors for users go to stderr without a traceback."""
    try:
        group = RetrainGroup(load_plugins())
        # not `group.main`, which exits with 1 on a closed pipe
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
    except BrokenPipeError:  # the reader (`| head`) is gone
        drop_stdout()
        return EXIT_DONE
    except SystemExit as leaving:  # rich's reaction to a closed pipe
        if isinstance(leaving.__context__, BrokenPipeError):
            return EXIT_DONE
        raise
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        drop_stdout()
        what = f"the output cannot be written: {error.strerror}"
        _print_error("error", str(Problem(what=what, fix="free some space, or redirect it")))
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
    if context and type(error).__name__ == "NoArgsIsHelpError":  # `retrain plugin` alone; by name: click 8.1 has none
        click.echo(context.get_help(), err=True, color=wants_color())
        return EXIT_USAGE
    path = context.command_path if context else "retrain"
    what, near = " ".join(error.format_message().split()), getattr(error, "possibilities", None)
    if isinstance(error, click.NoSuchOption):
        what = f"no such option: {error.option_name}"
    fix = f"use {near[0]}" if near else f"`{path} --help` shows what it takes"
    _print_error("usage error", str(Problem(where=path, what=what, fix=fix)))
    return EXIT_USAGE


@click.command(
    "train", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@quiet_option("Print only warnings, errors and the outcome.")
@config_argument()
@click.pass_obj
def train(plugins: Plugins, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Train with CONFIG (default: ./retrain.toml); `--kebab-case` flags override its keys."""
    from retrain.run.collector import paused_collector  # keeps the loop out of help and completion

    with paused_collector():
        from retrain.run.configure import load_checked, refuse_defaults

        checked = load_checked(arguments, plugins, starts_run=True)
        refuse_defaults(checked.config, arguments)
        from retrain.observe.console.console import run_console
        from retrain.run.session import train as train_run  # only after the checks

        with run_console(plugins, is_quiet=is_quiet):
            train_run(checked, plugins)
