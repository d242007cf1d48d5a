"""`retrain --completion SHELL`: the completion script of a shell, and the completions that the script requests.

The script requests them by running `retrain` with `_RETRAIN_COMPLETE` set; click implements the shells' protocols.
"""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from retrain.cli.candidates import SHELLS, candidates
from retrain.kernel.errors import EXIT_DONE, EXIT_USAGE
from retrain.kernel.registry import Plugins

VARIABLE = "_RETRAIN_COMPLETE"


def print_script(ctx: click.Context, option: click.Parameter, shell: str | None) -> None:
    """Callback of `--completion SHELL`: print the script and exit."""
    if shell:
        click.echo(_protocol(shell).source(), nl=False)
        ctx.exit()


def answer(request: str, plugins: Plugins) -> int:
    """Print the completions; `request` is the value that the script put into the variable (`bash_complete`).

    Returns the exit code. It never fails loudly: pressing TAB must not show a traceback.
    """
    shell, _, action = request.partition("_")
    if shell not in SHELLS or action not in ("complete", "source"):
        return EXIT_USAGE
    protocol = _protocol(shell)
    if action == "source":
        click.echo(protocol.source(), nl=False)
        return EXIT_DONE
    try:
        words, typed = protocol.get_completion_args()
        found = candidates(plugins, words, typed)
    except Exception:  # a broken plugin or an open quote: nothing to offer
        return EXIT_DONE
    click.echo("\n".join(map(protocol.format_completion, found)))
    return EXIT_DONE


def _protocol(shell: str) -> ShellComplete:
    protocol = get_completion_class(shell)
    if protocol is None:
        raise click.UsageError(f"{shell!r} is not a shell that click supports")
    return protocol(click.Command("retrain"), {}, "retrain", VARIABLE)
