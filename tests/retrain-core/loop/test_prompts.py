"""Which tasks are trained on and in which order; which are held out; how a task becomes tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from retrain.config.resolved import Config
from retrain.config.schema import DataTable, EvalTable, TrainingTable
from retrain.errors import ConfigError
from retrain.loop.prompts import Prompt, PromptPool, encode_prompt, split_examples
from retrain.seeding import Seeds
from retrain.types import Example


def make_pool(size: int, root: int = 0) -> PromptPool:
    """A pool of `size` prompts."""
    prompts = [
        Prompt(example=Example(id=f"e{i}", prompt="p", reference=""), tokens_T=np.array([i])) for i in range(size)
    ]
    return PromptPool(train=tuple(prompts), held_out=(), seeds=Seeds(root))


def ids(prompts: list[Prompt]) -> list[tuple[str, int]]:
    """What was drawn."""
    return [(prompt.example.id, prompt.epoch) for prompt in prompts]


@settings(max_examples=60)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_the_order_does_not_depend_on_the_batch_size(size: int, batches: list[int], root: int) -> None:
    pool, cursor, drawn = make_pool(size, root), 0, []
    for count in batches:
        drawn += ids(pool.draw(cursor, count))
        cursor += count
    assert drawn == ids(pool.draw(0, cursor))
    assert len(drawn) == cursor


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(0, 50))
def test_every_epoch_holds_each_task_once(size: int, epoch: int) -> None:
    drawn = ids(make_pool(size).draw(epoch * size, size))
    assert Counter(drawn) == Counter((f"e{i}", epoch) for i in range(size))


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    orders = [
        tuple(name for name, _ in ids(make_pool(20, root).draw(20 * e, 20))) for root in range(3) for e in range(3)
    ]
    assert len(set(orders)) == 9


def config(**tables: Any) -> Config:
    """A configuration of these tables."""
    return Config(tables=tables)


def examples(*prompts: str) -> list[Example]:
    """Tasks with these prompts and ids e0, e1, ..."""
    return [Example(id=f"e{i}", prompt=prompt, reference="") for i, prompt in enumerate(prompts)]


@settings(max_examples=80)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=20), st.data())
def test_no_task_and_no_prompt_text_is_on_both_sides(prompts: list[str], data: st.DataObject) -> None:
    tasks = examples(*prompts)
    wanted = data.draw(st.integers(1, len(tasks) - 1))
    seed = data.draw(st.integers(0, 5))
    try:
        train, held_out = split_examples(tasks, config(eval=EvalTable(examples=wanted, seed=seed)), Seeds(0))
    except ConfigError:  # every prompt text that is left is held out too
        reject()
    assert len(held_out) == wanted
    assert train
    assert not {e.id for e in train} & {e.id for e in held_out}
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert {e.id for e in (*train, *held_out)} <= {e.id for e in tasks}


@settings(max_examples=30)
@given(st.permutations(range(12)), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_held_out_tasks_depend_on_ids_and_the_seed_of_the_split_alone(order: list[int], seed: int, root: int) -> None:
    tasks = examples(*"abcdefghijkl")
    settings_ = config(eval=EvalTable(examples=4, seed=seed))
    _, expected = split_examples(tasks, settings_, Seeds(0))
    _, found = split_examples([tasks[i] for i in order], settings_, Seeds(root))
    assert [e.id for e in found] == [e.id for e in expected]


def test_another_seed_of_the_split_holds_out_others() -> None:
    tasks = examples(*map(str, range(60)))
    found = {
        frozenset(e.id for e in split_examples(tasks, config(eval=EvalTable(examples=10, seed=s)), Seeds(0))[1])
        for s in range(5)
    }
    assert len(found) == 5


def test_a_task_given_twice_counts_once() -> None:
    train, held_out = split_examples(examples("a", "b") + examples("a", "b"), config(), Seeds(0))
    assert [e.id for e in train] == ["e0", "e1"]
    assert held_out == ()


def test_chats_are_compared_by_their_content() -> None:
    chat = [{"role": "user", "content": "same"}]
    tasks = [Example(id=f"e{i}", prompt=list(chat), reference="") for i in range(2)]
    with pytest.raises(ConfigError, match="no training example is left"):
        split_examples(tasks, config(eval=EvalTable(examples=1)), Seeds(0))


def test_max_examples_keeps_a_seeded_sample_and_not_a_prefix() -> None:
    tasks = examples(*map(str, range(100)))
    limited = config(training=TrainingTable(max_examples=10), eval=EvalTable(examples=5))
    first, held_out = split_examples(tasks, limited, Seeds(1))
    again, _ = split_examples(tasks, limited, Seeds(1))
    other, held_out_too = split_examples(tasks, limited, Seeds(2))
    assert len(first) == 10
    assert [e.id for e in first] == [e.id for e in again]
    assert [e.id for e in first] != [e.id for e in other]
    assert any(int(e.id[1:]) > 30 for e in first)
    assert [e.id for e in held_out] == [e.id for e in held_out_too]


@pytest.mark.parametrize("limit", [0, 3, 99])
def test_max_examples_beyond_the_data_changes_nothing(limit: int) -> None:
    train, _ = split_examples(examples("a", "b", "c"), config(training=TrainingTable(max_examples=limit)), Seeds(0))
    assert [e.id for e in train] == ["e0", "e1", "e2"]


@pytest.mark.parametrize(
    ("prompts", "wanted", "fragment"),
    [((), 0, "gave no examples"), (("a", "b"), 2, "2 held-out examples wanted, but the data source has 2")],
)
def test_too_little_data_is_a_config_error(prompts: tuple[str, ...], wanted: int, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment) as caught:
        split_examples(examples(*prompts), config(eval=EvalTable(examples=wanted)), Seeds(0))
    assert "(default)" in caught.value.problems[0].where


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def decoded(tokenizer: Any, example: Example, **data: Any) -> str:
    """The prompt of an example, back as text."""
    return str(tokenizer.decode(encode_prompt(example, tokenizer, config(data=DataTable(**data)))))


def test_a_prompt_without_a_chat_template_is_plain_text(tokenizer: Any) -> None:
    example = Example(id="e", prompt="what is 1 plus 2 ?", reference="3")
    assert decoded(tokenizer, example, instruction="") == "what is 1 plus 2 ?"
    assert decoded(tokenizer, example, instruction="so 7 .") == "what is 1 plus 2 ? so 7 ."
    assert decoded(tokenizer, example, instruction="so 7 .", system_prompt="ok") == "ok what is 1 plus 2 ? so 7 ."


def test_a_chat_template_is_used_and_a_chat_stays_as_it_is(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} . {% endfor %}so")
    plain = Example(id="e", prompt="what is 1", reference="")
    chat = Example(
        id="e", prompt=[{"role": "system", "content": "wait"}, {"role": "user", "content": "2"}], reference=""
    )
    assert decoded(tokenizer, plain, instruction="", system_prompt="ok") == "ok . what is 1 . so"
    assert decoded(tokenizer, chat, instruction="7", system_prompt="ok") == "wait . 2 . so"
