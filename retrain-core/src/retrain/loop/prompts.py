"""Tasks become prompts: held-out split, seeded order, and the tokens that the policy is asked with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.config.resolved import Config
from retrain.errors import ConfigError, Problem
from retrain.seeding import Seeds
from retrain.types import Example, Message, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """An example together with its tokens; `epoch` counts the passes over the pool before it was drawn."""

    example: Example
    tokens_T: Tokens
    epoch: int = 0


@dataclass(slots=True)
class PromptPool:
    """Training prompts in a seeded order that is new in each epoch, and the held-out ones.

    The order depends on the seed and the epoch only; position `cursor` of the endless sequence is the same whatever
    the batch size.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    seeds: Seeds

    def draw(self, cursor: int, count: int) -> list[Prompt]:
        """The `count` prompts from position `cursor` on."""
        size = len(self.train)
        drawn = []
        for epoch in range(cursor // size, (cursor + count - 1) // size + 1):
            order = self.seeds.stream("shuffle", epoch).permutation(size)
            start, end = max(cursor - epoch * size, 0), min(cursor + count - epoch * size, size)
            for index in order[start:end]:
                prompt = self.train[index]
                drawn.append(Prompt(example=prompt.example, tokens_T=prompt.tokens_T, epoch=epoch))
        return drawn


def split_examples(
    examples: Sequence[Example], config: Config, seeds: Seeds
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Training and held-out examples: no example, and no prompt text, is on both sides.

    Held-out examples are those with the smallest keyed hash of their id, so the split depends on `[eval] seed` and
    the ids alone, not on order or run seed. `max_examples` then keeps a seeded sample of the training side.
    """
    unique = {example.id: example for example in examples}
    if not unique:
        raise ConfigError(
            Problem(where=config.place("data.source"), what="the data source gave no examples", fix="check its options")
        )
    wanted = config.eval.examples
    if wanted >= len(unique):
        what = f"{wanted} held-out examples wanted, but the data source has {len(unique)}"
        raise ConfigError(Problem(where=config.place("eval.examples"), what=what, fix="lower it, or use more data"))
    split = Seeds(config.eval.seed)
    ranked = sorted(unique.values(), key=lambda example: split.derive("held-out", example.id))
    held_out = tuple(ranked[:wanted])
    held_prompts = {str(example.prompt) for example in held_out}
    train = [example for id_, example in unique.items() if id_ not in {e.id for e in held_out}]
    train = [example for example in train if str(example.prompt) not in held_prompts]
    if not train:
        what = "no training example is left beside the held-out ones"
        raise ConfigError(Problem(where=config.place("eval.examples"), what=what, fix="lower it, or use more data"))
    limit = config.training.max_examples
    if 0 < limit < len(train):
        order = seeds.stream("max_examples").permutation(len(train))[:limit]
        train = [train[index] for index in sorted(order)]
    return tuple(train), held_out


def encode_prompt(example: Example, tokenizer: Any, config: Config) -> Tokens:
    """Token ids of an example's prompt, through the chat template where the tokenizer has one.

    A plain prompt gets the system prompt and the instruction of `[data]`; a chat is used as it is.
    """
    messages = list(_messages(example, config))
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(message["content"] for message in messages)
    ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return np.asarray(ids, dtype=np.int64)


def _messages(example: Example, config: Config) -> Sequence[Message]:
    if not isinstance(example.prompt, str):
        return [dict(message) for message in example.prompt]
    parts = [example.prompt, config.data.instruction]
    user = {"role": "user", "content": "\n".join(part for part in parts if part)}
    system = config.data.system_prompt
    return [{"role": "system", "content": system}, user] if system else [user]
