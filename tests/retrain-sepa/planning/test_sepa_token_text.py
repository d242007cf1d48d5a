"""Token ids as text: each decoder agrees with the tokenizer's own, and offsets cover the characters of each token."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from retrain.api import CreditError
from retrain_sepa.token_text import (
    DecodedTokens,
    IncrementalDecoder,
    TableDecoder,
    decode_bytes,
    decoder_steps,
    token_bytes,
    token_decoder,
    vocabulary_bytes,
)

same_fixture = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
id_lists = st.lists(st.integers(0, 400), max_size=40)


def plain_decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def ids_of(tokenizer, text):
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)


def readable(text):
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@same_fixture
@given(id_lists)
def test_any_ids_decode_as_the_tokenizer_does(tokenizer, ids):
    ids = [token for token in ids if token < len(tokenizer)]
    decoder = token_decoder(tokenizer)
    assert isinstance(decoder, TableDecoder)
    decoded = decoder.decode(np.asarray(ids, dtype=np.int64))
    assert decoder.trusted
    ours, theirs = readable(decoded.text), plain_decode(tokenizer, ids)
    if "\ufffd" not in ours:
        assert theirs.endswith(ours.lstrip())
    check_offsets(decoded, len(ids))


def check_offsets(decoded, count):
    starts, ends = decoded.starts_T, decoded.ends_T
    assert starts.shape == ends.shape == (count,)
    assert (starts <= ends).all()
    assert (np.diff(starts) >= 0).all()
    assert (np.diff(ends) >= 0).all()
    covered = np.zeros(len(decoded.text), bool)
    for start, end in zip(starts, ends, strict=True):
        covered[start:end] = True
    assert covered.all()


@same_fixture
@given(st.text(alphabet="wait letmchk,.'’é等 \n", max_size=60))
def test_both_decoders_agree_on_real_text(tokenizer, text):
    ids = ids_of(tokenizer, text)
    fast = token_decoder(tokenizer).decode(ids)
    slow = IncrementalDecoder(lambda part: plain_decode(tokenizer, part)).decode(ids)
    check_offsets(slow, len(ids))
    shift = len(fast.text) - len(slow.text)  # a blank at the very start that belongs to no token
    assert fast.text[shift:] == slow.text
    np.testing.assert_array_equal(np.maximum(fast.starts_T - shift, 0), slow.starts_T)
    np.testing.assert_array_equal(np.maximum(fast.ends_T - shift, 0), slow.ends_T)


def test_tokens_that_share_a_character_both_cover_it(families):
    tokenizer = families["byte_level"]
    ids = ids_of(tokenizer, "é等\U0001f600")
    decoded = token_decoder(tokenizer).decode(ids)
    assert decoded.text == "é等\U0001f600"
    smiley = [t for t in range(len(ids)) if decoded.starts_T[t] == 2]
    assert len(smiley) == 4
    assert all(decoded.ends_T[t] == 3 for t in smiley)
    cut = ids_of(tokenizer, "what if \U0001f600")[:-2]
    assert readable(token_decoder(tokenizer).decode(cut).text) == plain_decode(tokenizer, cut.tolist())


@pytest.mark.parametrize("tokens", [[], [10**9], [10**9, 5, 2**40]])
def test_ids_past_the_vocabulary_have_no_text(tokenizer, tokens):
    decoder = token_decoder(tokenizer)
    decoded = decoder.decode(np.asarray(tokens, dtype=np.int64))
    np.testing.assert_array_equal(decoded.ends_T > decoded.starts_T, [token == 5 for token in tokens])
    with pytest.raises(CreditError, match=f"-3 at position {len(tokens)} .*credit.negative-token"):
        decoder.decode(np.array([*tokens, -3]))


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_bytes_and_characters_stay_in_step(data):
    text, char_of_byte = decode_bytes(data)
    assert char_of_byte.size == len(data) + 1
    assert char_of_byte[-1] == len(text)
    for index, char in enumerate(text):
        place = np.flatnonzero(char_of_byte[:-1] == index)
        assert data[place[0] : place[-1] + 1] == char.encode("utf-8", "surrogateescape")


class Odd:
    """A tokenizer whose decoding is not the sum of its tokens."""

    def __init__(self, real):
        self.real = real
        self.backend_tokenizer = real.backend_tokenizer

    def get_vocab(self):
        return self.real.get_vocab()

    def decode(self, ids, **options):
        return self.real.decode(ids, **options).replace("we", "what if")


def test_a_tokenizer_that_disagrees_is_decoded_incrementally(families, caplog):
    odd = Odd(families["byte_level"])
    decoder = token_decoder(odd)
    ids = ids_of(odd.real, "so we go")
    with caplog.at_level(logging.WARNING, logger="retrain.credit"):
        decoded = decoder.decode(ids)
        decoder.decode(ids)
    assert decoded.text == "so what if go"
    assert not decoder.trusted
    assert len(caplog.records) == 1
    check_offsets(decoded, len(ids))


def test_a_decoder_of_an_unknown_kind_is_decoded_incrementally():
    backend = Tokenizer(models.WordLevel({"▁what": 0, "▁if": 1, "▁x": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()])
    from transformers import PreTrainedTokenizerFast

    decoder = token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(decoder, IncrementalDecoder)
    decoded = decoder.decode(np.array([2, 0, 1, 2]))
    assert decoded.text == " x what if x"
    assert decoded.covering([(3, 10)]).tolist() == [False, True, True, False]


def test_incremental_decoding_gives_up_on_endless_broken_bytes(families):
    tokenizer = families["byte_level"]
    broken = tokenizer.convert_tokens_to_ids("ÿ")  # the byte FF
    decoded = IncrementalDecoder(lambda ids: plain_decode(tokenizer, ids)).decode(np.full(200, broken))
    assert len(decoded.text) == 200
    check_offsets(decoded, 200)


def test_covering_touches_nothing_beside_the_span():
    starts, ends = np.array([0, 2, 2, 5, 5]), np.array([2, 2, 5, 5, 6])
    decoded = DecodedTokens(text="abcdef", starts_T=starts, ends_T=ends)
    assert decoded.covering([]).tolist() == [False] * 5
    assert decoded.covering([(2, 5)]).tolist() == [False, False, True, False, False]
    assert decoded.covering([(0, 1), (4, 6)]).tolist() == [True, False, True, False, True]
    assert decoded.covering([(0, 6), (1, 3)]).tolist() == [True, False, True, False, True]


LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
WORDPIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}


@pytest.mark.parametrize(
    ("decoder", "token", "expected"),
    [
        ({"type": "ByteLevel"}, "Ġlet", b" let"),
        ({"type": "ByteLevel"}, "Ċ", b"\n"),
        ({"type": "ByteLevel"}, "âĢ", b"\xe2\x80"),
        ({"type": "ByteLevel"}, "<|im_end|>", b"<|im_end|>"),
        ({"type": "ByteLevel"}, "two words", b"two words"),
        (LLAMA, "▁let", b" let"),
        (LLAMA, "<0xE2>", b"\xe2"),
        (LLAMA, "<0xE2>x", b"<0xE2>x"),
        ({"type": "Metaspace", "replacement": "▁"}, "▁a▁b", b" a b"),
        (WORDPIECE, "let", b" let"),
        (WORDPIECE, "##ting", b"ting"),
        (WORDPIECE, ",", b","),
        ({"type": "BPEDecoder", "suffix": "</w>"}, "let</w>", b"let "),
        (None, "let", b" let"),
    ],
)
def test_bytes_of_a_token(decoder, token, expected):
    assert token_bytes(token, decoder_steps(decoder)) == expected


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    ],
)
def test_other_decoders_are_not_guessed(decoder):
    assert decoder_steps(decoder) is None


def test_every_byte_has_its_letter():
    steps = decoder_steps({"type": "ByteLevel"})
    assert {token_bytes(letter, steps) for letter in ByteLevel.alphabet()} == {bytes([byte]) for byte in range(256)}


def test_without_a_fast_tokenizer_there_is_no_table():
    assert vocabulary_bytes(object()) is None


VOCABULARY = {"▁what": 0, "▁if": 1, "▁x": 2, "w</w>": 3, "[UNK]": 4, ".": 5, "##s": 6}


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.BPEDecoder(), decoders.WordPiece(cleanup=False), decoders.Fuse()]
)
def test_tables_agree_with_the_decoder_itself(decoder):
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    table = token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(table, TableDecoder)
    for ids in ([2, 0, 1, 5, 6], [0, 1], [5, 3, 3, 2], [6, 4, 0]):
        decoded = table.decode(np.array(ids))
        assert decoded.text.strip() in backend.decode(ids)
    assert table.trusted


class PythonDecoder:
    def decode_chain(self, tokens):
        return [token.replace("▁", " ") for token in tokens]


def test_a_decoder_written_in_python_is_decoded_incrementally():
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    backend.decoder = decoders.Decoder.custom(PythonDecoder())
    decoder = token_decoder(Wrapped(backend))
    assert isinstance(decoder, IncrementalDecoder)
    assert decoder.decode(np.array([2, 0, 1])).covering([(3, 10)]).tolist() == [False, True, True]


class Wrapped:
    def __init__(self, backend):
        self.backend_tokenizer = backend

    def get_vocab(self):
        return self.backend_tokenizer.get_vocab()

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
