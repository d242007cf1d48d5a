"""The short way to a tokenizer gives what `transformers` gives, id for id and letter for letter, or is not taken."""

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable
from retrain.text.quick_tokenizer import QuickTokenizer, quick_tokenizer
from retrain.text.tokenizer import load_tokenizer

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CORPUS = ["Hello there, what is 3 plus 4? It's 7.", "Ça va? naïve café, 12.5 % of it!", "def f(x):\n    return x"] * 4
TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "blocks": "{{ bos_token }}\n{% for m in messages %}\n  {%- if loop.first and m.role == 'system' %}\n"
    "[{{ m.content | trim }}]\n  {%- elif m.role == 'user' %}\nQ: {{ m.content | tojson }}\n  {% else %}\n"
    "A: {{ m.content | upper }}{{ eos_token }}\n  {% endif %}\n{% if loop.index > 3 %}{% break %}{% endif %}\n"
    "{% endfor %}{{ '>' if add_generation_prompt else '.' }}",
    "refusing": "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('roles: user and assistant') }}{% endif %}{{ m.content }}{% endfor %}",
    "tools": "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages[-1].content }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
}


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentence_piece():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    codes = [f"<0x{code:02X}>" for code in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIAL, *codes])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words():
    """No post-processor, no decoder, and an added word that is not special."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, "what", "is", "3"])}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("plus four", lstrip=True)])
    return tokenizer


KINDS = {"byte_level": byte_level, "sentence_piece": sentence_piece, "words": words}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make("words", settings...)`: a folder with that tokenizer, as plain as folders are."""

    def folder(kind="words", *, architecture="qwen3", **settings):
        path = tmp_path_factory.mktemp(kind)
        KINDS[kind]().save(str(path / "tokenizer.json"))
        content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **NAMES}
        kept = {name: value for name, value in (content | settings).items() if value is not ...}
        (path / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
        (path / "config.json").write_text(json.dumps({"model_type": architecture}), encoding="utf-8")
        return path

    return folder


def real(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def quick(folder, load=None):
    def never():
        raise AssertionError("the real tokenizer was asked")

    return quick_tokenizer(folder, load or never)


@pytest.fixture(scope="module", params=[(kind, name) for kind in KINDS for name in ("llama", "qwen3")])
def pair(request, make):
    """The same folder both ways; the quick one never asks the real one."""
    kind, architecture = request.param
    folder = make(kind, architecture=architecture, chat_template=TEMPLATES["blocks"])
    return quick(folder), real(folder)


@settings(max_examples=25)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=4), st.booleans())
def test_ids_and_texts_are_those_of_transformers(pair, texts, has_special):
    ours, theirs = pair
    texts = [*texts, "what is 3 plus four</s><pad> café\n", " ".join(texts) + "<s>"]
    batch = ours(texts, add_special_tokens=has_special, verbose=False)["input_ids"]
    assert batch == theirs(texts, add_special_tokens=has_special, verbose=False)["input_ids"]
    for text, ids in zip(texts, batch, strict=True):
        assert ours(text, add_special_tokens=has_special)["input_ids"] == ids
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        array = np.asarray(ids, dtype=np.int64)
        plain = theirs.decode(array, clean_up_tokenization_spaces=False)
        assert ours.decode(array, clean_up_tokenization_spaces=False) == plain


def test_names_and_sizes_are_those_of_transformers(pair):
    ours, theirs = pair
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    for name in NAMES:
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")


ODD_IDS = [[], [10**6], [-1], ["3"], [2**40]]
ODD_TEXTS = ["\ud800", ["a", "\udfff"], [], "", [3], None, ["a", None], ("a", "b"), [["a"]]]
CALLS = [
    (lambda tokenizer, texts: tokenizer(texts)["input_ids"], ODD_TEXTS),
    (lambda tokenizer, ids: tokenizer.decode(ids), ODD_IDS),
    (lambda tokenizer, ids: tokenizer.convert_ids_to_tokens(ids), ODD_IDS),
]


def test_odd_ids_and_texts_do_what_they_do_in_transformers(make):
    folder = make()
    theirs = real(folder)
    for call, values in CALLS:
        for odd in values:
            assert outcome(call, quick(folder, lambda: theirs), odd) == outcome(call, theirs, odd), odd


def outcome(call, *arguments):
    try:
        return call(*arguments)
    except BaseException as error:  # the kind of an error is part of what a tokenizer does
        return type(error).__name__


ODD_CHATS = [
    [{"role": "user", "content": "3 <b> & 'c'"}],
    [{"role": "system", "content": " be \n brief "}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": "hi", "name": "an extra key"}],
    [{"role": "assistant", "content": "so", "reasoning_content": "since"}],
    [{"role": "assistant", "content": None, "tool_calls": []}],
    [],
]
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


def rendered(tokenizer, chat, options):
    return tokenizer.apply_chat_template(copy.deepcopy(chat), tokenize=False, **options)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_template_and_chat_gives_the_same_text_or_the_same_error(make, name):
    folder = make(chat_template=TEMPLATES[name])
    theirs = real(folder)
    for chat in ODD_CHATS:
        for options in ({}, TOOLS, {"add_generation_prompt": True}):
            ours = quick(folder, lambda: theirs)
            assert outcome(rendered, ours, chat, options) == outcome(rendered, theirs, chat, options), (chat, options)


def test_a_template_cannot_leave_its_sandbox(make):
    ours = quick(make(chat_template="{{ messages.__class__.__mro__ }}{{ messages.append(3) }}"))
    with pytest.raises(TemplateError):
        ours.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)


@pytest.mark.parametrize(
    "settings", [{"tokenizer_class": "Qwen2Tokenizer"}, {"clean_up_tokenization_spaces": True}, {"add_bos_token": True}]
)
def test_what_transformers_would_change_is_left_to_it(make, settings):
    assert quick_tokenizer(make(**settings), lambda: None) is None


def test_it_passes_for_the_real_one_and_changes_hold(make):
    from transformers import PreTrainedTokenizerBase

    folder = make()
    ours, theirs = quick(folder, lambda: real(folder)), real(folder)
    assert isinstance(ours, PreTrainedTokenizerBase)
    for twin in (pickle.loads(pickle.dumps(ours)), copy.copy(ours), copy.deepcopy(ours)):
        assert twin("what is 3")["input_ids"] == theirs("what is 3")["input_ids"]
    encoded = ours("what is 3")
    assert dict(encoded) == dict(theirs("what is 3"))
    assert encoded.attention_mask == [1, 1, 1]
    assert ours.sep_token is None
    before = len(ours)
    for tokenizer in (ours, theirs):
        tokenizer.add_tokens(["brand new"])
        tokenizer.eos_token = "<pad>"
        tokenizer.chat_template = TEMPLATES["plain"]
    assert len(ours) == len(theirs) == before + 1
    assert ours.eos_token_id == theirs.eos_token_id == 2
    assert ours("what brand new")["input_ids"] == theirs("what brand new")["input_ids"]
    chat = [{"role": "user", "content": "3"}]
    assert ours.apply_chat_template(chat, tokenize=False) == "<user>3"


def test_a_shipped_model_loads_no_transformers():
    pytest.importorskip("retrain_local")
    code = (
        "import sys\nfrom retrain.kernel.config.resolved import Config\n"
        "from retrain.kernel.config.schema import ModelTable\nfrom retrain.text.tokenizer import load_tokenizer\n"
        "from retrain.kernel.plugins.discover import load_plugins\n"
        "config = Config(tables={'model': ModelTable(model='builtin:tiny')})\n"
        "tokenizer = load_tokenizer(config, load_plugins({}))\n"
        "assert tokenizer('what is 3')['input_ids'] and tokenizer.decode([4])\n"
        "assert tokenizer.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=False)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folders_that_are_not_plain_are_left_to_transformers_and_the_built_in_is_quick(make, plugins):
    config = Config(tables={"model": ModelTable(model=str(make()))})
    assert type(load_tokenizer(config, plugins)) is not QuickTokenizer
    local = pytest.importorskip("retrain_local")
    folder = Path(local.__file__).parent / "tiny"
    ours, theirs = quick(folder), real(folder)
    texts = ["What is 12 + 30?", "<|im_start|>user\nx<|im_end|>", "\\boxed{-5} Ünïcode \u200b 漢"]
    assert ours(texts)["input_ids"] == theirs(texts)["input_ids"]
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    options = {"tools": None, "tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)
