"""Probes a chat template: its switch for thoughts, and whether a new turn changes earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Message
from retrain.text.chat import THOUGHT_FIELDS, chat_text

SWITCHES = ("enable_thinking", "thinking")  # arguments that are true or false
QUESTION: Message = {"role": "user", "content": "Which number?"}
ANSWERED, THOUGHT = "Seven.", "Hm."


def switched(config: Config, tokenizer: Any) -> dict[str, Any]:
    """Return `[data] template_args` with the switch for `[data] thinking`; ConfigError if there is none."""
    given = config.data.template_args
    for name in SWITCHES:
        on, off = ({**given, name: value} for value in (True, False))
        if _rendered(tokenizer, on) != _rendered(tokenizer, off):
            return on if config.data.thinking == "on" else off
    what = f"the chat template of {config.model.model} has no switch for thoughts"
    why = f"it writes the same prompt whether {' or '.join(SWITCHES)} is true or false"
    fix = 'set thinking = "template", and set a key that the template reads, such as reasoning_effort, in template_args'
    where = config.place("data.thinking")
    raise ConfigError(Problem(code="data.no-thinking-switch", where=where, what=what, why=why, fix=fix))


def _rendered(tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    try:
        return chat_text([QUESTION], tokenizer, arguments)
    except Exception:  # templates raise any error; a prompt that is refused is reported with its example
        return ""


def history_note(config: Config, tokenizer: Any, arguments: Mapping[str, Any], *, thinks: bool) -> str:
    """Return one line if a new turn changes the earlier ones, whose sampled tokens are kept; empty otherwise."""
    if config.environment.history == "rows" or not tokenizer.chat_template:
        return ""
    answer = {"role": "assistant", "content": ANSWERED, **dict.fromkeys(THOUGHT_FIELDS, THOUGHT)}
    try:
        first = chat_text([QUESTION], tokenizer, arguments)
        later = chat_text([QUESTION, answer, QUESTION], tokenizer, arguments)
    except Exception:  # it may want other roles; the environment's own messages are rendered later
        return ""
    drops = thinks and config.data.thinking != "off" and THOUGHT not in later
    if later.startswith(first) and not drops:
        return ""
    what = "drops earlier thoughts" if drops else "changes earlier text"
    kept = 'the policy still sees the tokens that it sampled; [environment] history = "rows" makes each turn a row'
    if config.environment.provider == "agent":  # whose own program keeps the conversation
        kept = "calls that it changes are separate rows"
    return f"the chat template {what} when a turn is added: {kept}"
