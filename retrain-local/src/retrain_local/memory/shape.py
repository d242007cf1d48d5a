"""The sizes of a language model, read from its `config.json` and the headers of its weights; nothing is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.api import ConfigError, Problem, TensorSize
from retrain_local.memory.sizes import NATIVE, Activations

# Their feed-forward part has two matrices; other families have three, with a gate.
PLAIN_MLP = frozenset({"gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon", "starcoder2"})
# Names of a text part in the files of a larger checkpoint, written by current or earlier versions of transformers, to
# the names that a text-only model has.
TEXT_NAMES = {
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
BODY = "model.layers.", "model.embed_tokens.", "model.norm."  # of a text part that has no name in the files
MAX_SIZE = 2**40  # a larger number in config.json cannot be a size
MAX_HEADER_BYTES = 2**27  # the format's own limit is 100 MB
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state that a model of transformers keeps, as `model.measure` measured it.

    A token keeps `token_elements` numbers, a row another `row_bytes`. An adapter has `adapter_width` numbers for each
    of its ranks, and adapts matrices of `adapted_elements`. `why` is the reason against the tier paged.
    """

    why: str
    token_elements: int
    row_bytes: int
    adapter_width: int
    adapted_elements: int
    activations: Activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only model; `is_counted`: `parameters` is exact; `is_native`: this backend has its decoder."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool
    has_gate: bool
    experts: int
    active_experts: int
    parameters: int
    is_counted: bool
    context: int | None
    is_native: bool = True
    kept: Kept | None = None

    @property
    def token_elements(self) -> int:
        """The numbers in a token's keys and values, of all layers."""
        return self.kept.token_elements if self.kept else 2 * self.layers * self.kv_heads * self.head_size

    @property
    def row_bytes(self) -> int:
        return self.kept.row_bytes if self.kept else 0

    @property
    def linears(self) -> tuple[tuple[int, int, int], ...]:
        """The (inputs, outputs, count) of the linear layers of one block, including experts."""
        attention = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        experts, ups = max(1, self.experts), 2 if self.has_gate else 1
        mlp = ((self.hidden, self.inner, ups * experts), (self.inner, self.hidden, experts))
        return ((self.hidden, attention, 1), (self.hidden, keys, 2), (attention, self.hidden, 1), *mlp)

    def embedding(self, element_bytes: int) -> TensorSize:
        size = self.vocabulary * self.hidden * element_bytes
        return TensorSize(name="embedding", shape=(self.vocabulary, self.hidden), bytes=size)

    @property
    def adapted_elements(self) -> int:
        if self.kept:
            return self.kept.adapted_elements
        return self.layers * sum(inputs * outputs * count for inputs, outputs, count in self.linears)

    def lora_parameters(self, rank: int) -> int:
        """Return rank x (inputs + outputs), over every linear layer but the head."""
        if self.kept:
            return rank * self.kept.adapter_width
        return rank * self.layers * sum((inputs + outputs) * count for inputs, outputs, count in self.linears)

    def sampler_adapter_elements(self, rank: int) -> int:
        """Return the elements of a sampler's unmerged adapter, whose B is block-diagonal over layers with one input."""
        if self.experts or self.kept:
            return self.lora_parameters(rank)
        attention, keys, ups = self.heads * self.head_size, self.kv_heads * self.head_size, 2 if self.has_gate else 1
        joint = (  # inputs + outputs, and the number of stacked matrices
            (self.hidden + attention + 2 * keys, 3),
            (attention + self.hidden, 1),
            (self.hidden + ups * self.inner, ups),
            (self.inner + self.hidden, 1),
        )
        return rank * self.layers * sum(size * parts for size, parts in joint)


def is_text(name: str) -> bool:
    return name.startswith(("lm_head.", *BODY)) or any(re.match(pattern, name) for pattern in TEXT_NAMES)


def _refused(where: str, *, what: str, code: str) -> ConfigError:
    return ConfigError(Problem(code=code, where=where, what=what, fix="give the folder of a decoder-only model"))


def read_shape(folder: Path, *, where: str) -> ModelShape:
    file = folder / "config.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refused(where, what=f"{file} cannot be used: {error}", code="model.bad-config-json") from None
    text = document.get("text_config", document) if isinstance(document, dict) else None
    if not isinstance(text, dict):
        what = f"{file} is not the configuration of a model"
        raise _refused(where, what=what, code="model.bad-config-json")
    is_part = text is not document
    if is_part:
        # Such files may hold only what differs from the defaults (Gemma 3).
        with suppress(Exception):
            from transformers import AutoConfig

            text = AutoConfig.for_model(**document).get_text_config(decoder=True).to_dict()
    shape = shape_of(text, file=file, where=where, counted=count_parameters(folder, is_part=is_part))
    # The native decoder reads only files without other parts.
    return replace(shape, is_native=shape.is_native and not is_part)


def shape_of(document: Mapping[str, Any], *, file: Path, where: str, counted: int | None = None) -> ModelShape:
    """Read the sizes under current names or GPT-2's; `counted` parameters take precedence over the formula."""

    def size(*names: str, default: int | None = None, least: int = 1) -> int:
        for name in names:
            value = document.get(name)
            if value is None:
                continue
            if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
                value = max(value)  # of layers that differ
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_SIZE:
                raise _refused(where, what=f"{file}: {name} = {value!r} is not a size", code="model.bad-size")
            return value
        if default is None:
            raise _refused(where, what=f"{file} does not name {names[0]}", code="model.unknown-sizes")
        return default

    # Models without attention have no heads; what their layers keep is measured.
    least = None if document.get("model_type") in NATIVE else 1
    hidden = size("hidden_size", "n_embd", "d_model", "emb_dim")
    heads = size("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", default=least)
    if heads > hidden:
        raise _refused(where, what=f"{file}: {heads} heads share a width of {hidden}", code="model.bad-size")
    # Granite's dense hybrids have 0.
    experts = size("num_experts", "num_local_experts", "n_routed_experts", default=1, least=0)
    inner = size("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", default=4 * hidden)
    listed = len(document.get("layers_block_type") or ()) or None
    shape = ModelShape(
        layers=size(*LAYERS, default=listed),
        hidden=hidden,
        inner=size("moe_intermediate_size", default=inner) if experts > 1 else inner,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_size=size("head_dim", default=hidden // heads),
        vocabulary=size("vocab_size"),
        is_tied=bool(document.get("tie_word_embeddings", False)),
        has_gate=document.get("model_type") not in PLAIN_MLP,
        experts=experts if experts > 1 else 0,
        active_experts=size("num_experts_per_tok", "moe_top_k", default=1) if experts > 1 else 1,
        parameters=0,
        is_counted=counted is not None,
        context=size("max_position_embeddings", "n_positions", default=MAX_SIZE),
        is_native=document.get("model_type") in NATIVE,
    )
    # embedding, head unless tied, linear layers, routers, and two norms per block and one at the end
    embeddings = shape.vocabulary * hidden * (1 if shape.is_tied else 2)
    norms, routers = hidden * (2 * shape.layers + 1), shape.layers * shape.experts * hidden
    formula = embeddings + shape.adapted_elements + norms + routers
    context = None if shape.context == MAX_SIZE else shape.context
    return replace(shape, parameters=counted or formula, context=context)


def count_parameters(folder: Path, *, is_part: bool = False) -> int | None:
    """Count the elements in the safetensors files of a folder, from their headers; None if a file is damaged.

    With `is_part` only the text part of a larger checkpoint counts.
    """
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length)) if 0 < length <= MAX_HEADER_BYTES else None
            header.pop("__metadata__", None)  # type: ignore[union-attr]
            counted = (each for name, each in header.items() if not is_part or is_text(name))  # type: ignore[union-attr]
            total += sum(math.prod(entry["shape"]) for entry in counted)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
    return total or None
