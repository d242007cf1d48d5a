"""What a command must do before it runs: explain itself, and refuse unknown flags."""

from __future__ import annotations

import click
from click.testing import CliRunner

from retrain.kernel.errors import EXIT_DONE, EXIT_USAGE
from retrain.testing.bench import Bench
from retrain.testing.check import expect

HELP_FLAGS = ["-h", "--help"]  # as `retrain` has them: click keeps the first names that a process asks for
UNKNOWN_FLAG = "--no-such-flag-of-this-command"


def is_a_click_command(bench: Bench) -> None:
    """The factory is a `click.Command`."""
    command = bench.found.target
    expect(
        isinstance(command, click.Command),
        f"the factory is {type(command).__name__}",
        why="`retrain NAME ...` hands the arguments to it",
        fix="decorate the function with @click.command() and register it, not its result",
    )


def explains_itself(bench: Bench) -> None:
    """`retrain NAME --help` says what it does and exits with 0."""
    command = bench.found.target
    outcome = CliRunner().invoke(command, ["--help"], obj=bench.plugins, help_option_names=HELP_FLAGS)
    expect(
        outcome.exit_code == EXIT_DONE and bool((command.help or "").strip()),
        f"--help ended with {outcome.exit_code}: {outcome.output[-300:]}{outcome.exception or ''}",
        why="this is where a user looks first",
        fix="give the function a docstring",
    )


def documents_its_options(bench: Bench) -> None:
    """Every option has a help text."""
    bare = [
        "/".join(option.opts)
        for option in bench.found.target.params
        if isinstance(option, click.Option) and not option.hidden and not (option.help or "").strip()
    ]
    expect(
        not bare,
        f"no help for {', '.join(bare)}",
        why="`--help` and the manual show it",
        fix='give click.option(..., help="...")',
    )


CAPTURE_ALL = ("ignore_unknown_options", "allow_extra_args")


def refuses_unknown_flags(bench: Bench) -> None:
    """A misspelt flag is a usage error, unless the command passes its arguments on."""
    command = bench.found.target
    if isinstance(command, click.Group) or any(command.context_settings.get(name) for name in CAPTURE_ALL):
        return
    outcome = CliRunner().invoke(command, [UNKNOWN_FLAG], obj=bench.plugins, help_option_names=HELP_FLAGS)
    expect(
        outcome.exit_code == EXIT_USAGE,
        f"{UNKNOWN_FLAG} ended with {outcome.exit_code}",
        why="what is misspelt must not be ignored",
        fix="let click parse the arguments",
    )


COMMAND = (is_a_click_command, explains_itself, documents_its_options, refuses_unknown_flags)
