"""Tiny tokenizers of the three families, trained on a text with planning phrases."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from retrain.advantages import AdvantageContext
from retrain_sepa.advantages import GRPO, maxrl

CORPUS = [
    "Wait, let me check the sum. That's not right, so go back and double-check it.",
    "The key is to notice that x = 3. On second thought, that doesn't work; start over, try another way.",
    "Alternatively, we let y be 2. What if we let me think? Is this right? The key insight is simple.",
    "wait let me verify it, then: waiting lets mere letters wither, watch the right keys",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z A T W I O",
    "0 1 2 3 4 5 6 7 8 9 . , ; : ? ! ' - = + ( ) é 等一下 ’",
]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentence_piece():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<unk>", "</s>", *byte_tokens], show_progress=False, max_token_length=6
    )
    tokenizer.train_from_iterator([line.replace("’", "").replace("等一下", "") for line in CORPUS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=130, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]")


FAMILIES = {"byte_level": byte_level, "sentence_piece": sentence_piece, "word_piece": word_piece}


@pytest.fixture(scope="session")
def families():
    return {name: make() for name, make in FAMILIES.items()}


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def tokenizer(request, families):
    return families[request.param]


@pytest.fixture(params=["grpo", "maxrl"])
def advantage(request):
    """`f(rewards, **params)` of each advantage, through its spec."""
    spec = GRPO if request.param == "grpo" else maxrl()
    return lambda rewards, **params: np.asarray(
        spec.compute(AdvantageContext(rewards_G=np.asarray(rewards, dtype=np.float64), params=params))
    )
