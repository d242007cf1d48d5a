"""The tokens of an agent's calls: kept as they were sampled, trained once, in an order that chance does not set."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest

from retrain.kernel.types import Completion, Sample, StopReason
from retrain.use.agents.episode import Call, Calls

OPENING_T = np.arange(5)


def ask(calls: Calls, tokenizer: Any, text: str, said: str) -> Call:
    """An answer whose text is cut into other tokens than the tokenizer would choose: one per character."""
    parent, prompt_T = calls.prompt(text)
    tokens_T = np.array([i for c in said for i in tokenizer(c, add_special_tokens=False)["input_ids"]], dtype=np.int64)
    logprobs_T = -np.arange(1.0, len(tokens_T) + 1)
    sample = Sample(tokens_T=tokens_T, logprobs_T=logprobs_T, stop_reason=StopReason.EOS, policy_version=2)
    return calls.add(text=text, prompt_T=prompt_T, sample=sample, parent=parent)


def rows(completion: Completion) -> list[tuple[list[int], list[bool]]]:
    ends = [*completion.starts[1:], len(completion.tokens_T)]
    return [
        (completion.tokens_T[a:b].tolist(), completion.action_T[a:b].tolist())
        for a, b in zip(completion.starts, ends, strict=True)
    ]


def test_a_conversation_goes_on_with_the_sampled_ids(tokenizer: Any) -> None:
    calls = Calls(tokenizer)
    first = ask(calls, tokenizer, "<|im_start|>user\nguess", "answer")
    assert tokenizer("answer", add_special_tokens=False)["input_ids"] != first.sample.tokens_T.tolist()
    second = ask(calls, tokenizer, "<|im_start|>user\nguessanswer too low", "seven")
    done = calls.completion(StopReason.EOS, OPENING_T)
    assert second.parent is first
    assert second.prompt_T[: len(first.tokens_T)].tolist() == first.tokens_T.tolist()
    assert done.starts == (0,)
    assert done.turns == 2
    assert done.policy_version == 2
    sampled = np.concatenate([first.sample.tokens_T, second.sample.tokens_T])
    assert done.tokens_T[done.action_T].tolist() == sampled.tolist()
    assert done.tokens_T.tolist() == second.tokens_T.tolist()
    assert not done.logprobs_T[~done.action_T].any()


def test_a_branch_repeats_what_came_before_and_trains_it_once(tokenizer: Any) -> None:
    calls = Calls(tokenizer)
    first = ask(calls, tokenizer, "question", "ab")
    one, two = ask(calls, tokenizer, "questionab then", "x"), ask(calls, tokenizer, "questionab or else", "y")
    done = calls.completion(StopReason.EOS, OPENING_T)
    assert len(done.starts) == 2
    longer, shorter = sorted(rows(done), key=lambda row: sum(row[1]), reverse=True)
    branch = two if longer[0] == one.tokens_T.tolist() else one
    assert sum(longer[1]) == 3, "the first of the two goes on in the row of what it continues"
    assert shorter == (branch.tokens_T.tolist(), [False] * len(branch.prompt_T) + [True])
    assert done.num_actions == 4
    assert done.tokens_T[done.action_T].tolist().count(first.sample.tokens_T[0]) == 1


def test_the_order_of_arrival_changes_nothing(tokenizer: Any) -> None:
    asked = [("question", "a"), ("question", "b"), ("other question", "c")]
    found = []
    for order in permutations(asked):
        calls = Calls(tokenizer)
        for text, said in order:
            ask(calls, tokenizer, text, said)
        for said in ("d", "e"):
            ask(calls, tokenizer, "questiona and then", said)
        done = calls.completion(StopReason.EOS, OPENING_T)
        found.append((done.tokens_T.tolist(), done.action_T.tolist(), done.logprobs_T.tolist(), done.starts))
    assert all(each == found[0] for each in found)
    assert len(found[0][3]) == 4


def test_an_answer_that_nobody_got_is_forgotten_unless_it_was_continued(tokenizer: Any) -> None:
    calls = Calls(tokenizer)
    first = ask(calls, tokenizer, "question", "a")
    lost = ask(calls, tokenizer, "question", "b")
    ask(calls, tokenizer, "questiona more", "c")
    assert calls.remove(lost)
    assert not calls.remove(lost)
    assert not calls.remove(first)
    assert calls.prompt("questionb more")[0] is None
    assert [call.sample.tokens_T.size for call in calls] == [1, 1]
    assert calls.completion(StopReason.EOS, OPENING_T).num_actions == 2


def test_an_agent_without_a_call_has_a_row_without_an_action(tokenizer: Any) -> None:
    done = Calls(tokenizer).completion(StopReason.EOS, OPENING_T)
    assert done.tokens_T.tolist() == OPENING_T.tolist()
    assert (done.num_actions, done.turns, done.starts) == (0, 0, (0,))


@pytest.mark.parametrize("text", ["", "é\ufffd" * 50, "<|im_end|>" * 9])
def test_any_text_is_a_prompt(tokenizer: Any, text: str) -> None:
    calls = Calls(tokenizer)
    call = ask(calls, tokenizer, text, text or "x")
    assert calls.prompt(call.text + "!")[0] is call
