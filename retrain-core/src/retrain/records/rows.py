"""Stores what surrounds the action tokens of a completion, so that its whole row can be put together again.

A prompt is stored once for all completions that begin with it. `runs` are lengths in turn: actions, then tokens of the
environment, then actions again; `num_runs` of them belong to each completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from retrain.kernel.types import Mask, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRecord:
    """A completion's whole row: all tokens, which of them the policy sampled, where it got a fresh context."""

    tokens_T: Tokens
    action_T: Mask
    starts: tuple[int, ...] = (0,)


def row_arrays(rows: Sequence[RowRecord]) -> dict[str, np.ndarray]:
    """Everything but the action tokens, as flat arrays."""
    prompts: dict[bytes, int] = {}
    prompt_of, others, runs, num_runs = [], [np.zeros(0, np.int64)], [], []
    for row in rows:
        edges = [0, *(np.flatnonzero(np.diff(row.action_T)) + 1).tolist(), len(row.tokens_T)]
        first = edges[1] if not row.action_T[:1].any() else 0
        prompt = row.tokens_T[:first].astype(np.int64).tobytes()
        prompt_of.append(prompts.setdefault(prompt, len(prompts)))
        lengths = [end - begin for begin, end in pairwise(edges) if begin >= first and end > begin]
        runs += lengths
        num_runs.append(len(lengths))
        others.append(row.tokens_T[first:][~row.action_T[first:]])
    texts = [np.frombuffer(prompt, np.int64) for prompt in prompts]
    return {
        "prompts": np.concatenate([np.zeros(0, np.int64), *texts]).astype(np.int32),
        "prompt_lengths": np.array([len(text) for text in texts], dtype=np.int64),
        "prompt_of": np.array(prompt_of, dtype=np.int64),
        "environment": np.concatenate(others).astype(np.int32),
        "runs": np.array(runs, dtype=np.int64),
        "num_runs": np.array(num_runs, dtype=np.int64),
        "starts": np.array([start for row in rows for start in row.starts], dtype=np.int64),
        "num_starts": np.array([len(row.starts) for row in rows], dtype=np.int64),
    }


def rows_of(arrays: Mapping[str, np.ndarray], actions: Sequence[Tokens]) -> list[RowRecord]:
    """The rows whose action tokens these are; ValueError when arrays and actions do not fit together."""
    prompts = _cut(arrays["prompts"], arrays["prompt_lengths"])
    runs, starts = _cut(arrays["runs"], arrays["num_runs"]), _cut(arrays["starts"], arrays["num_starts"])
    environment = _cut(arrays["environment"], np.array([int(each[1::2].sum()) for each in runs], dtype=np.int64))
    rows = []
    for number, tokens_A in enumerate(actions):
        prompt = prompts[int(arrays["prompt_of"][number])]
        is_action = np.repeat(np.arange(len(runs[number])) % 2 == 0, runs[number])
        action_T = np.concatenate([np.zeros(len(prompt), np.bool_), is_action])
        tokens_T = np.concatenate([prompt, np.zeros(len(is_action))]).astype(np.int64)
        tokens_T[action_T] = tokens_A
        tokens_T[len(prompt) :][~is_action] = environment[number]
        rows.append(RowRecord(tokens_T=tokens_T, action_T=action_T, starts=tuple(starts[number].tolist())))
    return rows


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Flat values split into parts of these lengths."""
    if lengths.sum() != len(values):
        raise ValueError("the lengths of the rows do not add up")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
