"""Whoever holds an episode's key gets its policy; every answer that was received is trained once, and nothing else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import NonFiniteError
from retrain.kernel.types import Completion, Sample, StopReason
from retrain.use.agents.episode import Call, Calls
from retrain.use.serving.batcher import Batcher

Play = Callable[..., Any]
COMPARE = '<tool_call>{"name": "compare", "arguments": {"number": 3}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "compare", "parameters": {"type": "object", "properties": {}}}}]
RETRY = {"x-stainless-retry-count": "1"}


def trained(played: Any, number: int = 0) -> list[int]:
    """The ids of an episode's actions."""
    done = played.episodes[number].completion()
    return list(map(int, done.tokens_T[done.action_T]))


def test_tokens_are_those_that_the_engine_drew(play: Play, scripted: Any) -> None:
    policy = scripted(lambda prompt, seed: f"I say {seed % 1000}")
    played = play(policy)
    first = played.chat("Guess.", temperature=0.7, max_tokens=10**9)
    answer = first["choices"][0]["message"]
    assert first["usage"]["completion_tokens"] == len(policy.wrote[0].tokens_T)
    assert first["model"] == "policy"
    played.chat("Guess.", answer, "Too low.")
    done = played.episodes[0].completion()
    assert done.tokens_T[done.action_T].tolist() == [t for s in policy.wrote for t in s.tokens_T.tolist()]
    assert done.logprobs_T[done.action_T].tolist() == [p for s in policy.wrote for p in s.logprobs_T.tolist()]
    assert done.starts == (0,), "the second prompt continues the first answer"
    assert done.policy_version == 3
    assert np.array_equal(policy.asked[1].prompt_T[: len(policy.asked[0].prompt_T)], policy.asked[0].prompt_T)
    episode = played.episodes[0]
    assert len(episode.token) >= 32
    assert episode.token not in json.dumps(episode.task), "no record shows a key"
    assert "4" not in str(episode.task.get("reference", "")), "the reference is the verifier's"


def test_calls_side_by_side_have_answers_of_their_own_whatever_their_order(play: Play, scripted: Any) -> None:
    def answers(workers: int) -> tuple[list[int], set[str]]:
        policy = scripted(lambda prompt, seed: f"{seed:x}")
        played = play(policy, episodes=2)
        with ThreadPoolExecutor(workers) as pool:
            found = list(pool.map(lambda text: played.chat(text), ["a", "b", "a", "c", "a"]))
        return trained(played), {each["choices"][0]["message"]["content"] for each in found}

    one, many = answers(1), answers(5)
    assert len(one[1]) == 5
    assert one == many


def test_tool_calls_are_read_and_stand_in_the_next_prompt_as_they_were_written(play: Play, scripted: Any) -> None:
    said = iter([f"Let me see. {COMPARE}{COMPARE}", "done"])
    policy = scripted(lambda prompt, seed: next(said))
    played = play(policy)
    choice = played.chat("Guess.", tools=TOOLS, tool_choice="auto")["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    one, two = message["tool_calls"]
    assert one["id"] != two["id"]
    assert json.loads(one["function"]["arguments"]) == {"number": 3}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "Too low."} for call in (one, two)]
    played.chat("Guess.", message, *results, tools=TOOLS)
    assert played.episodes[0].completion().starts == (0,)
    assert COMPARE in played.episodes[0].completion().text
    one["function"]["arguments"] = '{"number": 4}'
    said = iter(["another conversation, since a call was altered"])
    played.chat("Guess.", message, "Go on.", tools=TOOLS)
    assert len(played.episodes[0].completion().starts) == 2


FORCED = {"type": "function", "function": {"name": "compare"}}


@pytest.mark.parametrize(
    ("choice", "opening", "writes"),
    [
        ("required", "<tool_call>\n", '{"name": "compare", "arguments": {"number": 3}}\n</tool_call>'),
        ("required", "<tool_call>\n", COMPARE),
        (FORCED, '<tool_call>\n{"name": "compare", "arguments": ', '{"number": 3}}</tool_call>'),
    ],
)
def test_a_call_that_must_be_made_is_begun_for_the_policy(
    play: Play, scripted: Any, choice: Any, opening: str, writes: str
) -> None:
    said = iter([writes, "done"])
    policy = scripted(lambda prompt, seed: next(said))
    played = play(policy)
    message = played.chat("x", tools=TOOLS, tool_choice=choice)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("compare", {"number": 3})
    assert policy.tokenizer.decode(policy.asked[0].prompt_T).endswith(opening)
    played.chat("x", message, {"role": "tool", "tool_call_id": call["id"], "content": "Too low."}, tools=TOOLS)
    assert trained(played) == [int(t) for sample in policy.wrote for t in sample.tokens_T]
    assert played.episodes[0].completion().starts == (0,), "the next prompt continues the call with its opening"


@pytest.mark.parametrize(
    ("tools", "said", "text"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "no", "<tool_call>\nno"),
        ({"tools": TOOLS, "tool_choice": "none"}, COMPARE, COMPARE),
        ({}, COMPARE, COMPARE),
    ],
)
def test_a_forced_call_that_is_not_made_and_a_call_without_tools_are_text(
    play: Play, scripted: Any, tools: dict[str, Any], said: str, text: str
) -> None:
    choice = play(scripted(lambda prompt, seed: said)).chat("x", **tools)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_without_parallel_calls_an_answer_ends_after_its_first(play: Play, scripted: Any) -> None:
    said = iter([f"{COMPARE}{COMPARE}", "done"])
    played = play(scripted(lambda prompt, seed: next(said)))
    message = played.chat("x", tools=TOOLS, parallel_tool_calls=False)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Too low."}
    played.chat("x", message, result, tools=TOOLS)
    done = played.episodes[0].completion()
    assert done.starts == (0,)
    assert done.text.count(COMPARE) == 1


def test_a_seed_repeats_an_answer_within_its_episode_only(play: Play, scripted: Any) -> None:
    def said(number: int, **body: Any) -> str:
        found = played.chat("x", number=number, model="gpt-5", **body)
        assert found["model"] == "gpt-5"
        return str(found["choices"][0]["message"]["content"])

    found = []
    for _ in range(2):
        played = play(scripted(lambda prompt, seed: f"{seed:x}"), episodes=2)
        found.append([said(0, seed=3), said(0, seed=3), said(0, seed=4), said(1, seed=3), said(0), said(1)])
    assert found[0] == found[1], "another run of the step draws the same"
    one, same, other, *rest = found[0]
    assert one == same != other
    assert len({one, other, *rest}) == 5, "another episode of the group draws otherwise"


def test_the_responses_of_openais_client(play: Play, scripted: Any) -> None:
    openai = pytest.importorskip("openai")
    said = iter([f"Let me see. {COMPARE}", "done", "streamed", COMPARE])
    policy = scripted(lambda prompt, seed: next(said))
    played = play(policy)
    client = openai.OpenAI(base_url=played.gateway.url, api_key=played.episodes[0].token, max_retries=0)
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    given: list[Any] = [{"role": "user", "content": "Guess."}]
    first = client.responses.create(model="any", instructions="Play.", input=given, tools=tools)
    assert first.output_text == "Let me see."
    assert (first.status, first.output[1].name, first.output[1].arguments) == ("completed", "compare", '{"number": 3}')
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "Too low."}
    given += [*(item.model_dump() for item in first.output), result]
    second = client.responses.create(model="any", instructions="Play.", input=given, tools=tools)
    assert second.output_text == "done"
    assert second.usage.output_tokens == len(policy.wrote[1].tokens_T)
    assert played.episodes[0].completion().starts == (0,)
    with client.responses.stream(model="any", input="x") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "streamed"
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "response.output_text.delta" in kinds
    *_, last = client.responses.create(model="any", input="y", tools=tools, stream=True)
    assert [item.type for item in last.response.output] == ["function_call"]


@pytest.mark.parametrize(
    "body",
    [
        *({"previous_response_id": "resp_1"}, {"background": True}, {"store": True}, {"truncation": "auto"}),
        *({"include": ["reasoning.encrypted_content"]}, {"reasoning": {"effort": "low"}}, {"max_tool_calls": 1}),
        *({"text": {"format": {"type": "json_object"}}}, {"tools": [{"type": "web_search"}]}, {"instructions": 1}),
        {"tool_choice": "any", "tools": [{"type": "function", "name": "f"}]},
        *({"max_output_tokens": 0}, {"temperature": 0.1}, {"n": 2}, {"input": None}),
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    ],
    ids=lambda body: next(iter(body)),
)
def test_what_a_response_cannot_have_is_refused_by_name(play: Play, scripted: Any, body: dict[str, Any]) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    response = played.post(path="/responses", **({"input": "x"} | body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(body)))
    assert len(played.episodes[0].calls) == 0


def test_a_stream_has_the_same_parts(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: COMPARE))
    for tools in ([], TOOLS):
        response = played.post(messages=[{"role": "user", "content": "x"}], stream=True, tools=tools)
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        called = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert "".join(delta.get("content", "") for delta in deltas) == ("" if tools else COMPARE)
        assert [(call["index"], call["function"]["name"]) for call in called] == [(0, "compare")] * bool(tools)
    assert len(played.episodes[0].calls) == 2


def test_several_choices_share_a_prompt_and_are_all_trained(play: Play, scripted: Any) -> None:
    policy = scripted(lambda prompt, seed: f"{seed:x}")
    played = play(policy)
    choices = played.chat("x", n=3)["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 3
    done = played.episodes[0].completion()
    assert len(done.starts) == 3
    assert done.num_actions == sum(len(sample.tokens_T) for sample in policy.wrote)


def test_a_client_that_asks_again_gets_the_answer_that_it_missed_once(play: Play, scripted: Any) -> None:
    policy = scripted(lambda prompt, seed: f"{seed:x}")
    played = play(policy)
    first = played.chat("x")
    again = played.chat("x", headers=RETRY)
    assert again["choices"] == first["choices"]
    assert len(policy.wrote) == 1
    assert played.chat("x")["choices"] != first["choices"], "without the mark of a retry it is a second question"
    streamed = played.post(messages=[{"role": "user", "content": "x"}], stream=True, headers=RETRY)
    assert streamed.status_code == 200, "another body, though the same question"
    wrote = sorted(policy.wrote, key=lambda s: s.tokens_T.tobytes())
    assert trained(played) == [int(t) for sample in wrote for t in sample.tokens_T]


def test_a_call_whose_client_has_gone_leaves_nothing_and_is_drawn_again_the_same(play: Play, scripted: Any) -> None:
    gone, seeds = threading.Event(), []

    def say(prompt: str, seed: int) -> str:
        seeds.append(seed)
        if len(seeds) == 1:
            assert gone.wait(20)
        return "said"

    played = play(scripted(say))
    episode = played.episodes[0]
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {episode.token}\r\n"
    with socket.create_connection((played.gateway.host, played.gateway.port), timeout=20) as connection:
        connection.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        while not seeds:
            pass
    while not episode.dropped:
        pass
    gone.set()
    played.chat("x")
    assert seeds[0] == seeds[1]
    assert len(episode.calls) == 1
    assert trained(played) == [int(t) for t in episode.completion().tokens_T[episode.completion().action_T]]


ASSISTANT = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("word", "body"),
    [
        ("Leave it out", {"temperature": 0}),
        ("Leave it out", {"temperature": 1.5}),
        ("top_p", {"top_p": 0.9}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
        *(("store", {"store": True}), ("service_tier", {"service_tier": "flex"}), ("timeout", {"timeout": 3})),
        ("every", {"stream": True, "stream_options": {"every": 2}}),
        ("alternatives", {"logprobs": True, "top_logprobs": 2}),
        ("function_call", {"messages": [ASSISTANT | {"function_call": {"name": "f"}}]}),
        ("names no function", {"messages": [ASSISTANT | {"tool_calls": [{"id": "1"}]}]}),
        ("tool_calls", {"messages": [ASSISTANT | {"tool_calls": "x"}]}),
        *(("tools", {"tools": [{"type": "web_search"}]}), ("tools", {"tools": "all"})),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("messages", {"messages": []}),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(play: Play, scripted: Any, word: str, body: dict[str, Any]) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    response = played.post(**({"messages": [{"role": "user", "content": "x"}]} | body))
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]
    assert len(played.episodes[0].calls) == 0


def test_other_paths_and_other_keys_are_refused(play: Play, scripted: Any) -> None:
    played, messages = play(scripted(lambda prompt, seed: "x")), [{"role": "user", "content": "x"}]
    for status, word, asked in (
        (404, "only chats", {"path": "/completions", "prompt": "x"}),
        (404, "/v1/chat/completions", {"path": "/elsewhere", "messages": messages}),
        (401, "no episode", {"messages": messages, "token": "x" * 43}),
        (401, "no episode", {"messages": messages, "token": "no-such-key"}),
    ):
        response = played.post(**asked)
        assert response.status_code == status
        assert word in response.json()["error"]["message"]
    large = [{"role": "user", "content": "x " * 2**20}]
    assert played.post(messages=large, token="stranger").status_code in (401, 413)
    assert len(played.episodes[0].calls) == 0


def test_past_its_calls_its_context_or_its_end_an_episode_is_scored_as_it_stands(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: "x"), episodes=2, most_calls=2, limit=60)
    played.chat("x", n=2)
    refused = played.post(messages=[{"role": "user", "content": "y"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "call_limit_reached")
    assert played.episodes[0].completion().stop_reason is StopReason.TURNS
    played.chat("x", number=1)
    full = played.post(1, messages=[{"role": "user", "content": "word " * 80}])
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert played.episodes[1].completion().stop_reason is StopReason.LENGTH
    played.episodes[0].end()
    assert played.post(messages=[{"role": "user", "content": "x"}]).status_code == 410
    assert len(played.episodes[0].calls) == 2
    policy = scripted(lambda prompt, seed: "one two three four five")
    played = play(policy)
    assert played.chat("x", max_tokens=3)["choices"][0]["finish_reason"] == "length"
    assert trained(played) == policy.wrote[0].tokens_T[:3].tolist()
    assert played.episodes[0].completion().stop_reason is StopReason.LENGTH


def test_the_agents_clock_stands_still_while_the_policy_works(play: Play, scripted: Any) -> None:
    during: list[float] = []
    played = play(scripted(lambda prompt, seed: during.extend(played.episodes[0].own_s for _ in range(2)) or "x"))
    played.episodes[0].begin()
    played.chat("x")
    assert during[0] == during[1]
    while played.episodes[0].own_s <= during[0]:  # once the answer has been sent, it goes on
        pass


def test_a_number_that_is_not_finite_ends_the_run(play: Play, scripted: Any) -> None:
    policy = scripted(lambda prompt, seed: "x")
    one = policy._one
    policy._one = lambda request, seed: replace(one(request, seed), logprobs_T=np.array([np.nan, 0.0]))
    played = play(scripted(lambda prompt, seed: "x"))
    batcher = Batcher(policy, is_run=True)
    played.episodes[0]._batcher = batcher
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(played.post, messages=[{"role": "user", "content": "x"}])
        with pytest.raises(NonFiniteError):
            batcher.run()
        assert asked.result().status_code == 503


# ---------------------------------------------------------------- the tokens of an agent's calls


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
