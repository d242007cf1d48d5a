"""Only completions that the requested distribution could have produced get through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.engines.client import BadAnswerError
from retrain.engines.dialect import ROUNDING, CompletionRequest, RawCompletion, checked
from retrain.kernel.types import StopReason

ASKED = CompletionRequest(
    prompt_T=[5, 6],
    seed=1,
    max_tokens=4,
    temperature=0.7,
    model="m",
    adapter="",
    stop_ids=frozenset({0, 2}),
    vocabulary=10,
)
GOOD = RawCompletion(tokens=[3, 4, 0], logprobs=[-1.0, -0.5, -0.1], finish_reason="stop", prompt=[5, 6], model="m")


def test_a_good_answer() -> None:
    drawn = checked(GOOD, ASKED)
    assert drawn.tokens_T.tolist() == [3, 4, 0]
    assert drawn.tokens_T.dtype == np.int64
    assert drawn.logprobs_T.tolist() == [-1.0, -0.5, -0.1]
    assert drawn.stop_reason is StopReason.EOS
    asked = replace(ASKED, adapter="a")
    assert checked(replace(GOOD, model="a"), asked)
    with pytest.raises(BadAnswerError, match="'m' answered instead of 'a'"):
        checked(GOOD, asked)
    for reason in ("length", "stop"):  # the last token that was asked for is one that ends
        said = replace(GOOD, tokens=[3, 4, 5, 2], logprobs=[-1.0] * 4, finish_reason=reason)
        assert checked(said, ASKED).stop_reason is StopReason.EOS
    assert checked(replace(GOOD, logprobs=[1e-6, 0, -1]), ASKED).logprobs_T.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [3, 0, 4, 0], "logprobs": [-1.0] * 4}, "after an end-of-sequence token"),
        ({"tokens": [3, 4], "logprobs": [-1.0] * 2}, "stopped at token 4: it does not end a sequence"),
        ({"tokens": [3], "logprobs": [-1.0], "finish_reason": "length"}, "cut off after 1"),
        ({"finish_reason": "length"}, "finish reason 'length'"),
        ({"finish_reason": "content_filter"}, "finish reason 'content_filter'"),
        ({"prompt": [5]}, "another prompt"),
        ({"tokens": None}, "no token ids"),
        ({"logprobs": None}, "no log-probabilities"),
        ({"logprobs": [True, -1.0, -1.0]}, "True is not a log-probability"),
        ({"logprobs": [2 * ROUNDING, 0, -1]}, "is not a log-probability"),
    ],
)
def test_what_is_wrong_is_said(changes, said) -> None:
    with pytest.raises(BadAnswerError, match=said):
        checked(replace(GOOD, **changes), ASKED)


anything = st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.floats(), st.text(max_size=2))


@given(
    tokens=st.lists(anything, max_size=6),
    logprobs=st.lists(anything, max_size=6),
    reason=st.sampled_from(["stop", "length", "abort", None, "eos"]),
)
def test_whatever_gets_through_is_sound(tokens, logprobs, reason) -> None:
    try:
        drawn = checked(replace(GOOD, tokens=tokens, logprobs=logprobs, finish_reason=reason), ASKED)
    except BadAnswerError:
        return
    assert 1 <= len(drawn.tokens_T) == len(drawn.logprobs_T) <= ASKED.max_tokens
    assert drawn.tokens_T.tolist() == tokens
    assert {type(token) for token in tokens} == {int}, "neither a fraction nor True is an id"
    assert not any(isinstance(value, bool | str) for value in logprobs)
    assert (drawn.tokens_T >= 0).all()
    assert (drawn.tokens_T < ASKED.vocabulary).all()
    assert np.isfinite(drawn.logprobs_T).all()
    assert (drawn.logprobs_T <= 0).all()
    ended = int(drawn.tokens_T[-1]) in ASKED.stop_ids
    assert (drawn.stop_reason is StopReason.EOS) == ended
    assert ended or len(drawn.tokens_T) == ASKED.max_tokens
