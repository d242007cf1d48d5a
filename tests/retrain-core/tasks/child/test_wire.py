"""Values arrive as they were sent, and nothing but values arrives."""

from __future__ import annotations

import json
import socket
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.tasks import Action, EpisodeResult, LoadedData, Observation
from retrain.kernel.errors import Problem
from retrain.kernel.types import Example, Outcome, Score, StopReason
from retrain.tasks.child import wire

TEXTS = st.text(st.characters(codec=None, exclude_categories=()))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
KEYS = st.booleans() | st.integers() | TEXTS | st.tuples(st.integers(), TEXTS)
DATA = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def same(first: Any, second: Any) -> bool:
    return repr(first) == repr(second)  # NaN equals itself here, and 1, 1.0 and True differ


@settings(max_examples=50)
@given(DATA)
def test_plain_data_arrives_as_it_was_sent(value: Any) -> None:
    assert same(wire.loads(wire.dumps(value)), value)


@settings(max_examples=25)
@given(TEXTS, DATA)
def test_records_arrive_as_they_were_sent(text: str, data: Any) -> None:
    example = Example(id=text, prompt=[{"role": "user", "content": text}], reference=text, info={"data": data})
    score = Score(outcome=Outcome.SCORED, value=0.5, parts={text: 1.0})
    records = [
        example,
        score,
        Score.failed(text),
        Observation(prompt=text, tools=({"type": "function"},)),
        Action(text=text, stop_reason=StopReason.TURNS),
        EpisodeResult(score=score, hit_turn_limit=True),
        LoadedData(examples=(example,), notes=(text,)),
        Problem(code="a.b", what=text, fix=text),
    ]
    arrived = wire.loads(wire.dumps({1: records}))[1]
    assert [repr(each) for each in arrived] == [repr(each) for each in records]
    assert arrived[1].outcome is Outcome.SCORED
    assert arrived[4].stop_reason is StopReason.TURNS


def test_what_json_has_looks_like_json_and_the_rest_arrives_as_plain_python() -> None:
    assert json.loads(wire.dumps({"a": [1, 2.5, "x", None, True]})) == {"a": [1, 2.5, "x", None, True]}
    assert wire.loads(wire.dumps(MappingProxyType({"!a": 1}))) == {"!a": 1}
    assert wire.loads(wire.dumps(10**6000)) == 10**6000
    for value in (np.float32(1.5), np.float64("nan"), np.int64(7), np.bool_(True), np.str_("x")):
        assert same(wire.loads(wire.dumps(value)), value.item())
    with_reward = LoadedData(examples=(), reward=object())  # type: ignore[arg-type]
    for value in ({1, 2}, b"x", object(), np.zeros(2), 1j, np.complex64(1), print, [{"a": {3}}], with_reward):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            wire.dumps(value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b'{"!os.system": "x"}',
        b'{"!Score": {"outcome": "perfect"}}',
        b'{"!Score": {"unknown": 1}}',
        b'{"!Score": []}',
        b'{"!int": "x"}',
        b'{"!int": 3}',
        b'{"!dict": 3}',
        b'{"!dict": [[[], 1]]}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_anything_else_is_an_error_of_the_wire(content: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.loads(content)


def test_frames_of_any_size_and_the_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for content in (b"", b"x", b"y" * 100_000):
            wire.send(ours, content, timeout_s=5.0)
            assert wire.receive(theirs, timeout_s=5.0) == content
        with pytest.raises(TimeoutError):
            wire.receive(theirs, timeout_s=0.01)
        ours.sendall(b"\0" * 7 + b"\5" + b"abc")  # five announced, three sent
        with pytest.raises(TimeoutError):
            wire.receive(theirs, timeout_s=0.01)
        ours.close()
        assert wire.receive(theirs, timeout_s=5.0) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff" * 8)  # a header that lies
        with pytest.raises(wire.WireError, match="a frame of"):
            wire.receive(theirs, timeout_s=5.0)
        with pytest.raises(TimeoutError):
            wire.send(theirs, b"x" * 10_000_000, timeout_s=0.01)
