import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from retrain_sepa.token_text import (
    IncrementalDecoder,
    TableDecoder,
    decoder_steps,
    token_bytes,
    token_decoder,
    vocabulary_bytes,
)

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
