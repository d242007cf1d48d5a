"""Whoever holds an episode's key gets its policy; every answer that was received is trained once, and nothing else."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import NonFiniteError
from retrain.kernel.types import StopReason
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
    first = played.chat("Guess.")
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


def test_another_episode_of_the_group_draws_otherwise_and_a_repetition_the_same(play: Play, scripted: Any) -> None:
    def said() -> list[str]:
        played = play(scripted(lambda prompt, seed: f"{seed:x}"), episodes=2)
        return [played.chat("x", number=n)["choices"][0]["message"]["content"] for n in (0, 1)]

    first = said()
    assert first[0] != first[1]
    assert said() == first


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


def test_a_forced_call_that_is_not_made_stays_text(play: Play, scripted: Any) -> None:
    choice = play(scripted(lambda prompt, seed: "no")).chat("x", tools=TOOLS, tool_choice="required")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("<tool_call>\nno", "stop")


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


def test_a_seed_repeats_an_answer_within_its_episode_alone(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: f"{seed:x}"), episodes=2)
    one, same, other = (played.chat("x", seed=seed)["choices"][0]["message"]["content"] for seed in (3, 3, 4))
    assert one == same != other
    assert played.chat("x", seed=3, number=1)["choices"][0]["message"]["content"] != one


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
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "any"}, "tool_choice"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"temperature": 0.1}, "temperature"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": None}, "input"),
        ({"instructions": 1}, "instructions"),
        ({"n": 2}, "n"),
    ],
)
def test_what_a_response_cannot_have_is_refused_by_name(
    play: Play, scripted: Any, body: dict[str, Any], param: str
) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    response = played.post(path="/responses", **({"input": "x"} | body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert len(played.episodes[0].calls) == 0


def test_an_altered_call_is_another_conversation(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: COMPARE))
    message = played.chat("Guess.", tools=TOOLS)["choices"][0]["message"]
    message["tool_calls"][0]["function"]["arguments"] = '{"number": 4}'
    played.chat("Guess.", message, "Go on.", tools=TOOLS)
    assert len(played.episodes[0].completion().starts) == 2


@pytest.mark.parametrize("extra", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(play: Play, scripted: Any, extra: dict[str, Any]) -> None:
    choice = play(scripted(lambda prompt, seed: COMPARE)).chat("x", **extra)["choices"][0]
    assert choice["message"]["content"] == COMPARE
    assert choice["finish_reason"] == "stop"


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
    assert trained(played) == sorted_ids(policy)


def sorted_ids(policy: Any) -> list[int]:
    wrote = sorted(policy.wrote, key=lambda s: s.tokens_T.tobytes())
    return [int(t) for sample in wrote for t in sample.tokens_T]


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


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"temperature": 0}, 400, "Leave it out"),
        ({"temperature": 1.5}, 400, "Leave it out"),
        ({"top_p": 0.9}, 400, "top_p"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, 400, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, 400, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, 400, "parallel_tool_calls"),
        ({"store": True}, 400, "store"),
        ({"service_tier": "flex"}, 400, "service_tier"),
        ({"timeout": 3}, 400, "timeout"),
        ({"stream": True, "stream_options": {"every": 2}}, 400, "every"),
        ({"logprobs": True, "top_logprobs": 2}, 400, "alternatives"),
        ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, 400, "function_call"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, 400, "names no function"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools"),
        ({"tools": "all"}, 400, "tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": "x"}]}, 400, "tool_calls"),
        ({"messages": []}, 400, "messages"),
        ({"path": "/completions", "prompt": "x", "messages": None}, 404, "only chats"),
        ({"path": "/elsewhere"}, 404, "/v1/chat/completions"),
        ({"token": "x" * 43}, 401, "no episode"),
        ({"token": "no-such-key"}, 401, "no episode"),
        ({"messages": [{"role": "user", "content": "x " * 2**20}], "token": "stranger"}, 413, "MiB"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    play: Play, scripted: Any, body: dict[str, Any], status: int, word: str
) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    asked = {"messages": [{"role": "user", "content": "x"}]} | body
    response = played.post(**{name: value for name, value in asked.items() if value is not None})
    assert response.status_code == status or (status == 413 and response.status_code == 401)
    assert status == 413 or word in response.json()["error"]["message"]
    assert len(played.episodes[0].calls) == 0


def test_the_training_temperature_any_model_and_a_seed_are_accepted(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    assert played.chat("x", temperature=0.7, model="gpt-5", seed=3, max_tokens=10**9)["model"] == "gpt-5"


def test_past_its_calls_and_past_its_context_an_episode_is_scored_as_it_stands(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: "x"), episodes=2, most_calls=2, limit=60)
    played.chat("x", n=2)
    refused = played.post(messages=[{"role": "user", "content": "y"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "call_limit_reached")
    assert played.episodes[0].completion().stop_reason is StopReason.TURNS
    played.chat("x", number=1)
    full = played.post(1, messages=[{"role": "user", "content": "word " * 80}])
    assert (full.status_code, full.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert played.episodes[1].completion().stop_reason is StopReason.LENGTH


def test_a_call_after_the_end_is_refused_for_good(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: "x"), episodes=2)
    played.chat("x")
    played.episodes[0].end()
    assert played.post(messages=[{"role": "user", "content": "x"}]).status_code == 410
    assert len(played.episodes[0].calls) == 1
    played.chat("x", number=1)


def test_a_cut_answer_says_so(play: Play, scripted: Any) -> None:
    policy = scripted(lambda prompt, seed: "one two three four five")
    played = play(policy)
    choice = played.chat("x", max_tokens=3)["choices"][0]
    assert choice["finish_reason"] == "length"
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


def test_no_record_shows_a_key(play: Play, scripted: Any) -> None:
    played = play(scripted(lambda prompt, seed: "x"))
    assert len(played.episodes[0].token) >= 32
    assert played.episodes[0].token not in json.dumps(played.episodes[0].task)
    assert "4" not in str(played.episodes[0].task.get("reference", "")), "the reference is the verifier's"
