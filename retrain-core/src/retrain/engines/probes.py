"""What a server is probed with: prompts of many lengths, and an adapter whose effect cannot be missed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from retrain.kernel.seeding import generator
from retrain.kernel.types import Tokens

PROBE_TEXT = (
    "A small town kept its records in a long, cold hall. Every spring the clerk counted 17 boxes, opened 4 of them, "
    "and wrote down what was inside: letters, maps, a broken clock, 250 coins. Then he asked himself: how many are "
    "left, and who will read them? If 3 people read 12 pages a day, the answer is 36; but nobody had ever tried. "
)
NUM_PROBES, SHORTEST, LONGEST = 8, 8, 420  # one prompt longer than the blocks in which servers cache keys and values
PROBE_TOKENS = 16
TOP = 5  # number of likeliest tokens that are compared
WEIGHTS = "adapter_model.safetensors"
PROBE_STD = 0.3  # standard deviation of the probe adapter's weights


def probe_prompts(tokenizer: Any, context_limit: int | None) -> list[Tokens]:
    """Eight prompts of 8 to 420 tokens, shorter where the context is; each leaves room for a few tokens."""
    longest = LONGEST if context_limit is None else max(1, min(LONGEST, context_limit - PROBE_TOKENS))
    ids: list[int] = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    ids *= 1 + longest // len(ids)
    lengths = np.geomspace(min(SHORTEST, longest), longest, NUM_PROBES).astype(int)
    texts = [tokenizer.decode(ids[start : start + length][:longest]) for start, length in enumerate(lengths)]
    # encoded again, with any token that the tokenizer prepends: some servers take text and encode it themselves
    return [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]


def write_probe_adapter(source: Path, folder: Path) -> bool:
    """Copy an adapter with large random weights; False when its weights have a type that numpy lacks."""
    try:
        tensors = load_file(source / WEIGHTS)
    except (OSError, TypeError, KeyError, AttributeError):  # bfloat16
        return False
    stream = generator(0)
    noise = {name: (PROBE_STD * stream.standard_normal(t.shape)).astype(t.dtype) for name, t in sorted(tensors.items())}
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copyfile(file, folder / file.name)
    save_file({name: np.ascontiguousarray(t) for name, t in noise.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return True
