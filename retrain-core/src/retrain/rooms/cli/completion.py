"""`retrain completion SHELL`: the script that a shell needs to complete our command line, and the answers it asks for.

The script asks by running `retrain` with `_RETRAIN_COMPLETE` set; the protocols of the shells are click's.
"""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

from retrain.kernel.errors import EXIT_DONE, EXIT_USAGE
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.cli.candidates import candidates

ASKED = "_RETRAIN_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
EPILOG = """\b
Install it, for new shells, with the line of yours:
  bash   echo 'eval "$(retrain completion bash)"' >> ~/.bashrc
  zsh    echo 'eval "$(retrain completion zsh)"' >> ~/.zshrc     (after compinit)
  fish   retrain completion fish > ~/.config/fish/completions/retrain.fish

\b
Examples of what it completes:
  retrain --trans<TAB>                 the flags of every key
  retrain --transform-mode <TAB>       the names that are installed
  retrain init --template <TAB>        the templates

\b
Exit codes: 0 done; 2 usage error.
"""


@click.command("completion", epilog=EPILOG)
@click.argument("shell", type=click.Choice(SHELLS))
def command(shell: str) -> None:
    """Print the completion script of SHELL: commands, files, flags of every key, and their values."""
    click.echo(_protocol(shell).source(), nl=False)


def answer(question: str, plugins: Plugins) -> int:
    """Print what may be typed next; `question` is what the script put into the variable (`bash_complete`).

    Returns the exit code. An answer never fails aloud: whoever presses TAB must not see a traceback.
    """
    shell, _, wanted = question.partition("_")
    if shell not in SHELLS or wanted not in ("complete", "source"):
        return EXIT_USAGE
    protocol = _protocol(shell)
    if wanted == "source":
        click.echo(protocol.source(), nl=False)
        return EXIT_DONE
    try:
        words, typed = protocol.get_completion_args()
        found = candidates(plugins, words, typed)
    except Exception:  # a broken plugin, a half-typed quote: there is nothing to offer
        return EXIT_DONE
    click.echo("\n".join(map(protocol.format_completion, found)))
    return EXIT_DONE


def _protocol(shell: str) -> ShellComplete:
    protocol = get_completion_class(shell)
    if protocol is None:
        raise click.UsageError(f"{shell!r} is no shell that click knows")
    return protocol(click.Command("retrain"), {}, "retrain", ASKED)
