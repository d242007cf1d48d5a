"""A tokenizer of a shipped model that saves the seconds of importing `transformers`.

A run needs little of its tokenizer: ids of texts, texts of ids, and chats rendered one at a time. For a model that is
just a plain `tokenizer.json`, `tokenizers` and Jinja do that exactly as `transformers` does. Any other call, or any
other option, goes to the real tokenizer, loaded at that moment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of `tokenizer_config.json`; with any other, `transformers` may change ids or texts.
PLAIN_KEYS = frozenset(
    {"chat_template", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class", *SPECIAL_NAMES}
)


def quick_tokenizer(folder: Path, load: Callable[[], Any]) -> QuickTokenizer | None:
    """The tokenizer in `folder`, with `load` for the real one; None where only `transformers` reads it correctly."""
    from tokenizers import Tokenizer  # only sampling needs it

    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    is_plain = settings.keys() <= PLAIN_KEYS and settings.get("tokenizer_class") == "PreTrainedTokenizerFast"
    if not is_plain or settings.get("clean_up_tokenization_spaces") or (folder / "chat_template.jinja").exists():
        return None
    special = {name: settings[name] for name in SPECIAL_NAMES if name in settings}
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return QuickTokenizer(backend, special, settings.get("chat_template"), load)


class QuickTokenizer:
    """Behaves as a `transformers` tokenizer, and passes for one in `isinstance`.

    Once the real tokenizer is loaded, it handles every call, so that changes made to it apply here too.
    """

    def __init__(
        self, backend: Tokenizer, special: Mapping[str, str], template: str | None, load: Callable[[], Any]
    ) -> None:
        # not through `__setattr__`: that sets attributes of the real tokenizer
        self.__dict__.update(_backend=backend, _special=special, _template=template, _load=load, _loaded=None)
        self.__dict__.update(_compiled=compiled(template, special) if template else None)

    def real(self) -> Any:
        if self._loaded is None:
            self.__dict__["_loaded"] = self._load()
        return self._loaded

    # Libraries check `isinstance(tokenizer, PreTrainedTokenizerBase)`.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.real())

    def __getattr__(self, name: str) -> Any:
        special = self._special.get(name.removesuffix("_id")) if self._loaded is None else None
        if special is None:
            return getattr(self.real(), name)
        return self._backend.token_to_id(special) if name.endswith("_id") else special

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.real(), name, value)

    def __repr__(self) -> str:
        # Showing it in a message must not load the real one.
        return f"<tokenizer of {len(self)} entries>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True) if self._loaded is None else len(self._loaded)

    @property
    def chat_template(self) -> Any:
        return self._template if self._loaded is None else self._loaded.chat_template

    @property
    def backend_tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`; changes to it apply here too."""
        return self._backend if self._loaded is None else self._loaded.backend_tokenizer

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def __call__(self, *texts: Any, **options: Any) -> Any:
        """Ids of a text or of several, under `input_ids`; the rest of the encoding is made on first use."""
        if self._loaded is not None or len(texts) != 1 or not options.keys() <= {"add_special_tokens", "verbose"}:
            return self.real()(*texts, **options)
        given = texts[0]
        some = [given] if isinstance(given, str) else given
        if not isinstance(some, list) or not some or not all(isinstance(text, str) for text in some):
            return self.real()(*texts, **options)
        has_special = bool(options.get("add_special_tokens", True))
        ids = [row.ids for row in self._backend.encode_batch_fast(some, add_special_tokens=has_special)]
        return _Encoded(ids[0] if isinstance(given, str) else ids, lambda: self.real()(*texts, **options))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else token_ids
        are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
        is_simple = self._loaded is None and are_ids and options.keys() <= {"clean_up_tokenization_spaces"}
        if not is_simple or options.get("clean_up_tokenization_spaces"):
            return self.real().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any, *others: Any, **options: Any) -> Any:
        if self._loaded is not None or others or options or not isinstance(ids, list):
            return self.real().convert_ids_to_tokens(ids, *others, **options)
        return [self._backend.id_to_token(int(index)) for index in ids]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """A chat as text; plain messages without tools or template arguments are rendered here."""
        is_simple = (
            self._loaded is None
            and options.keys() <= {"tools", "tokenize", "add_generation_prompt"}
            and options.get("tokenize") is False
            and options.get("tools") is None
            and isinstance(conversation, list)
            and bool(conversation)
            and all(
                type(turn) is dict and turn.keys() == {"role", "content"} and all(type(t) is str for t in turn.values())
                for turn in conversation
            )
        )
        if not is_simple or self._compiled is None:
            return self.real().apply_chat_template(conversation, **options)
        return self._compiled.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=options.get("add_generation_prompt", False),
            **self._special,
        )


class _Encoded(Mapping[str, Any]):
    """The ids of an encoding; the real `BatchEncoding` for everything else."""

    def __init__(self, ids: list[int] | list[list[int]], make: Callable[[], Any]) -> None:
        self.input_ids = ids
        self._make = make

    @cached_property
    def _real(self) -> Any:
        return self._make()

    def __getitem__(self, key: Any) -> Any:
        return self.input_ids if key == "input_ids" else self._real[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._real)

    def __len__(self) -> int:
        return len(self._real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "range"})


def compiled(text: str, special: Iterable[str]) -> Template | None:
    """The template; None when it needs more than the chat and these special tokens, or is not a template."""
    from jinja2 import TemplateError, meta
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    # Jinja's own filter escapes HTML, and the model would see &lt; in place of <.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    try:
        needed = meta.find_undeclared_variables(environment.parse(text))
        return environment.from_string(text) if needed <= TEMPLATE_NAMES | set(special) else None
    except TemplateError:
        return None
