"""The least time of a decoded token and of a training step by bytes and operations, launch by launch.

`python -m tests.kit.fake_gpu.roofline --shape 4B`, in a process with the guard, prints both tables. Two runs of few
layers give the work of a layer. It counts neither gaps between launches nor kernels below the rates of the card.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain_local.memory.sizes import BLOCK_SIZE
from tests.kit.fake_gpu.backends import Load, OnCard, on_card
from tests.kit.fake_gpu.card import H100, Card
from tests.kit.fake_gpu.graph import REPLAYED
from tests.kit.fake_gpu.models import QWEN3, SHAPES, qwen3_folder
from tests.kit.fake_gpu.work import Work

LAYERS = 2, 4
TOKENS = 8  # decoded in the run that is counted
BACKWARD = 2.5  # attention's operations against those of its forward pass
READ, PACKED, PACKED_BACK = "triton attend", "torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"
Table = dict[tuple[str, str], Work]  # by operation and function


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that attention's work depends on."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int

    @classmethod
    def of(cls, shape: str) -> Sizes:
        config = QWEN3 | SHAPES[shape]
        names = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"
        layers, heads, kv_heads, head_size = (config[name] for name in names)
        return cls(layers=layers, heads=heads, kv_heads=kv_heads, head_size=head_size)

    def read(self, load: Load, context: float, key_bytes: int, shared: int) -> Work:
        """Return the work of one token's attention in all layers; a group reads the keys that it shares once."""
        keys = load.prompts * (load.group * (context - shared) + shared)
        return Work(
            moved_bytes=self.layers * keys * 2 * self.kv_heads * self.head_size * key_bytes,
            operations=4 * self.layers * load.prompts * load.group * context * self.heads * self.head_size,
        )

    def packed(self, load: Load) -> float:
        """Return the operations of attention in a forward pass over the packs of a step."""
        prompt, new = load.prompt, load.new
        pairs = prompt**2 / 2 + load.group * (new * prompt + new**2 / 2)
        return 4 * load.prompts * pairs * self.layers * self.heads * self.head_size


def table_of(card: OnCard, phase: str) -> Table:
    return {(name, where): work for (each, name, where), work in card.gpu.record.work.items() if each == phase}


def of_all_layers(few: Mapping[tuple[str, str], Work], more: Mapping[tuple[str, str], Work], layers: int) -> Table:
    """Extrapolate from two runs of `LAYERS` layers."""
    times = (layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    return {key: few.get(key, Work()) + (more[key] - few.get(key, Work())) * times for key in more}


def decoding(shape: str, card: Card, load: Load, *, key_bytes: int = 2, **options: Any) -> Table:
    """Return the work of a token of every row, whose context is the prompt and half of the completion."""
    sizes, found = Sizes.of(shape), []
    for layers in LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            model = qwen3_folder(Path(folder), shape, num_hidden_layers=layers)
            with on_card(model, card, weighs=True, **options) as opened:
                opened.sample(Load(prompts=load.prompts, group=load.group, prompt=load.prompt, new=TOKENS), "warm-up")
                opened.sample(Load(prompts=load.prompts, group=load.group, prompt=load.prompt, new=TOKENS), "decode")
                work = table_of(opened, f"decode{REPLAYED}")
                found.append({key: each * (1 / TOKENS) for key, each in work.items()})
    table = of_all_layers(found[0], found[1], sizes.layers)
    (key,) = (key for key in table if key[0] == READ)
    shared = (load.prompt - 1) // BLOCK_SIZE * BLOCK_SIZE if table[key].calls > sizes.layers else 0
    table[key] += sizes.read(load, load.prompt + load.new / 2, key_bytes, shared)
    return table


def training(shape: str, card: Card, load: Load, **options: Any) -> Table:
    """Return the work of one pack of these rows; it must fit onto the card in one."""
    sizes, found = Sizes.of(shape), []
    options = {"options": {"micro_batch_tokens": 2**17, "gradient_checkpointing": "off"}} | options
    for layers in LAYERS:
        with tempfile.TemporaryDirectory() as folder:
            model = qwen3_folder(Path(folder), shape, num_hidden_layers=layers)
            with on_card(model, card, weighs=True, **options) as opened:
                opened.train(load, "warm-up")
                opened.train(load, step=1)
                found.append(table_of(opened, "train"))
    table = of_all_layers(found[0], found[1], sizes.layers)
    for name, times in ((PACKED, 1.0), (PACKED_BACK, BACKWARD)):
        (key,) = (key for key in table if key[0] == name)
        table[key] += Work(operations=times * sizes.packed(load))
    return table


def seconds(table: Mapping[tuple[str, str], Work], card: Card) -> float:
    return sum(work.seconds(card.bytes_per_s, card.operations_per_s) for work in table.values())


def product_fraction(table: Mapping[tuple[str, str], Work], card: Card) -> float:
    """Return the part of the least time in which products and attention at their full rate would be done."""
    operations = sum(work.operations for work in table.values())
    return operations / card.operations_per_s / seconds(table, card)


def show(title: str, table: Mapping[tuple[str, str], Work], card: Card, most: int = 25) -> None:
    total = seconds(table, card)
    print(f"{title}: {1e3 * total:.2f} ms, {sum(work.calls for work in table.values())} launches")
    rows = sorted(table.items(), key=lambda row: -row[1].seconds(card.bytes_per_s, card.operations_per_s))
    for (name, function), work in rows[:most]:
        own = work.seconds(card.bytes_per_s, card.operations_per_s)
        sizes = f"{work.moved_bytes / 1e9:8.3f} GB {work.operations / 1e12:7.3f} Tflop"
        print(f"  {own / total:6.1%} {1e3 * own:8.3f} ms {work.calls:6d} x {sizes}  {name:28} {function}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="4B")
    shape = parser.parse_args().shape
    show("a token", decoding(shape, H100, Load(prompts=8, group=16, prompt=256, new=2048)), H100)
    trained = training(shape, H100, Load(prompts=1, group=6, prompt=256, new=1024))
    show(f"a pack, {product_fraction(trained, H100):.0%} products", trained, H100)
