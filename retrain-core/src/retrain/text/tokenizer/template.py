"""Chat templates that need nothing but the chat, compiled as `transformers` compiles them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "range"})
MESSAGE_KEYS = frozenset({"role", "content"})


def compiled(text: str, special: Iterable[str]) -> Template | None:
    """The template; None when it needs more than the chat and these special tokens, or is not a template."""
    from jinja2 import TemplateError, meta
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    try:
        needed = meta.find_undeclared_variables(environment.parse(text))
        return environment.from_string(text) if needed <= TEMPLATE_NAMES | set(special) else None
    except TemplateError:
        return None


def is_plain(conversation: Any) -> bool:
    """Whether a chat is a list of messages with a role and a content, both text, and nothing else."""
    return (
        isinstance(conversation, list)
        and bool(conversation)
        and all(
            type(message) is dict and message.keys() == MESSAGE_KEYS and all(type(t) is str for t in message.values())
            for message in conversation
        )
    )


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
