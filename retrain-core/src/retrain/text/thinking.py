"""Separates a completion's thought from its answer by the tags of the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Tokens

# Opening tag, closing tag, and the text that a thought cut short gets before the closing one.
TAGS = (
    ("<think>", "</think>", ""),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|><|start|>assistant"),
    ("◁think▷", "◁/think▷", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<seed:think>", "</seed:think>", ""),
)
TAIL = 32  # tokens of a prompt's end in which an opening tag is looked for


class Thought(NamedTuple):
    """A thought and its answer, without tags; an answer is empty while the thought `is_open`."""

    reasoning: str
    answer: str
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Thinking:
    """The tags of a model, empty without thoughts; `cut` closes a thought. Rewards see all with `sees_all`."""

    tokenizer: Any
    opening: str = ""
    closing: str = ""
    cut: str = ""
    sees_all: bool = False

    def split(self, prompt_T: Tokens, tokens_T: Tokens) -> Thought | None:
        """Return the thought in the tokens sampled after a prompt, up to the last closing tag; None without one."""
        if not self.opening:
            return None
        text = decoded(self.tokenizer, tokens_T)
        before, closing, after = text.rpartition(self.closing)
        if self.opening in after or (not closing and self.is_open(prompt_T)):
            return Thought(self._plain(text), "", True)
        return Thought(self._plain(before), self._plain(after), False) if closing else None

    def is_open(self, prompt_T: Tokens) -> bool:
        """True if the prompt ends with an opening tag."""
        return bool(self.opening) and decoded(self.tokenizer, prompt_T[-TAIL:]).rstrip().endswith(self.opening)

    def seen(self, text: str, thought: Thought | None) -> str:
        """Return the part of a text that rewards and environments see."""
        return text if thought is None or self.sees_all else thought.answer

    def _plain(self, text: str) -> str:
        for tag in (self.cut.removesuffix(self.closing), self.opening, self.closing):
            text = text.replace(tag, "") if tag else text
        special = [str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return re.sub("|".join(map(re.escape, special)), "", text).strip() if special else text.strip()


def decoded(tokenizer: Any, tokens_T: Tokens) -> str:
    """Return the text of these tokens as it is, special ones included."""
    return str(tokenizer.decode(tokens_T, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def thinking_of(config: Config, tokenizer: Any) -> Thinking:
    """Return the tags that the chat template writes; without one, those that are single tokens."""
    template, sees_all = str(getattr(tokenizer, "chat_template", None) or ""), config.reward.sees == "all"
    known = [tags for tags in TAGS if tags[0] in template or tags[1] in template]
    if not known:
        added: Mapping[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
        known = [tags for tags in TAGS if added.keys() >= {tags[0], tags[1]}]
    if not known:
        return Thinking(tokenizer=tokenizer)
    opening, closing, before = known[0]
    return Thinking(tokenizer=tokenizer, opening=opening, closing=closing, cut=before + closing, sees_all=sees_all)


def template_args(config: Config, tokenizer: Any) -> Mapping[str, Any]:
    """Return `[data] template_args`, with this template's switch for `[data] thinking`."""
    if config.data.thinking == "template":
        return config.data.template_args
    from retrain.text.template_probe import switched  # most runs leave it to the template

    return switched(config, tokenizer)
