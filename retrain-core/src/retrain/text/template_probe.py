"""Probes a chat template for its switch for thoughts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Message
from retrain.text.chat import chat_text

SWITCHES = ("enable_thinking", "thinking")  # arguments that are true or false
QUESTION: Message = {"role": "user", "content": "Which number?"}


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
