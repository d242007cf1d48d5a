"""How long a context is, which prompts fit it, and the texts of single tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable, TrainingTable
from retrain.text.tokenizer import context_length, fit_context, token_texts
from tests.kit.problems import refused

QWEN = {"model_type": "qwen3", "max_position_embeddings": 1024}


def of_model(model, **training):
    return Config(tables={"model": ModelTable(model=str(model)), "training": TrainingTable(**training)})


def folder_with(tmp_path, content):
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("content", "length"),
    [
        (json.dumps(QWEN), 1024),
        (json.dumps({"model_type": "gpt2", "n_positions": 77}), 77),
        (json.dumps({"model_type": "llava", "text_config": {**QWEN, "max_position_embeddings": 512}}), 512),
        (json.dumps({"model_type": "bloom"}), None),
        (json.dumps({"model_type": "nobody-knows-it"}), None),
        (json.dumps({**QWEN, "max_position_embeddings": 0}), None),
        ("{", None),
        ("[]", None),
        (None, None),
    ],
)
def test_the_length_is_read_from_the_models_configuration(tmp_path, plugins, content, length):
    assert context_length(of_model(folder_with(tmp_path, content)), plugins) == length


@settings(max_examples=50)
@given(st.lists(st.integers(0, 20), max_size=12), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 20))
def test_what_fits_is_kept_and_the_rest_is_counted(lengths, context, max_tokens):
    fitting = [i for i, n in enumerate(lengths) if 0 < n < (context or 99)]
    config = of_model("m", max_tokens=max_tokens)
    if lengths and not fitting:
        assert refused(fit_context, lengths, config, context) == ["data.no-usable-prompt"]
        return
    kept, notes = fit_context(lengths, config, context)
    assert kept == fitting
    told = "\n".join(notes)
    long = [n for n in lengths if n >= (context or 99)]
    assert (f"{len(long)} prompts of more than" in told) is bool(long)
    assert ("without a token" in told) is (0 in lengths)
    assert ("less room than max_tokens" in told) is any((context or 99) - lengths[i] < max_tokens for i in kept)


def test_the_notes_say_how_long_and_how_much_room():
    _, notes = fit_context([10, 1024, 3000, 1000, 1023], of_model("builtin:tiny", max_tokens=100), 1024)
    assert notes == (
        "2 prompts of more than 1023 tokens left out, the longest of 3000 (context of builtin:tiny: 1024)",
        "2 of 3 prompts leave less room than max_tokens = 100: 1 tokens at least (context of builtin:tiny: 1024)",
    )


@pytest.fixture(scope="module")
def tokenizer():
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
def test_texts_of_tokens_join_to_the_text(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_a_cut_character_is_shown_as_broken(tokenizer):
    ids = tokenizer("ok 等", add_special_tokens=False)["input_ids"][:-1]
    assert "".join(token_texts(tokenizer, ids)).startswith("ok ")
