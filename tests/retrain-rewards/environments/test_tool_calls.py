"""Tool calls in what a policy wrote, friendly and hostile."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import parse_tool_calls
from retrain_rewards.environments.episode import UnsupportedContentError, plain_messages, text_of

plain = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


def test_calls_are_taken_out_of_the_text_in_order() -> None:
    one, two = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', '<tool_call>{"name": "b"}</tool_call>'
    text = f"First {one} then {two}"
    content, calls = parse_tool_calls(text)
    assert content == "First  then"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("a", {"x": 1}), ("b", {})]
    content, calls = parse_tool_calls('<tool_call>{]</tool_call><tool_call>{"name": "a"}</tool_call>')
    assert (content, [call.name for call in calls]) == ("<tool_call>{]</tool_call>", ["a"])


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "<tool_call>{]</tool_call>",
        '<tool_call>{"name": "a", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "a", "arguments": {}}',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "a", "arguments": {"x": ' + "9" * 10_000 + "}}</tool_call>",
        "<tool_call>" * 2000,
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert parse_tool_calls(text) == (text, ())


@given(st.text(min_size=1), st.dictionaries(st.text(), plain, max_size=3))
def test_what_is_written_is_read(name: str, arguments: dict[str, object]) -> None:
    body = json.dumps({"name": name, "arguments": arguments})
    if "</tool_call>" in body:
        return
    parse_tool_calls(f"<tool_call>{name}</tool_call>{name}")  # any text is read without an error
    _, (call,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_messages_become_plain() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = plain_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": None},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
    )
    assert said == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    for content in ([{"type": "image_url", "image_url": {}}], 7, [{"type": "input_audio"}], [None]):
        with pytest.raises(UnsupportedContentError):
            text_of(content)
