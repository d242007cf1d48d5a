"""From messages to text and tokens: what the template is given or refuses, and transcripts of several turns."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example, Sample, StopReason
from retrain.tasks.prompts import encode_prompts
from retrain.text.chat import chat_text, check_template_args, prompt_text
from retrain.text.tool_calls import plain_tool_calls
from retrain.text.transcript import Transcript
from tests.kit.problems import refused

THINKING = (
    "{% if tools %}{% for t in tools %}{{ t.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{{ m.content }} {% endfor %}{% if enable_thinking %}wait {% endif %}so"
)


@pytest.fixture(scope="module")
def tokenizer_without_template(tokenizer_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def tokenizer(tokenizer_without_template, monkeypatch):
    monkeypatch.setattr(tokenizer_without_template, "chat_template", THINKING)
    return tokenizer_without_template


def config(**data):
    return Config(tables={"data": DataTable(instruction="", **data)})


def task(prompt, name="e"):
    return Example(id=name, prompt=prompt, reference="1")


def encode_prompt(example, tokenizer, config):
    """Token ids of one example's prompt."""
    return encode_prompts([example], tokenizer, config)[0]


def test_template_args_and_tools_reach_the_template(tokenizer):
    with_it, without = config(template_args={"enable_thinking": True}), config(template_args={"enable_thinking": False})
    assert tokenizer.decode(encode_prompt(task("what"), tokenizer, with_it)) == "what wait so"
    assert tokenizer.decode(encode_prompt(task("what"), tokenizer, without)) == "what so"
    assert check_template_args(tokenizer, with_it) == ()
    messages = [{"role": "user", "content": "what"}]
    assert chat_text(messages, tokenizer, {}, tools=[{"name": "plus"}]) == "plus what so"
    assert messages == [{"role": "user", "content": "what"}]


def test_arguments_that_the_template_does_not_read_are_noted(tokenizer, monkeypatch):
    (note,) = check_template_args(tokenizer, config(template_args={"enable_thinkin": False}))
    assert "template_args" in note
    assert "does not read 'enable_thinkin'; did you mean 'enable_thinking'?" in note
    monkeypatch.setattr(tokenizer, "chat_template", None)
    (note,) = check_template_args(tokenizer, config(template_args={"enable_thinking": False}))
    assert "has no chat template" in note
    assert check_template_args(tokenizer, config()) == ()


def test_what_the_kernel_decides_is_refused(tokenizer):
    names = ("messages", "tools", "tokenize", "add_generation_prompt", "chat_template", "return_dict", "padding")
    assert refused(check_template_args, tokenizer, config(template_args=dict.fromkeys(names, "x"))) == [
        "data.template-argument"
    ] * len(names)


SYSTEM = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]


@pytest.mark.parametrize(
    ("template", "prompt", "code"),
    [
        (THINKING, SYSTEM, "data.template-refuses"),
        *((text, "y", "data.template-refuses") for text in ("{{ messages[5].content.upper() }}", "{% for %}")),
        ("{{ 1 // 0 }}", "y", "data.template-refuses"),
        *((text, "half a pair \ud800", "data.tokenizer-refuses") for text in (THINKING, None)),
    ],
)
def test_a_prompt_that_is_refused_names_its_example(tokenizer, monkeypatch, template, prompt, code):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    good = [task("what", "good"), task("is", "fine")] if template in (THINKING, None) else []
    with pytest.raises(ConfigError) as caught:
        encode_prompts([*good[:1], task(prompt, "bad\x1b[31m"), *good[1:]], tokenizer, config())
    (problem,) = caught.value.problems
    assert problem.code == code
    assert problem.where.startswith("example bad")
    assert "\x1b" not in str(problem)
    str(problem).encode()


def test_many_at_once_are_what_one_by_one_gives_and_a_long_prompt_is_not_cut(tokenizer, monkeypatch, capfd):
    tokenizer.model_max_length = 10
    assert len(encode_prompt(task("what " * 50), tokenizer, config())) == 51
    assert "longer than" not in capfd.readouterr().err
    monkeypatch.setattr("retrain.text.chat.BATCH", 7)
    tasks = [task(f"what is {i % 10} plus {i % 7} ?", f"e{i}") for i in range(40)]
    for template in (THINKING, None):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        together = [ids_T.tolist() for ids_T in encode_prompts(tasks, tokenizer, config())]
        assert together == [encode_prompt(one, tokenizer, config()).tolist() for one in tasks]
        assert len({len(ids) for ids in together}) == 1


def test_a_chat_and_a_text_differ_and_equal_chats_do_not():
    chat = [{"role": "user", "content": "a"}]
    turned = [{"content": "a", "role": "user"}]
    assert prompt_text(task(chat)) == prompt_text(task(tuple(turned)))
    assert prompt_text(task(chat)) != prompt_text(task([{"role": "system", "content": "a"}]))
    assert prompt_text(task("a")) != prompt_text(task(chat))


TASK = {"role": "user", "content": "I think of a number from 1 to 9. Guess it."}
LOW = {"role": "user", "content": "Too low. Guess again."}


@pytest.fixture(scope="module")
def tiny():
    transformers = pytest.importorskip("transformers")
    local = pytest.importorskip("retrain_local")
    return transformers.AutoTokenizer.from_pretrained(Path(local.__file__).parent / "tiny")


def said(tiny, text, version=0):
    ids = np.asarray(tiny(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    ended = text.endswith(tiny.eos_token)
    return Sample(
        tokens_T=ids,
        logprobs_T=-np.arange(1.0, len(ids) + 1),
        stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
        policy_version=version,
    )


def opened(tiny):
    """A transcript that has seen the task."""
    transcript = Transcript(tokenizer=tiny)
    assert transcript.observe([TASK], ())
    return transcript


def assistant(text):
    return {"role": "assistant", "content": text}


def test_turns_continue_one_row_with_the_sampled_ids_as_they_were(tiny):
    transcript = opened(tiny)
    first = said(tiny, r"Let me think. \boxed{3}<|im_end|>")
    assert transcript.take(first) == r"Let me think. \boxed{3}"
    assert transcript.observe([TASK, assistant(r"Let me think. \boxed{3}"), LOW], ())
    second = said(tiny, r"\boxed{7}<|im_end|>")
    transcript.take(second)
    row = transcript.completion(StopReason.EOS)
    assert row.starts == (0,)
    assert row.turns == 2
    sampled = np.concatenate([first.tokens_T, second.tokens_T])
    assert row.tokens_T[row.action_T].tolist() == sampled.tolist()
    assert row.logprobs_T[row.action_T].tolist() == [*first.logprobs_T, *second.logprobs_T]
    assert not row.logprobs_T[~row.action_T].any()
    rendered = tiny.apply_chat_template(
        [TASK, assistant(r"Let me think. \boxed{3}"), LOW], tokenize=False, add_generation_prompt=True
    )
    assert tiny.decode(row.tokens_T) == rendered + r"\boxed{7}<|im_end|>"
    assert "Too low" in row.text
    assert "I think of a number" not in row.text


def test_a_cut_reply_gets_the_end_of_turn_and_plain_text_no_template(tiny):
    transcript = opened(tiny)
    transcript.take(said(tiny, r"Let me"))
    transcript.observe([TASK, assistant("Let me"), LOW], ())
    assert transcript.starts == [0]
    text = tiny.decode(transcript.context_T)
    assert "Let me<|im_end|>\n<|im_start|>user\nToo low" in text
    assert transcript.completion(StopReason.LENGTH).num_actions == len(said(tiny, "Let me").tokens_T)
    transcript = Transcript(tokenizer=tiny)
    transcript.observe("2 + 3 =", ())
    transcript.take(said(tiny, " 5"))
    transcript.observe("2 + 3 = 5, and 4 + 4 =", ())
    assert transcript.starts == [0]
    assert tiny.decode(transcript.context_T) == "2 + 3 = 5, and 4 + 4 ="


@pytest.mark.parametrize("rewritten", ["something else", r"\boxed{3}"])
def test_a_rewritten_history_begins_a_context_of_its_own(tiny, rewritten):
    transcript = opened(tiny)
    first = said(tiny, r"Let me think. \boxed{3}<|im_end|>")
    transcript.take(first)
    before = transcript.length
    transcript.observe([TASK, assistant(rewritten), LOW], ())
    assert transcript.starts == [0, before]
    fresh = tiny.apply_chat_template([TASK, assistant(rewritten), LOW], tokenize=False, add_generation_prompt=True)
    assert tiny.decode(transcript.context_T) == fresh
    transcript.take(said(tiny, r"\boxed{7}<|im_end|>"))
    row = transcript.completion(StopReason.EOS)
    assert row.starts == (0, before)
    assert row.num_actions == len(first.tokens_T) + len(said(tiny, r"\boxed{7}<|im_end|>").tokens_T)


def test_no_room_leaves_the_row_unchanged_and_a_first_prompt_without_room_has_no_action(tiny):
    transcript = Transcript(tokenizer=tiny)
    assert transcript.observe([TASK], (), limit=200)
    transcript.take(said(tiny, r"\boxed{3}<|im_end|>"))
    before = transcript.length
    assert not transcript.observe([TASK, assistant(r"\boxed{3}"), LOW], (), limit=before + 3)
    assert (transcript.length, transcript.completion(StopReason.LENGTH).turns) == (before, 1)
    transcript = Transcript(tokenizer=tiny)
    assert not transcript.observe([TASK], (), limit=4)
    row = transcript.completion(StopReason.LENGTH)
    assert (row.num_actions, row.turns) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_sampled_token_stands_once_and_in_order(tiny, data):
    transcript = Transcript(tokenizer=tiny)
    messages = [TASK]
    everything = []
    for turn in range(data.draw(st.integers(1, 4))):
        transcript.observe(messages, ())
        ids = data.draw(st.lists(st.integers(3, 500), min_size=1, max_size=12))
        if data.draw(st.booleans()):
            ids.append(tiny.eos_token_id)
        stop, logprobs_T = StopReason.EOS, np.full(len(ids), -0.5)
        sample = Sample(tokens_T=np.array(ids), logprobs_T=logprobs_T, stop_reason=stop, policy_version=turn)
        messages = [*messages, assistant(transcript.take(sample)), LOW]
        everything += ids
    row = transcript.completion(StopReason.EOS)
    assert row.tokens_T[row.action_T].tolist() == everything
    assert len(row.tokens_T) == len(row.action_T) == len(row.logprobs_T)
    assert (row.starts[0], row.policy_version) == (0, 0), "the oldest policy of all turns"
    assert list(row.starts) == sorted(set(row.starts))
    for start in row.starts[1:]:
        assert not row.action_T[start]


def test_the_engines_own_numbers_stand_beside_recomputed_ones_unless_a_turn_has_none(tiny):
    transcript = opened(tiny)
    first = said(tiny, r"\boxed{3}<|im_end|>")
    transcript.take(replace(first, engine_logprobs_T=first.logprobs_T - 0.5))
    row = transcript.completion(StopReason.EOS)
    np.testing.assert_allclose(row.engine_logprobs_T[row.action_T], first.logprobs_T - 0.5)
    assert not row.engine_logprobs_T[~row.action_T].any()
    transcript.observe([TASK, assistant(r"\boxed{3}"), LOW], ())
    transcript.take(said(tiny, r"\boxed{7}<|im_end|>"))
    assert transcript.completion(StopReason.EOS).engine_logprobs_T is None


LOOK = {"name": "look"}
CALLS = [{"type": "function", "function": LOOK}, {"id": "1", "function": {**LOOK, "arguments": None}}, LOOK]
CALLS += [{"function": {**LOOK, "arguments": text}} for text in ("", "{}")]


@pytest.mark.parametrize("call", CALLS)
def test_a_tool_call_without_arguments_is_one_with_none(call):
    (found,) = plain_tool_calls([call])
    assert (found["type"], found["function"]) == ("function", {"name": "look", "arguments": {}})


@pytest.mark.parametrize("calls", [[{}], ["x"], {"function": {}}, [{"function": "look"}], [{"function": {"name": 1}}]])
def test_what_is_no_tool_call_is_a_value_error(tiny, calls):
    with pytest.raises(ValueError, match="tool_calls"):
        Transcript(tokenizer=tiny).observe([TASK, {"role": "assistant", "tool_calls": calls}], ())


class Marked:
    """A tokenizer of letters that marks the start of a text with token 0."""

    chat_template = ""

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages, **options):
        return messages[0]["content"]


BEGINNINGS = [("", "ab", True), ("x", "ab", True), ("", [TASK], True), ("x", [TASK], False)]


@pytest.mark.parametrize(("template", "prompt", "starts"), BEGINNINGS)
def test_only_a_text_without_a_template_is_marked_where_it_begins(template, prompt, starts):
    tokenizer = Marked()
    tokenizer.chat_template = template
    transcript = Transcript(tokenizer=tokenizer)
    transcript.observe(prompt, ())
    assert (transcript.context_T[0] == 0) == starts
    if isinstance(prompt, str):
        transcript.observe("abc", ())
        assert transcript.context_T.tolist() == [0, *map(ord, "abc")]


def test_experts_of_several_turns_stay_with_their_tokens():
    def sample(start, stop, context):
        return Sample(
            tokens_T=np.arange(start, stop),
            logprobs_T=np.zeros(stop - start),
            stop_reason=StopReason.EOS,
            policy_version=0,
            experts_TLK=np.arange(start, stop, dtype=np.int16).reshape(-1, 1, 1),
            context_experts_TLK=np.arange(start, dtype=np.int16).reshape(-1, 1, 1) if context else None,
        )

    for context, second in ((True, [5, 6, 7]), (False, [-1, -1, -1])):
        transcript = Transcript(tokenizer=SimpleNamespace(decode=lambda ids, **options: ""))
        transcript.show(np.arange(3), starts=True)
        transcript.sampled(sample(3, 5, True))
        transcript.show(np.arange(5, 8), starts=False)
        transcript.sampled(sample(8, 10, context))
        found = transcript.completion(StopReason.EOS).experts_TLK
        assert found[:, 0, 0].tolist() == [0, 1, 2, 3, 4, *second, 8, 9]
