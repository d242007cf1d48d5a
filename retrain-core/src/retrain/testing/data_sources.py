"""The suite of data sources: tasks with stable ids, in a fixed order, that fit the model's chat template."""

from __future__ import annotations

from collections import Counter
from typing import Any

from retrain.kernel.contracts.tasks import LoadedData
from retrain.kernel.types import Example
from retrain.tasks.prompts import encode_prompts
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_json
from retrain.testing.rewards import ANSWERS, expect_gold, expect_sound
from retrain.testing.toys import MAX_EXAMPLES, as_text

MAX_ENCODED = 200


def gives_examples(bench: Bench) -> None:
    """`load` returns LoadedData with at least one Example, and notes that are text."""
    data = _load(bench)
    expect_examples(data)
    expect(
        all(isinstance(note, str) for note in data.notes),
        "LoadedData.notes holds something other than text",
        why="they are printed, line by line",
        fix="make them text",
    )


def names_examples_for_good(bench: Bench) -> None:
    """Ids are unique texts, and a second load returns the same ones in the same order."""
    first, again = _load(bench), _load(bench)
    expect_unique_ids(first)
    expect(
        as_text(first.examples) == as_text(again.examples),
        "a second load returned different examples or ids, or another order",
        why="a resumed run continues in the middle of this order, and held-out examples are chosen by id",
        fix="sort what you read, seed what you generate, and derive ids from the content",
    )


def holds_plain_data(bench: Bench) -> None:
    """`info` and chats are JSON: text, numbers, lists and dictionaries."""
    expect_plain_examples(_load(bench).examples)


def can_be_put_to_the_model(bench: Bench) -> None:
    """The tokenizer and its chat template accept the prompts, and none of them is empty."""
    examples = _load(bench).examples[:MAX_ENCODED]
    for example in examples:
        for message in () if isinstance(example.prompt, str) else example.prompt:
            expect(
                isinstance(message.get("role"), str) and ("content" in message or "tool_calls" in message),
                f"example {example.id!r} has the message {message!r:.100}",
                why="chat templates render such a message differently",
                fix='give each message {"role": "user", "content": "..."}',
            )
    encoded = encode_prompts(examples, bench.tokenizer, bench.config)
    for example, tokens_T in zip(examples, encoded, strict=True):
        why, fix = "there is nothing to answer", "omit such examples from load() and say so in its notes"
        expect(len(tokens_T) > 0, f"the prompt of example {example.id!r} has no tokens", why=why, fix=fix)


def brings_a_sound_verifier(bench: Bench) -> None:
    """Its own reward, if any, works in a scoring process and scores its own gold answers as correct."""
    data = _load(bench)
    if data.reward is None:
        return
    examples = data.examples[:MAX_EXAMPLES]
    expect_sound(bench, data.reward, [(example, answer) for example in examples for answer in ANSWERS])
    expect_gold(bench, data.reward, examples)


def expect_examples(data: Any) -> None:
    why, fix = "a run reads .examples, .notes and .reward", "return retrain.api.LoadedData(examples=tuple(...))"
    expect(isinstance(data, LoadedData), f"load() returned {type(data).__name__}", why=why, fix=fix)
    why, fix = "there is nothing to train on", "return one or more"
    expect(len(data.examples) > 0, "load() returned no examples", why=why, fix=fix)
    for example in data.examples:
        expect(
            isinstance(example, Example) and isinstance(example.reference, str),
            f"{example!r:.200} is not an Example with a text as its reference",
            why="prompts, references and ids are read from it",
            fix="make retrain.api.Example(id=..., prompt=..., reference=...) of each task",
        )


def expect_unique_ids(data: LoadedData) -> None:
    counts = Counter(example.id for example in data.examples)
    bad = [name for name, count in counts.items() if count > 1 or not isinstance(name, str) or not name]
    why = "held-out splits, comparisons and the records of a run go by the id"
    fix = "derive the id from the task's content, for example with a hash"
    expect(not bad, f"{len(bad)} ids are shared by several examples, empty, or not text: {bad[:3]}", why=why, fix=fix)


def expect_plain_examples(examples: tuple[Example, ...]) -> None:
    """Expect info and chats to survive a JSON round trip."""
    for example in examples:
        for what, value in (("prompt", example.prompt), ("info", dict(example.info))):
            expect_json(
                value,
                f"{what} of example {example.id!r}",
                why="examples travel to other processes and into records",
                fix="convert arrays, dates and numbers of other libraries to plain Python ones",
            )


def _load(bench: Bench) -> LoadedData:
    data: LoadedData = bench.build().load()
    return data
