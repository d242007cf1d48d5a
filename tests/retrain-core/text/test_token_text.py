"""Token pieces join to the text, whatever the tokenizer does with characters that span tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.text.tokenizer import token_texts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE with hardly any merge: most characters beyond ASCII span several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(["the key is the sum"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_texts_of_tokens_join_to_the_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_cut_character_is_shown_as_broken(tokenizer: Any) -> None:
    ids = tokenizer("ok 等", add_special_tokens=False)["input_ids"][:-1]
    assert "".join(token_texts(tokenizer, ids)).startswith("ok ")
