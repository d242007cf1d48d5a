"""The two limits of a step, from a model's `config.json`: bytes that must move, operations that must be done.

Of a decoder with attention and a gated feed-forward (Llama, Qwen, Mistral). With W = parameters of the projections of
all layers, V h = those of the head, R = LoRA's, and a row's completion of n tokens after p prompt tokens:

sampling   bytes: per token step, every weight once and all keys and values, those of a group's prompt once:
           b (W + V h) + c_kv (sum_groups p + sum_rows n)
           operations: 2 (W + V h) per new token, 2 W per prompt token (once per group), attention 4 L a t
training   4 W per token (forward; the gradient of the activations: frozen weights need none of their own), 6 R,
           4 V h per completion token, and three times the forward's attention; a group's prompt once
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.machine import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that the limits follow from."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From the keys of a `config.json`."""
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            inner=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
        )

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Of the model in a folder."""
        return cls.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of the projections of one layer."""
        query, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.hidden, query), (self.hidden, keys), (self.hidden, keys), (query, self.hidden)]
        return [*attention, (self.hidden, self.inner), (self.hidden, self.inner), (self.inner, self.hidden)]

    @property
    def fused(self) -> list[tuple[int, int]]:
        """The same with those that read one input together: queries, keys and values; gate and up."""
        query, keys, values, output, gate, up, down = self.matrices
        return [(self.hidden, query[1] + keys[1] + values[1]), output, (self.hidden, gate[1] + up[1]), down]

    @property
    def projections(self) -> int:
        """Parameters of the projections of all layers."""
        return self.layers * sum(inner * outer for inner, outer in self.matrices)

    @property
    def head(self) -> int:
        """Parameters of the language-model head."""
        return self.hidden * self.vocabulary

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA on every projection."""
        return self.layers * rank * sum(inner + outer for inner, outer in self.matrices)

    def kv_bytes(self, item: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * item

    @property
    def attention(self) -> int:
        """Operations of a query with one key and its value, forward, all layers."""
        return 4 * self.layers * self.heads * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Completions of one step: `rows` in groups that share their prompt, each `prompt` + `new` tokens long."""

    rows: int
    group: int
    prompt: int
    new: int

    @property
    def groups(self) -> int:
        """Distinct prompts."""
        return self.rows // self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What must be moved and done, and the least time that this takes: both at once at best, so the larger counts."""

    moved_bytes: float
    operations: float

    def seconds(self, rates: Rates) -> float:
        """The larger of the two."""
        return max(self.moved_bytes / rates.bytes_per_s, self.operations / rates.operations_per_s)


def decode(shape: Shape, work: Work, item: int) -> Limit:
    """Drawing all new tokens, one per row and step, the prompts' keys and values being there."""
    contexts = sum(work.prompt + at for at in range(1, work.new + 1))  # of one row, over its steps
    weights = item * (shape.projections + shape.head)
    held = work.groups * work.prompt * work.new + work.rows * (contexts - work.prompt * work.new)
    moved = work.new * weights + held * shape.kv_bytes(item)
    per_token = 2 * (shape.projections + shape.head)
    done = work.rows * (work.new * per_token + contexts * shape.attention)
    return Limit(moved_bytes=moved, operations=done)


def prefill(shape: Shape, work: Work, item: int) -> Limit:
    """Reading every distinct prompt once."""
    tokens = work.groups * work.prompt
    attention = shape.attention * work.groups * work.prompt * (work.prompt + 1) / 2
    return Limit(moved_bytes=item * shape.projections, operations=2 * shape.projections * tokens + attention)


def training(shape: Shape, rows: list[tuple[int, int]], rank: int, item: int, groups: int | None = None) -> Limit:
    """One optimizer step on rows of (prompt, completion) tokens; with `groups`, each prompt is computed once."""
    shared = 1.0 if groups is None else groups / len(rows)
    tokens = sum(prompt * shared + new for prompt, new in rows)
    pairs = sum(shared * prompt * (prompt + 1) / 2 + new * prompt + new * (new + 1) / 2 for prompt, new in rows)
    done = tokens * (4 * shape.projections + 6 * shape.adapter(rank))
    done += sum(new for _, new in rows) * 4 * shape.head + 3 * shape.attention * pairs
    return Limit(moved_bytes=2 * item * (shape.projections + shape.head), operations=done)
