"""What a planning detector must do: return one mark per token, for any tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Mask, Tokens
from retrain.testing.bench import Bench
from retrain.testing.check import expect

TEXTS = (
    "Wait, let me think again. First I add 12 and 30, which gives 42.",
    "",
    "42",
    "let me check this step by step " * 20,
    "\U0001f680 caf\u00e9 \u202e24 \x00",
)


def marks_every_token(bench: Bench) -> None:
    """One boolean mask per completion, of its length, even for empty, random and special tokens."""
    detector = bench.build()
    _masks(detector, _completions(bench))
    _masks(detector, [])


def leaves_tokens_alone(bench: Bench) -> None:
    """It does not modify the tokens it reads."""
    before, given = _completions(bench), _completions(bench)
    _masks(bench.build(), given)
    expect(
        all(np.array_equal(was, now) for was, now in zip(before, given, strict=True)),
        "the tokens have changed after the call",
        why="the same arrays are trained on",
        fix="copy what you change",
    )


def repeats_its_marks(bench: Bench) -> None:
    """The same completions get the same marks again, and from a second instance too."""
    detector, given = bench.build(), _completions(bench)
    first = _masks(detector, given)
    for again in (_masks(detector, given), _masks(bench.build(), given)):
        expect(
            all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)),
            "the same tokens got other marks",
            why="a run that is resumed must give its tokens the same credit",
            fix="use no randomness, and no memory of earlier calls that changes the answer",
        )


def _completions(bench: Bench) -> list[Tokens]:
    """Tokens of texts, and random tokens of the vocabulary, special ones included."""
    tokenizer = bench.tokenizer
    texts = [np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64) for text in TEXTS]
    random_T = Seeds(0).stream("conformance detector").integers(0, len(tokenizer), size=64)
    return [*texts, random_T, np.full(3, tokenizer.eos_token_id, dtype=np.int64)]


def _masks(detector: Any, completions_G: Sequence[Tokens]) -> list[Mask]:
    masks_G = detector.masks(completions_G)
    expect(
        len(masks_G) == len(completions_G),
        f"{len(masks_G)} masks for {len(completions_G)} completions",
        why="masks are matched to completions by position",
        fix="return one mask per completion, an empty one for an empty completion",
    )
    for number, (mask_T, tokens_T) in enumerate(zip(masks_G, completions_G, strict=True)):
        array_T = np.asarray(mask_T)
        is_sound = array_T.shape == tokens_T.shape and (array_T.dtype == np.bool_ or not array_T.size)
        expect(
            is_sound,
            f"the mask of completion {number} is {array_T.dtype} of shape {array_T.shape} for {len(tokens_T)} tokens",
            why="credit is assigned token by token",
            fix="return np.ndarray of bool, one entry per token",
        )
    return [np.asarray(mask_T, dtype=np.bool_) for mask_T in masks_G]


PLANNING_DETECTOR = (marks_every_token, leaves_tokens_alone, repeats_its_marks)
