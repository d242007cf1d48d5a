"""Text of a completion that grows: certain once shown, cut at the first stop."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.use.serving.text_stream import TextStream

WORDS = st.text(alphabet="ab\n#é等🙂 ", max_size=40)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE with hardly any merge, so that characters span tokens; id 0 is special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=270, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    bpe.train_from_iterator(["the key is the sum"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


@settings(max_examples=40, deadline=None)
@example(text="aba", stops=["b", "aba"], cut=0)
@given(
    text=WORDS, stops=st.lists(st.text(alphabet="ab\n#é", min_size=1, max_size=3), max_size=2), cut=st.integers(0, 3)
)
def test_what_is_shown_joins_to_the_text_before_the_first_stop(
    tokenizer: Any, text: str, stops: list[str], cut: int
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = [*ids[: len(ids) - cut], 0]  # may end in half a character; the special token is no text
    stream = TextStream(tokenizer, stops)
    shown = []
    for token in ids:
        shown.append(stream.add(token))
        assert stream.text.startswith("".join(shown)), "what has been shown stays"
    shown.append(stream.finish())
    # the stop that is complete first ends the text, even where a longer one began before it: `b` in `aba`
    texts = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
    whole = next((text for text in texts if any(stop in text for stop in stops)), texts[-1])
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(shown) == stream.text == whole[: min(places, default=len(whole))]
    assert stream.is_stopped == bool(places)


def test_nothing_waits_that_cannot_become_a_stop(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ["\n\n"])
    pieces = [stream.add(token) for token in tokenizer("ab\na\n\nb", add_special_tokens=False)["input_ids"]]
    assert pieces == ["a", "b", "", "\na", "", "", ""]
    assert stream.is_stopped
