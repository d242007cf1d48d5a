from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Sample, StopReason
from retrain.text.tool_calls import plain_tool_calls
from retrain.text.transcript import Transcript

TASK = {"role": "user", "content": "I think of a number from 1 to 9. Guess it."}
LOW = {"role": "user", "content": "Too low. Guess again."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    local = pytest.importorskip("retrain_local")
    return transformers.AutoTokenizer.from_pretrained(Path(local.__file__).parent / "tiny")


def said(tokenizer: Any, text: str, version: int = 0) -> Sample:
    ids = np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
    ended = text.endswith(tokenizer.eos_token)
    return Sample(
        tokens_T=ids,
        logprobs_T=-np.arange(1.0, len(ids) + 1),
        stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
        policy_version=version,
    )


def opened(tokenizer: Any) -> Transcript:
    """A transcript that has seen the task."""
    transcript = Transcript(tokenizer=tokenizer)
    assert transcript.observe([TASK], ())
    return transcript


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_turns_continue_one_row_with_the_sampled_ids_as_they_were(tokenizer: Any) -> None:
    transcript = opened(tokenizer)
    first = said(tokenizer, r"Let me think. \boxed{3}<|im_end|>")
    assert transcript.take(first) == r"Let me think. \boxed{3}"
    assert transcript.observe([TASK, assistant(r"Let me think. \boxed{3}"), LOW], ())
    second = said(tokenizer, r"\boxed{7}<|im_end|>")
    transcript.take(second)
    row = transcript.completion(StopReason.EOS)
    assert row.starts == (0,)
    assert row.turns == 2
    sampled = np.concatenate([first.tokens_T, second.tokens_T])
    assert row.tokens_T[row.action_T].tolist() == sampled.tolist()
    assert row.logprobs_T[row.action_T].tolist() == [*first.logprobs_T, *second.logprobs_T]
    assert not row.logprobs_T[~row.action_T].any()
    rendered = tokenizer.apply_chat_template(
        [TASK, assistant(r"Let me think. \boxed{3}"), LOW], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(row.tokens_T) == rendered + r"\boxed{7}<|im_end|>"
    assert "Too low" in row.text
    assert "I think of a number" not in row.text


def test_a_reply_cut_short_gets_the_templates_end_of_turn(tokenizer: Any) -> None:
    transcript = opened(tokenizer)
    transcript.take(said(tokenizer, r"Let me"))
    transcript.observe([TASK, assistant("Let me"), LOW], ())
    assert transcript.starts == [0]
    text = tokenizer.decode(transcript.context_T)
    assert "Let me<|im_end|>\n<|im_start|>user\nToo low" in text
    assert transcript.completion(StopReason.LENGTH).num_actions == len(said(tokenizer, "Let me").tokens_T)


@pytest.mark.parametrize("rewritten", ["something else", r"\boxed{3}"])
def test_a_rewritten_history_begins_a_context_of_its_own(tokenizer: Any, rewritten: str) -> None:
    transcript = opened(tokenizer)
    first = said(tokenizer, r"Let me think. \boxed{3}<|im_end|>")
    transcript.take(first)
    before = transcript.length
    transcript.observe([TASK, assistant(rewritten), LOW], ())
    assert transcript.starts == [0, before]
    fresh = tokenizer.apply_chat_template([TASK, assistant(rewritten), LOW], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(transcript.context_T) == fresh
    transcript.take(said(tokenizer, r"\boxed{7}<|im_end|>"))
    row = transcript.completion(StopReason.EOS)
    assert row.starts == (0, before)
    assert row.num_actions == len(first.tokens_T) + len(said(tokenizer, r"\boxed{7}<|im_end|>").tokens_T)


def test_plain_text_prompts_pass_no_template(tokenizer: Any) -> None:
    transcript = Transcript(tokenizer=tokenizer)
    transcript.observe("2 + 3 =", ())
    transcript.take(said(tokenizer, " 5"))
    transcript.observe("2 + 3 = 5, and 4 + 4 =", ())
    assert transcript.starts == [0]
    assert tokenizer.decode(transcript.context_T) == "2 + 3 = 5, and 4 + 4 ="


def test_no_room_leaves_the_row_unchanged_and_a_first_prompt_without_room_has_no_action(tokenizer: Any) -> None:
    transcript = Transcript(tokenizer=tokenizer)
    assert transcript.observe([TASK], (), limit=200)
    transcript.take(said(tokenizer, r"\boxed{3}<|im_end|>"))
    before = transcript.length
    assert not transcript.observe([TASK, assistant(r"\boxed{3}"), LOW], (), limit=before + 3)
    assert (transcript.length, transcript.completion(StopReason.LENGTH).turns) == (before, 1)
    transcript = Transcript(tokenizer=tokenizer)
    assert not transcript.observe([TASK], (), limit=4)
    row = transcript.completion(StopReason.LENGTH)
    assert (row.num_actions, row.turns) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_sampled_token_stands_once_and_in_order(tokenizer: Any, data: st.DataObject) -> None:
    transcript = Transcript(tokenizer=tokenizer)
    messages: list[dict[str, str]] = [TASK]
    everything: list[int] = []
    for turn in range(data.draw(st.integers(1, 4))):
        transcript.observe(messages, ())
        ids = data.draw(st.lists(st.integers(3, 500), min_size=1, max_size=12))
        if data.draw(st.booleans()):
            ids.append(tokenizer.eos_token_id)
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


def test_the_engines_own_numbers_stand_beside_recomputed_ones_unless_a_turn_has_none(tokenizer: Any) -> None:
    transcript = opened(tokenizer)
    first = said(tokenizer, r"\boxed{3}<|im_end|>")
    transcript.take(replace(first, engine_logprobs_T=first.logprobs_T - 0.5))
    row = transcript.completion(StopReason.EOS)
    assert row.engine_logprobs_T is not None
    np.testing.assert_allclose(row.engine_logprobs_T[row.action_T], first.logprobs_T - 0.5)
    assert not row.engine_logprobs_T[~row.action_T].any()
    transcript.observe([TASK, assistant(r"\boxed{3}"), LOW], ())
    transcript.take(said(tokenizer, r"\boxed{7}<|im_end|>"))
    assert transcript.completion(StopReason.EOS).engine_logprobs_T is None


LOOK = {"name": "look"}
CALLS = [{"type": "function", "function": LOOK}, {"id": "1", "function": {**LOOK, "arguments": None}}, LOOK]
CALLS += [{"function": {**LOOK, "arguments": text}} for text in ("", "{}")]


@pytest.mark.parametrize("call", CALLS)
def test_a_tool_call_without_arguments_is_one_with_none(call: dict[str, Any]) -> None:
    (found,) = plain_tool_calls([call])
    assert (found["type"], found["function"]) == ("function", {"name": "look", "arguments": {}})


@pytest.mark.parametrize("calls", [[{}], ["x"], {"function": {}}, [{"function": "look"}], [{"function": {"name": 1}}]])
def test_what_is_no_tool_call_is_a_value_error(tokenizer: Any, calls: Any) -> None:
    with pytest.raises(ValueError, match="tool_calls"):
        Transcript(tokenizer=tokenizer).observe([TASK, {"role": "assistant", "tool_calls": calls}], ())
