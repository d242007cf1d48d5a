"""`retrain chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import suppress

import click

from retrain.kernel.registry import Plugins
from retrain.run.opened import opened
from retrain.run.subject import find_subject
from retrain.text.command_options import checkpoint_option, overrides_argument, subject_argument
from retrain.text.process import is_interactive

EPILOG = """\b
Examples:
  retrain chat logs/train
  retrain chat logs/train --compare base
  retrain chat logs/train --checkpoint best --temperature 0.7 --max-tokens 1024
  echo "What is 17 + 25?" | retrain chat builtin:tiny --greedy

\b
Exit codes: 0 done; 1 failed; 2 usage or configuration error.
"""


@click.command("chat", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@subject_argument()
@overrides_argument()
@checkpoint_option()
@click.option("--compare", metavar="NAME", default="", help="Also answer with this one: base, best, a run, an adapter.")
@click.option("--greedy", is_flag=True, help="Take the likeliest token each time.")
@click.option("--plain", is_flag=True, help="Without the system prompt and the instruction of training.")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    subject: str,
    overrides: tuple[str, ...],
    checkpoint: str,
    compare: str,
    greedy: bool,
    plain: bool,
) -> None:
    """Talk to SUBJECT: a run, an adapter, or a model.

    Answers appear while they are sampled; /help lists what else can be typed, such as /compare, /entropy and /credit. A
    line that ends with a backslash continues on the next one. Without a terminal, each line of stdin is a turn."""
    from retrain.use.chat import Conversation

    policy = find_subject(subject, checkpoint)
    with opened(policy, plugins, overrides) as source:
        conversation = Conversation(source, plain=plain)
        conversation.introduce()
        if greedy:
            conversation.hear("/temperature 0")
        if compare:
            conversation.compare(compare)
        while (typed := _read()) is not None and conversation.hear(typed):
            pass


def _read() -> str | None:
    parts: list[str] = []
    has_terminal = is_interactive()
    if has_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history and keys to edit with
    try:
        while True:
            line = input(". " if parts else "> ") if has_terminal else sys.stdin.readline()
            if not has_terminal and not line:
                return "\n".join(parts) or None
            line = line.rstrip("\r\n")
            parts.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                return "\n".join(parts)
    except (EOFError, KeyboardInterrupt) as error:
        click.echo()
        return "\n".join(parts) or None if isinstance(error, EOFError) else None
