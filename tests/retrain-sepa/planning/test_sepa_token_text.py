"""Token ids as text: each decoder agrees with the tokenizer's own, and offsets cover the characters of each token."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from retrain.api import CreditError
from retrain_sepa import token_text

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
    decoder = token_text.token_decoder(tokenizer)
    assert isinstance(decoder, token_text.TableDecoder)
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
    fast = token_text.token_decoder(tokenizer).decode(ids)
    slow = token_text.IncrementalDecoder(lambda part: plain_decode(tokenizer, part)).decode(ids)
    check_offsets(slow, len(ids))
    shift = len(fast.text) - len(slow.text)  # a blank at the very start that belongs to no token
    assert fast.text[shift:] == slow.text
    np.testing.assert_array_equal(np.maximum(fast.starts_T - shift, 0), slow.starts_T)
    np.testing.assert_array_equal(np.maximum(fast.ends_T - shift, 0), slow.ends_T)


def test_tokens_that_share_a_character_both_cover_it(families):
    tokenizer = families["byte_level"]
    ids = ids_of(tokenizer, "é等\U0001f600")
    decoded = token_text.token_decoder(tokenizer).decode(ids)
    assert decoded.text == "é等\U0001f600"
    smiley = [t for t in range(len(ids)) if decoded.starts_T[t] == 2]
    assert len(smiley) == 4
    assert all(decoded.ends_T[t] == 3 for t in smiley)
    cut = ids_of(tokenizer, "what if \U0001f600")[:-2]
    assert readable(token_text.token_decoder(tokenizer).decode(cut).text) == plain_decode(tokenizer, cut.tolist())


@pytest.mark.parametrize("tokens", [[], [10**9], [10**9, 5, 2**40]])
def test_ids_past_the_vocabulary_have_no_text(tokenizer, tokens):
    decoder = token_text.token_decoder(tokenizer)
    decoded = decoder.decode(np.asarray(tokens, dtype=np.int64))
    np.testing.assert_array_equal(decoded.ends_T > decoded.starts_T, [token == 5 for token in tokens])
    with pytest.raises(CreditError, match=f"-3 at position {len(tokens)} .*credit.negative-token"):
        decoder.decode(np.array([*tokens, -3]))


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_bytes_and_characters_stay_in_step(data):
    text, char_of_byte = token_text.decode_bytes(data)
    assert char_of_byte.size == len(data) + 1
    assert char_of_byte[-1] == len(text)
    for index, char in enumerate(text):
        place = np.flatnonzero(char_of_byte[:-1] == index)
        assert data[place[0] : place[-1] + 1] == char.encode("utf-8", "surrogateescape")


def test_a_decoder_of_an_unknown_kind_is_decoded_incrementally():
    backend = Tokenizer(models.WordLevel({"▁what": 0, "▁if": 1, "▁x": 2, "[UNK]": 3}, unk_token="[UNK]"))
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()])
    decoder = token_text.token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(decoder, token_text.IncrementalDecoder)
    decoded = decoder.decode(np.array([2, 0, 1, 2]))
    assert decoded.text == " x what if x"
    assert decoded.covering([(3, 10)]).tolist() == [False, True, True, False]
    assert token_text.vocabulary_bytes(object()) is None
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    regex = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}
    for other in ({"type": "CTC"}, regex, {"type": "Sequence", "decoders": [strip]}):
        assert token_text.decoder_steps(other) is None, "it is not guessed"


class Odd:
    """A tokenizer whose decoding is not the sum of its tokens."""

    def __init__(self, real):
        self.backend_tokenizer, self.get_vocab, self.real = real.backend_tokenizer, real.get_vocab, real

    def decode(self, ids, **options):
        return self.real.decode(ids, **options).replace("we", "what if")


def test_a_tokenizer_that_disagrees_is_decoded_incrementally_and_gives_up_on_broken_bytes(families, caplog):
    tokenizer = families["byte_level"]
    decoder, ids = token_text.token_decoder(Odd(tokenizer)), ids_of(tokenizer, "so we go")
    with caplog.at_level(logging.WARNING, logger="retrain.credit"):
        decoded = decoder.decode(ids)
        decoder.decode(ids)
    assert (decoded.text, decoder.trusted, len(caplog.records)) == ("so what if go", False, 1)
    check_offsets(decoded, len(ids))
    broken = tokenizer.convert_tokens_to_ids("ÿ")  # the byte FF
    decoded = token_text.IncrementalDecoder(lambda ids: plain_decode(tokenizer, ids)).decode(np.full(200, broken))
    assert len(decoded.text) == 200
    check_offsets(decoded, 200)


def test_covering_touches_nothing_beside_the_span():
    starts, ends = np.array([0, 2, 2, 5, 5]), np.array([2, 2, 5, 5, 6])
    decoded = token_text.DecodedTokens(text="abcdef", starts_T=starts, ends_T=ends)
    assert decoded.covering([]).tolist() == [False] * 5
    assert decoded.covering([(2, 5)]).tolist() == [False, False, True, False, False]
    assert decoded.covering([(0, 1), (4, 6)]).tolist() == [True, False, True, False, True]
    assert decoded.covering([(0, 6), (1, 3)]).tolist() == [True, False, True, False, True]


STEPS = [
    *(({"type": "ByteLevel"}, "âĢ", b"\xe2\x80"), ({"type": "ByteLevel"}, "<|im_end|>", b"<|im_end|>")),
    ({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}, "<0xE2>x", b"<0xE2>x"),
    ({"type": "WordPiece", "prefix": "##", "cleanup": True}, ",", b","),
]
VOCABULARY = {"▁what": 0, "▁if": 1, "▁x": 2, "w</w>": 3, "[UNK]": 4, ".": 5, "##s": 6}


@pytest.mark.parametrize(
    "decoder", [None, decoders.Metaspace(), decoders.BPEDecoder(), decoders.WordPiece(cleanup=False), decoders.Fuse()]
)
def test_tables_agree_with_the_decoder_itself(decoder):
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    table = token_text.token_decoder(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert isinstance(table, token_text.TableDecoder)
    for ids in ([2, 0, 1, 5, 6], [0, 1], [5, 3, 3, 2], [6, 4, 0]):
        decoded = table.decode(np.array(ids))
        assert decoded.text.strip() in backend.decode(ids)
    assert table.trusted
    for steps, token, expected in STEPS:
        assert token_text.token_bytes(token, token_text.decoder_steps(steps)) == expected
