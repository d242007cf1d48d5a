"""Out of memory: told from other errors, answered once by smaller pieces, and explained when that is not enough."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from retrain.api import BackendError, OutOfMemoryError, Problem

LOG = logging.getLogger("retrain")
# the CPU and Apple allocators raise a plain RuntimeError
MARKS = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(slots=True)
class MemoryLimits:
    """Sizes that running out of memory has brought down, 0 where it has not.

    They are part of a checkpoint: a resumed run cuts its work as the run before did, to the last bit of rounding.
    `train_tokens` and `train_logits` bound a micro-batch, `cache_tokens` the key-value cache. `pack_tokens` is the
    budget that training found from free memory at its first step, `recompute` whether it keeps activations.
    """

    train_tokens: int = 0
    train_logits: int = 0
    cache_tokens: int = 0
    pack_tokens: int = 0
    recompute: bool = False

    def restore(self, state: Mapping[str, int]) -> None:
        """Take over saved limits."""
        self.train_tokens = state.get("train_tokens", 0)
        self.train_logits = state.get("train_logits", 0)
        self.cache_tokens = state.get("cache_tokens", 0)
        self.pack_tokens = state.get("pack_tokens", 0)
        self.recompute = bool(state.get("recompute", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What was being computed: `rows` padded to `width` tokens, with logits at `actions` positions."""

    rows: int
    width: int
    actions: int

    @property
    def tokens(self) -> int:
        """Tokens, padding included."""
        return self.rows * self.width


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator raised this."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return not isinstance(error, BackendError) and any(mark in str(error).lower() for mark in MARKS)


def free_memory(device: torch.device) -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def too_big_to_train(load: Load, fitting_tokens: int, model: Any, device: torch.device) -> OutOfMemoryError:
    """The error of a micro-batch that does not fit; `fitting_tokens` is the size of the largest that did."""
    what = f"training ran out of memory on {device} with {_pieces(load)}; {_biggest_of_training(load, model)}"
    if load.rows > 1:
        size = min(load.tokens - 1, max(load.tokens // 2, fitting_tokens))
        fix = f"set [backend.options] micro_batch_tokens = {size} (it does not change the gradient)"
    else:
        prompt = load.width - load.actions  # all but the sampled tokens
        tokens = max(1, min(load.actions - 1, max(load.actions // 2, fitting_tokens - prompt)))
        fix = f"lower [training] max_tokens to {tokens}, or use a smaller [model] model or a GPU with more memory"
    return OutOfMemoryError(Problem(where="training", what=what, fix=fix))


def too_big_to_sample(load: Load, model: Any, device: torch.device) -> OutOfMemoryError:
    """The error of a decoding batch that does not fit."""
    layers, heads, size = cache_shape(model)
    shape = [2, layers, load.rows, heads, load.width, size]
    biggest = f"the biggest tensors: keys and values {shape}, {_mebibytes(shape, model.dtype)}"
    what = f"sampling ran out of memory on {device} with {_pieces(load)}; {biggest}"
    if load.rows > 1:
        fix = (
            f"sample at most {load.rows // 2} completions at once: lower [training] batch_size or group_size "
            "(in an evaluation: [eval] examples or samples)"
        )
    else:
        fix = f"lower [training] max_tokens to {max(1, load.actions // 2)}, or use a smaller [model] model"
    return OutOfMemoryError(Problem(where="sampling", what=what, fix=fix))


def cache_shape(model: Any) -> tuple[int, int, int]:
    """Layers, key-value heads and head size."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, size


def _biggest_of_training(load: Load, model: Any) -> str:
    config = model.config.get_text_config()
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    logits, hidden = [load.actions, config.vocab_size], [load.rows, load.width, inner]
    if math.prod(logits) >= math.prod(hidden):
        return f"the biggest tensor: logits {logits}, {_mebibytes(logits, torch.float32)}"
    return f"the biggest tensor: activations of a layer {hidden}, {_mebibytes(hidden, model.dtype)}"


def _pieces(load: Load) -> str:
    rows = "one row" if load.rows == 1 else f"{load.rows} rows"
    return f"{rows} of {load.width} tokens"


def _mebibytes(shape: list[int], dtype: torch.dtype) -> str:
    return f"{math.prod(shape) * dtype.itemsize / 2**20:.1f} MiB"
