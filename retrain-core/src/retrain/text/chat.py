"""Turns messages into the text and the tokens that the policy sees, through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Example, Message
from retrain.text.terminal_text import printable

# Texts in one call of the tokenizer: half the time of one by one.
BATCH = 1000
THOUGHT_FIELDS = ("reasoning_content", "thinking")  # of a message, as templates read its thought
# Arguments of `apply_chat_template` itself, in any version; all others are passed to the template.
OWN_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)


def chat_text(
    messages: Sequence[Message],
    tokenizer: Any,
    template_args: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The chat as text, up to the assistant's answer; without a template, the contents, one per line.

    Exceptions of the template ("roles must alternate") pass through, and ValueError for tool calls without a name.
    """
    if not tokenizer.chat_template:
        return "\n".join(str(message.get("content") or "") for message in messages)
    text = tokenizer.apply_chat_template(
        [_with_plain_calls(message) for message in messages],
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=True,
        **(template_args or {}),
    )
    return str(text)


def encode(
    chats: Sequence[Sequence[Message]], tokenizer: Any, template_args: Mapping[str, Any], *, names: Sequence[str]
) -> list[list[int]]:
    """Token ids of chats; ConfigError names the example that cannot be rendered or tokenised."""
    texts = [_rendered(chat, tokenizer, template_args, name) for chat, name in zip(chats, names, strict=True)]
    # A template writes its special tokens itself.
    special = not tokenizer.chat_template
    ids: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        try:
            ids += tokenizer(some, add_special_tokens=special, verbose=False)["input_ids"]  # `fit_context` warns
        except Exception:  # find the text: each library has its own error for half a surrogate pair
            ids += [_ids(t, tokenizer, special, n) for t, n in zip(some, names[start : start + BATCH], strict=True)]
    return ids


def as_chat(value: Any) -> list[Mapping[str, Any]]:
    """Messages with a role and a text, one string or text parts, absent only next to tool calls; otherwise []."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return []
    found: list[Mapping[str, Any]] = []
    for message in value:
        content, role = message.get("content"), message.get("role")
        if content is None and message.get("tool_calls"):
            content = ""
        if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(role, str) or not isinstance(content, str):
            return []
        found.append({**message, "role": role, "content": content})
    return found


def check_template_args(tokenizer: Any, config: Config) -> tuple[str, ...]:
    """Notes on `[data] template_args` that the template does not read; ConfigError on those that retrain sets itself.

    A template ignores unknown names, so a misspelt one would go unnoticed.
    """
    arguments = config.data.template_args
    where = config.place("data.template_args")
    problems = [
        Problem(
            code="data.template-argument", where=where, what=f"{name!r} is set by retrain itself", fix=f"remove {name}"
        )
        for name in sorted(OWN_ARGUMENTS & arguments.keys())
    ]
    if problems:
        raise ConfigError(*problems)
    if arguments and not tokenizer.chat_template:
        return (f"{where}: {config.model.model} has no chat template, so they are not used",)
    words = set(re.findall(r"\w+", str(tokenizer.chat_template)))
    near = {name: get_close_matches(name, words, n=1) for name in arguments if name not in words}
    hints = {name: f"; did you mean {found[0]!r}?" if found else "" for name, found in near.items()}
    return tuple(f"{where}: the chat template does not read {printable(name)!r}{hint}" for name, hint in hints.items())


def prompt_text(example: Example) -> str:
    """Equal for equal prompts: the text, or the content of the chat."""
    if isinstance(example.prompt, str):
        return example.prompt
    return repr([sorted(message.items(), key=lambda item: item[0]) for message in example.prompt])


def _with_plain_calls(message: Message) -> dict[str, Any]:
    """A copy of a message; tool calls get the form that templates expect, and a content."""
    if not message.get("tool_calls"):
        return dict(message)
    from retrain.text.tool_calls import plain_tool_calls

    calls = plain_tool_calls(message["tool_calls"])
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _rendered(messages: Sequence[Message], tokenizer: Any, template_args: Mapping[str, Any], name: str) -> str:
    try:
        return chat_text(messages, tokenizer, template_args)
    except Exception as error:  # templates raise any error: roles that must alternate, no system message, ...
        where, what = f"example {printable(name)}", f"the chat template refuses the prompt: {_shown(error)}"
        fix = "change the roles of the chat, [data] system_prompt or template_args"
        raise ConfigError(Problem(code="data.template-refuses", where=where, what=what, fix=fix)) from error


def _ids(text: str, tokenizer: Any, special: bool, name: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    except Exception as error:
        where, what = f"example {printable(name)}", f"the tokenizer refuses the prompt: {_shown(error)}"
        fix = "repair the text; half a surrogate pair is the usual cause"
        raise ConfigError(Problem(code="data.tokenizer-refuses", where=where, what=what, fix=fix)) from error


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(str(error))[:300]}"
