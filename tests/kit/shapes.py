"""Sizes of decoders: small ones, and the ones of models that people train."""

from typing import Any

from retrain_local.decoder import Shape


def shape(heads: int, kv_heads: int, size: int, value_size: int | None = None, **more: Any) -> Shape:
    """A decoder of one layer with these heads, unless `more` says otherwise."""
    sizes = {"layers": 1, "hidden": 64, "inner": 96, "vocabulary": 100, "context": None, "parameters": 1} | more
    return Shape(heads=heads, kv_heads=kv_heads, head_size=size, value_size=value_size or size, **sizes)


QWEN3_4B = shape(32, 8, 128, layers=36, hidden=2560, inner=9728, vocabulary=151_936, parameters=4_022_468_096)
