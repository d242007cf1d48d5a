"""Turns tasks into prompts: usable examples, their tokens, the held-out split, the seeded order of training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.tasks import LoadedData, Prompt
from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Tokens, prefix_of
from retrain.tasks.scoring.build import uses_own_verifier
from retrain.text.chat import check_template_args, encode, prompt_text
from retrain.text.terminal_text import printable
from retrain.text.thinking import template_args
from retrain.text.tokenizer import fit_context

HEAD_CHARS = 60


@dataclass(slots=True)
class PromptPool:
    """Training prompts, shuffled again in each epoch, and the held-out ones."""

    train: Sequence[Prompt]
    held_out: Sequence[Prompt]
    seeds: Seeds

    def draw(self, cursor: int, count: int) -> list[Prompt]:
        order = order_from(self.seeds, len(self.train), cursor, count)
        return [replace(self.train[index], epoch=epoch) for index, epoch in order]


def order_from(seeds: Seeds, size: int, cursor: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield index and epoch of `count` prompts from position `cursor` of an endless sequence over a pool of `size`.

    The order depends only on the seed and the epoch, so a position is the same prompt whatever the batch size. A step
    takes a pool smaller than its batch more than once.
    """
    for epoch in range(cursor // size, (cursor + count - 1) // size + 1):
        order = seeds.stream("shuffle", epoch).permutation(size)
        start, end = max(cursor - epoch * size, 0), min(cursor + count - epoch * size, size)
        yield from ((int(index), epoch) for index in order[start:end])


def build_pool(
    data: LoadedData,
    config: Config,
    tokenizer: Any,
    seeds: Seeds,
    *,
    context_length: int | None = None,
    comparing: Collection[str] = (),
    is_environment: bool = False,
    task: str = "",
) -> tuple[PromptPool, tuple[str, ...]]:
    """Return the prompts of a run, and notes on the examples that were left out.

    First the unusable examples go (`usable_examples`), then the prompts that leave no room for an answer in
    `context_length` tokens; of the rest exactly `[eval] examples` are held out. `is_environment`: the tasks bring their
    own scoring, so they may need no reference. Ids begin with the name of the `task`. ConfigError when nothing is left.
    """
    examples, notes = usable_examples(data, config, comparing=comparing, is_environment=is_environment)
    examples = [replace(each, id=f"{prefix_of(task)}{each.id}") for each in examples] if task else examples
    notes += check_template_args(tokenizer, config)
    if config.environment.provider:
        from retrain.text.transcript import history_note  # only turns have a history

        notes += tuple(filter(None, [history_note(config, tokenizer)]))
    chats = sum(not isinstance(example.prompt, str) for example in examples)
    if chats and not is_environment and (config.data.system_prompt or config.data.instruction):
        notes += (f"{chats} prompts are whole chats: [data] system_prompt and instruction are not added to them",)
    encoded = encode_prompts(examples, tokenizer, config)
    kept, more = fit_context([len(tokens_T) for tokens_T in encoded], config, context_length)
    tokens_of = {examples[index].id: encoded[index] for index in kept}
    usable = [examples[index] for index in kept]
    train, held_out = split_examples(usable, config, seeds, by_text=not is_environment)
    sides = [[Prompt(example=e, tokens_T=tokens_of[e.id]) for e in side] for side in (train, held_out)]
    pool = PromptPool(train=tuple(sides[0]), held_out=tuple(sides[1]), seeds=seeds)
    notes, batch_size = (*notes, *more), config.training.batch_size
    if config.training.max_examples == 0 and (twins := len(usable) - len(train) - len(held_out)):
        notes += (f"{twins} training examples left out: a held-out one has the same prompt",)
    if len(train) < batch_size:
        notes += (f"{len(train)} training examples for batch_size = {batch_size}: a step uses some more than once",)
    return pool, notes


def usable_examples(
    data: LoadedData, config: Config, *, comparing: Collection[str] = (), is_environment: bool = False
) -> tuple[list[Example], tuple[str, ...]]:
    """Return the examples without repeats and without those that the rewards cannot score, and notes on both.

    `comparing` names the rewards in use that compare with the reference. ConfigError when different tasks have one id,
    when nothing is left, or when such a reward replaces a source's own verifier and references are missing. PluginError
    when the source gives something other than an Example.
    """
    source = config.data.source
    examples, repeated = _unique(data.examples, source)
    notes = [f"{source}: {repeated} repeated examples dropped"] if repeated else []
    without = [example for example in examples if not example.reference.strip()]
    if is_environment or uses_own_verifier(data, config) or not without:
        return examples, tuple(notes)
    head = f"{len(without)} of {len(examples)} examples have no reference answer (first: {_shown(without[0].id)})"
    names = sorted(comparing)
    if not names:  # a judge or the user's own function may need none
        return examples, (*notes, f"{source}: {head}")
    if data.reward is not None:
        where = config.place("reward.weights" if config.reward.weights else "reward.type")
        what = f"{names[0]!r} compares with the reference, and {head}"
        fix = f"remove it: data source {source!r} brings its own verifier"
        raise ConfigError(Problem(code="reward.needs-references", where=where, what=what, fix=fix))
    if len(without) == len(examples):
        fix = "give every task a reference, or use a [reward] that needs none"
        raise ConfigError(Problem(code="data.no-references", where=config.place("data.source"), what=head, fix=fix))
    left = [example for example in examples if example.reference.strip()]
    return left, (*notes, f"{source}: {head}: left out, since {names[0]!r} would score silence as correct")


def _unique(examples: Sequence[Example], source: str) -> tuple[list[Example], int]:
    unique: dict[str, Example] = {}
    repeated = 0
    for number, example in enumerate(examples):
        if not _is_example(example):
            what = f"example {number} of data source {source!r} is not an Example: {_shown(repr(example))}"
            why = "its id and reference are text, its prompt is text or messages with role and content"
            fix = "repair the plugin that brings it"
            raise PluginError(Problem(code="data.not-an-example", where="[data] source", what=what, why=why, fix=fix))
        first = unique.setdefault(example.id, example)
        if first is example:
            continue
        contents = [(prompt_text(e), e.reference, e.task, dict(e.info)) for e in (first, example)]
        if contents[0] != contents[1]:
            what = f"two different examples have the id {_shown(example.id)}"
            why = f"{_shown(prompt_text(first))!r} and {_shown(prompt_text(example))!r}"
            fix = "give every task its own id: the held-out split and the records go by it"
            where = f"data source {source!r}"
            raise ConfigError(Problem(code="data.id-twice", where=where, what=what, why=why, fix=fix))
        repeated += 1
    return list(unique.values()), repeated


def _is_example(value: object) -> bool:
    if not isinstance(value, Example) or not isinstance(value.id, str) or not isinstance(value.reference, str):
        return False
    chat = value.prompt
    is_chat = isinstance(chat, Sequence) and bool(chat) and all(isinstance(message, Mapping) for message in chat)
    is_prompt = isinstance(chat, str) or (is_chat and all({"role", "content"} <= {*message} for message in chat))
    return bool(value.id) and is_prompt


def _shown(text: str) -> str:
    return printable(text[:HEAD_CHARS])


def split_examples(
    examples: Sequence[Example], config: Config, seeds: Seeds, *, by_text: bool = True
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Return training and held-out examples: no example, and no prompt text, is on both sides.

    Without `by_text` prompts may repeat: an environment often opens all its episodes with the same words. The held-out
    examples are those with the smallest keyed hash of their id, so the split depends only on `[eval] seed` and the ids,
    not on their order or the run's seed. `[eval] skip` keeps the first of them out of both sides: a tuning run skips
    the held-out examples of the final runs. `max_examples` then keeps a seeded sample of the training side.
    """
    if not examples:
        what, fix = "the data source gave no examples", "check its options"
        raise ConfigError(Problem(code="data.no-examples", where=config.place("data.source"), what=what, fix=fix))
    wanted, split = config.eval.examples, Seeds(config.eval.seed)
    # A keyed hash per id, and no shuffle: an example that is added or removed moves no other one across the split.
    ranked = sorted(examples, key=lambda example: split.derive("held-out", example.id)) if wanted else []
    skip = config.eval.skip
    held_out = tuple(ranked[skip : skip + wanted])
    held_ids = {example.id for example in ranked[: skip + wanted]}
    held_texts = {prompt_text(example) for example in ranked[: skip + wanted]} if by_text else set()
    train = [e for e in examples if e.id not in held_ids and prompt_text(e) not in held_texts]
    if not train:
        what = f"with {skip + wanted} held-out examples none of the {len(examples)} is left to train on"
        where, fix = config.place("eval.examples"), "lower it, or use more data"
        raise ConfigError(Problem(code="eval.too-many-examples", where=where, what=what, fix=fix))
    limit = config.training.max_examples
    if 0 < limit < len(train):
        order = seeds.stream("max_examples").permutation(len(train))[:limit]
        # Back in the source's order, so that only the choice depends on the seed.
        train = [train[index] for index in sorted(order)]
    return tuple(train), held_out


def encode_prompts(examples: Sequence[Example], tokenizer: Any, config: Config) -> list[Tokens]:
    """Return the token ids of the prompts; ConfigError names an example that template or tokenizer refuses."""
    chats = [chat_of(example, config) for example in examples]
    ids = encode(chats, tokenizer, template_args(config, tokenizer), names=[example.id for example in examples])
    return [np.asarray(row, dtype=np.int64) for row in ids]


def chat_of(example: Example, config: Config) -> list[Mapping[str, Any]]:
    """Return the prompt as a chat: a text with the system prompt and the instruction of `[data]`, a chat unchanged."""
    if not isinstance(example.prompt, str):
        return [dict(message) for message in example.prompt]
    parts = [example.prompt, config.data.instruction]
    user = {"role": "user", "content": "\n".join(part for part in parts if part)}
    system = config.data.system_prompt
    return [{"role": "system", "content": system}, user] if system else [user]
