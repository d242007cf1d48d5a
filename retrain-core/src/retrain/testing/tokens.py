"""The tokenizer of a bench: the configured model's, or a small one built in memory without a download."""

from __future__ import annotations

from functools import cache
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.registry import Plugins
from retrain.text.tokenizer import load_tokenizer

BUILTIN = "builtin:tiny"
TOY_MODEL = "conformance:toy"  # no folder and no hub id: `tokenizer_of` makes its tokenizer
ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def toy_model(plugins: Plugins) -> str:
    """`builtin:tiny` if an installed plugin ships it, else a name for the toy tokenizer, which has no weights."""
    return BUILTIN if plugins.locate_model(BUILTIN) else TOY_MODEL


def tokenizer_of(config: Config, plugins: Plugins) -> Any:
    """The tokenizer of `[model] model`; ConfigError when there is none."""
    return toy_tokenizer() if config.model.model == TOY_MODEL else load_tokenizer(config, plugins)


@cache
def toy_tokenizer() -> Any:
    """A tokenizer with one token per printable ASCII character and a chat template; its end token is number 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *ALPHABET]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=SPECIAL[2:],
    )
    made.chat_template = TEMPLATE
    return made
