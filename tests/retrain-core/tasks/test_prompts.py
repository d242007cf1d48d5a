"""Which examples of a source are used, held out and trained on, in which order, and how a task becomes tokens."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from retrain.kernel.config import plugin_tables
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.config.schema import DataTable, EvalTable, TrainingTable
from retrain.kernel.contracts.tasks import LoadedData, Prompt
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Score
from retrain.tasks.prompts import PromptPool, build_pool, encode_prompts, split_examples, usable_examples
from retrain.tasks.scoring.build import uses_own_verifier
from tests.kit.problems import codes_in, refused


def drawn_from(size, root, cursor, count):
    """Id and epoch of `count` prompts of a pool of `size`."""
    pool = PromptPool(train=PROMPTS[:size], held_out=(), seeds=Seeds(root))
    return [(prompt.example.id, prompt.epoch) for prompt in pool.draw(cursor, count)]


PROMPTS = [Prompt(example=Example(id=f"e{i}", prompt="p", reference=""), tokens_T=np.array([i])) for i in range(20)]


@settings(max_examples=40)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 99), st.integers(0, 50))
def test_the_order_does_not_depend_on_the_batch_size_and_every_epoch_holds_each_task_once(size, batches, root, epoch):
    cursor, drawn = 0, []
    for count in batches:
        drawn += drawn_from(size, root, cursor, count)
        cursor += count
    assert drawn == drawn_from(size, root, 0, cursor)
    assert len(drawn) == cursor
    assert Counter(drawn_from(size, root, epoch * size, size)) == Counter((f"e{i}", epoch) for i in range(size))
    orders = {tuple(id_ for id_, _ in drawn_from(20, r, 20 * e, 20)) for r in (root, root + 1) for e in range(3)}
    assert len(orders) == 6, "every epoch and every seed has its own"


def examples(*prompts):
    """Tasks with these prompts and ids e0, e1, ..."""
    return [Example(id=f"e{i}", prompt=prompt, reference="") for i, prompt in enumerate(prompts)]


def split(tasks, held_out=0, *, seed=0, root=0, limit=0, skip=0):
    tables = {"eval": EvalTable(examples=held_out, seed=seed, skip=skip), "training": TrainingTable(max_examples=limit)}
    train, held = split_examples(tasks, Config(tables=tables), Seeds(root))
    return list(train), list(held)


def ids(tasks):
    return [each.id for each in tasks]


def test_skipped_examples_are_on_neither_side():
    tasks = examples(*"abcdefghij")
    _, first = split(tasks, 3)
    train, second = split(tasks, 4, skip=3)
    _, both = split(tasks, 7)
    assert ids([*first, *second]) == ids(both)
    assert len(train) == 3
    assert not {*ids(train)} & {*ids(both)}


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=20), st.data())
def test_no_task_and_no_prompt_text_is_on_both_sides(prompts, data):
    tasks = examples(*prompts)
    wanted = data.draw(st.integers(1, len(tasks) - 1))
    try:
        train, held_out = split(tasks, wanted, seed=data.draw(st.integers(0, 5)))
    except ConfigError:  # every prompt text that is left is held out too
        reject()
    assert len(held_out) == wanted
    assert train
    assert not {*ids(train)} & {*ids(held_out)}
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    assert {*ids(train), *ids(held_out)} <= {*ids(tasks)}


@settings(max_examples=30)
@given(st.permutations(range(12)), st.integers(0, 3), st.integers(0, 2**31 - 1))
def test_held_out_tasks_depend_on_ids_and_the_seed_of_the_split_alone(order, seed, root):
    tasks = examples(*"abcdefghijkl")
    assert ids(split([tasks[i] for i in order], 4, seed=seed, root=root)[1]) == ids(split(tasks, 4, seed=seed)[1])


def test_max_examples_keeps_a_seeded_sample():
    tasks = examples(*map(str, range(100)))
    (first, held_out), (again, _), (other, held_out_too) = (split(tasks, 5, root=root, limit=10) for root in (1, 1, 2))
    assert len(first) == 10
    assert ids(first) == ids(again) != ids(other)
    assert ids(held_out) == ids(held_out_too)
    assert len({frozenset(ids(split(tasks, 10, seed=seed)[1])) for seed in range(5)}) == 5
    parts = [Example(id=f"{part}{i}", prompt=f"{part}{i}", reference="1") for part in "abcde" for i in range(40)]
    drawn = Counter(id_ for root in range(200) for id_ in ids(split(parts, root=root, limit=20)[0]))
    by_part = Counter(id_[0] for id_ in drawn.elements())
    assert all(700 < by_part[part] < 900 for part in "abcde")  # 800 expected, standard deviation 24
    assert (len(drawn), max(drawn.values()) < 45) == (200, True)  # 20 expected, standard deviation 4
    for limit in (0, 3, 99):
        assert ids(split(tasks[:3], limit=limit)[0]) == ["e0", "e1", "e2"]


CHAT = [{"role": "user", "content": "same"}]


@pytest.mark.parametrize(
    ("tasks", "held_out", "code", "key"),
    [
        ([], 0, "data.no-examples", "[data] source"),
        (examples("a", "b"), 2, "eval.too-many-examples", "[eval] examples"),
        (examples("a", "b"), 3, "eval.too-many-examples", "[eval] examples"),
        ([Example(id=n, prompt=[*CHAT], reference="") for n in "ab"], 1, "eval.too-many-examples", "[eval] examples"),
    ],
)
def test_too_little_data_is_a_config_error(tasks, held_out, code, key):
    with pytest.raises(ConfigError) as caught:
        split(tasks, held_out)
    assert codes_in(caught) == [code]
    assert caught.value.problems[0].where.startswith(key)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


def decoded(tokenizer, example, **data):
    """The prompt of an example, back as text."""
    (tokens_T,) = encode_prompts([example], tokenizer, Config(tables={"data": DataTable(**data)}))
    return str(tokenizer.decode(tokens_T))


def test_a_prompt_without_a_chat_template_is_plain_text(tokenizer, monkeypatch):
    example = Example(id="e", prompt="what is 1 plus 2 ?", reference="3")
    assert decoded(tokenizer, example, instruction="") == "what is 1 plus 2 ?"
    assert decoded(tokenizer, example, instruction="so 7 .") == "what is 1 plus 2 ? so 7 ."
    assert decoded(tokenizer, example, instruction="so 7 .", system_prompt="ok") == "ok what is 1 plus 2 ? so 7 ."
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} . {% endfor %}so")
    chat = replace(example, prompt=[{"role": "system", "content": "wait"}, {"role": "user", "content": "2"}])
    assert decoded(tokenizer, example, instruction="", system_prompt="ok") == "ok . what is 1 plus 2 ? . so"
    assert decoded(tokenizer, chat, instruction="7", system_prompt="ok") == "wait . 2 . so"


def tasks_of_words(*lengths):
    """Prompts of so many tokens, all different."""
    digits = (f"{i:0>8b}".replace("", " ").split() for i in range(len(lengths)))
    prompts = [" ".join((word * length)[:length]) for word, length in zip(digits, lengths, strict=True)]
    return LoadedData(examples=tuple(replace(each, reference="1") for each in examples(*prompts)))


def pool_of(loaded, tokenizer, context_length=None, **tables):
    tables = {"data": DataTable(instruction=""), "training": TrainingTable(batch_size=2, max_tokens=4)} | tables
    return build_pool(loaded, Config(tables=tables), tokenizer, Seeds(0), context_length=context_length)


def test_what_is_left_out_is_told(tokenizer):
    empty = Example(id="empty", prompt=" ", reference="1")
    pool, notes = pool_of(LoadedData(examples=(empty, *tasks_of_words(8, 8).examples)), tokenizer)
    assert ([p.example.id for p in pool.train], notes) == (["e0", "e1"], ("1 prompts without a token left out",))
    same = [Example(id=f"s{i}", prompt="what is", reference=str(i)) for i in range(3)]
    data = LoadedData(examples=(*same, *tasks_of_words(8, 9).examples))
    told = "2 training examples left out: a held-out one has the same prompt"
    seen = set()
    for seed in range(20):
        pool, notes = pool_of(data, tokenizer, eval=EvalTable(examples=1, seed=seed))
        is_shared = pool.held_out[0].example.prompt == "what is"
        assert (notes, len(pool.train)) == (((told,), 2) if is_shared else ((), 4))
        assert all(len(p.tokens_T) == len(str(p.example.prompt).split()) for p in (*pool.train, *pool.held_out))
        seen.add(is_shared)
    assert len(seen) == 2
    chats = [Example(id=f"c{i}", prompt=[{"role": "user", "content": f"what is {i}"}], reference="1") for i in range(2)]
    data = LoadedData(examples=(*chats, *tasks_of_words(8).examples))
    _, notes = pool_of(data, tokenizer, data=DataTable())
    assert notes == ("2 prompts are whole chats: [data] system_prompt and instruction are not added to them",)
    assert pool_of(data, tokenizer)[1] == ()
    data = tasks_of_words(8, 30, 9, 30, 10, 31)
    for seed in range(6):
        pool, notes = pool_of(data, tokenizer, 30, eval=EvalTable(examples=2, seed=seed))
        assert len(pool.held_out) == 2
        assert {p.example.id for p in (*pool.train, *pool.held_out)} == {"e0", "e2", "e4"}
        assert notes[0].startswith("3 prompts of more than 29 tokens left out, the longest of 31")
    assert refused(pool_of, data, tokenizer, 30, eval=EvalTable(examples=3)) == ["eval.too-many-examples"]
    with pytest.raises(ConfigError, match=r"(?s)every prompt was left out.*longer context"):
        pool_of(data, tokenizer, 8)
    pool, notes = pool_of(tasks_of_words(8, 9, 10), tokenizer, training=TrainingTable(batch_size=8, max_tokens=4))
    assert notes == ("3 training examples for batch_size = 8: a step uses some more than once",)
    drawn = pool.draw(0, 8)
    assert Counter(p.epoch for p in drawn) == {0: 3, 1: 3, 2: 2}
    assert len({(p.example.id, p.epoch) for p in drawn}) == 8


class RewardTable(plugin_tables.RewardTable):
    """With the default that retrain-rewards gives."""

    type: str = "match"


class Verifier:
    def score(self, example, text):
        return Score.of(1.0)


def config(**reward):
    """A configuration whose `[reward]` was written in a file."""
    origins = {f"reward.{name}": Origin(layer=Layer.FILE, place="retrain.toml:3") for name in reward}
    return Config(tables={"reward": RewardTable(**reward), "data": DataTable(source="math")}, origins=origins)


def usable(data, config, **more):
    """The usable examples where `match` and `math`, and they alone, compare with the reference."""
    names = set(config.reward.weights) or {config.reward.type}
    return usable_examples(data, config, comparing=names & {"match", "math"}, **more)


def task(name, reference="1", prompt="p", **more):
    return Example(id=name, prompt=prompt, reference=reference, **more)


def data(*examples, reward=None):
    return LoadedData(examples=tuple(examples), reward=reward)


@pytest.mark.parametrize("other", [{"reference": "2"}, {"prompt": "q\x1b"}, {"info": {"k": 1}}, {"task": "t"}])
def test_one_id_for_two_tasks_is_an_error_that_shows_both(other):
    with pytest.raises(ConfigError) as caught:
        usable(data(task("a"), task("a", **other)), config())
    (problem,) = caught.value.problems
    assert problem.code == "data.id-twice"
    assert problem.why.startswith("'p' and ")
    assert "\x1b" not in str(problem)
    chat = [{"role": "user", "content": "a"}]
    repeated = task("a"), task("b", prompt=chat), task("a"), task("b", prompt=tuple(chat)), task("c")
    kept, notes = usable(data(*repeated), config())
    assert ([e.id for e in kept], notes) == (["a", "b", "c"], ("math: 2 repeated examples dropped",))


@pytest.mark.parametrize("reward", [{}, {"type": "match"}, {"type": "math"}, {"weights": {"math": 1.0, "len": 0.1}}])
def test_silence_must_not_become_correct(reward):
    kept, notes = usable(data(task("a"), task("b", ""), task("c", " \n")), config(**reward))
    assert [e.id for e in kept] == ["a"]
    assert "2 of 3 examples have no reference answer (first: b): left out" in notes[0]
    assert refused(usable, data(task("b", ""), task("c", "")), config(**reward)) == ["data.no-references"]


def test_a_verifier_of_the_sources_own_needs_no_reference():
    judged = data(task("a", ""), task("b"), reward=Verifier())
    assert usable(judged, config()) == (list(judged.examples), ())
    assert uses_own_verifier(judged, config())
    assert not uses_own_verifier(judged, config(type="match"))
    assert not uses_own_verifier(judged, config(weights={"match": 1.0}))
    assert not uses_own_verifier(data(task("a")), config())
    assert len(usable(data(task("a", "")), config(type="match"), is_environment=True)[0]) == 1
    for reward in ({"type": "judge"}, {"type": "my.own"}, {"weights": {"custom": 1.0}}):
        kept, notes = usable(data(task("a"), task("b", "")), config(**reward))
        assert len(kept) == 2, "it needs no reference, keeps them and says so"
        assert notes == ("math: 1 of 2 examples have no reference answer (first: b)",)


@pytest.mark.parametrize(("reward", "key"), [({"type": "match"}, "type"), ({"weights": {"math": 1.0}}, "weights")])
def test_a_comparing_reward_on_tasks_without_references_is_refused_before_scoring(reward, key):
    with pytest.raises(ConfigError) as caught:
        usable(data(task("a"), task("b", ""), reward=Verifier()), config(**reward))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("reward.needs-references", f"retrain.toml:3 [reward] {key}")
    complete = data(task("a"), task("b"), reward=Verifier())
    assert len(usable(complete, config(**reward))[0]) == 2


@pytest.mark.parametrize(
    "example",
    [
        *({"id": "a"}, task(5), task(""), task("a", 7), task("a", prompt=7), task("a", prompt=[])),
        *(task("a", prompt=["x"]), task("a", prompt=[{"role": "user"}])),
    ],
)
def test_what_is_no_example_is_the_plugins_fault(example):
    shown = re.escape(repr(example)[:50])
    with pytest.raises(PluginError, match=f"example 1 of .*{shown}") as caught:
        usable(data(task("first"), example), config())
    assert codes_in(caught) == ["data.not-an-example"]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "1"])), max_size=12))
def test_what_is_kept_is_unique_in_order_and_has_a_reference(drawn):
    tasks = [task(name + reference, reference) for name, reference in drawn]
    if tasks and not any(e.reference for e in tasks):
        return
    kept, _ = usable(data(*tasks), config())
    assert [e.id for e in kept] == list(dict.fromkeys(e.id for e in tasks if e.reference))
