"""Compact records per completion: ids, log-probabilities, entropies, planning marks, credit, and the whole row.

One safetensors file per step, flat arrays over all action tokens in the order of `generations.jsonl`; `lengths` splits
them into completions. Numbers are float32, the precision of samplers and trainers, except rewards of single tokens:
they are float64, because credit is computed from them.

A prompt is stored once for all completions that begin with it. `runs` are lengths in turn: actions, then tokens of the
environment, then actions again; `num_runs` of them belong to each completion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats, Mask, Tokens
from retrain.records.files import new_digest, write_bytes
from retrain.records.record_names import token_file


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRecord:
    """A completion's whole row: all tokens, a mask of those the policy sampled, the starts of fresh contexts."""

    tokens_T: Tokens
    action_T: Mask
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """One completion's action tokens; the names are those of `Completion`, None where the run had no such numbers."""

    tokens_T: Tokens
    logprobs_T: Floats
    advantages_T: Floats
    entropies_T: Floats | None = None
    planning_T: Mask | None = None
    engine_logprobs_T: Floats | None = None
    reference_logprobs_T: Floats | None = None
    rewards_T: Floats | None = None
    kl_coef: float = 0.0
    row: RowRecord | None = None


# the optional arrays, by the field of `TokenRecord`: stored where every completion has one
OPTIONAL: dict[str, tuple[str, type[np.generic], type[np.generic]]] = {
    "entropies_T": ("entropies", np.float32, np.float64),
    "planning_T": ("planning", np.uint8, np.bool_),
    "engine_logprobs_T": ("engine_logprobs", np.float32, np.float64),
    "reference_logprobs_T": ("reference_logprobs", np.float32, np.float64),
    "rewards_T": ("rewards", np.float64, np.float64),
}


def write_tokens(run: Path, step: int, records: Sequence[TokenRecord]) -> dict[str, Any]:
    """Write the records of a step, all or nothing; return the line of `token_files.jsonl` about the file."""
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(record.tokens_T) for record in records], dtype=np.int64),
        "tokens": np.concatenate([record.tokens_T for record in records]).astype(np.int32),
        "logprobs": np.concatenate([record.logprobs_T for record in records]).astype(np.float32),
        "advantages": np.concatenate([record.advantages_T for record in records]).astype(np.float32),
    }
    for field, (name, stored, _) in OPTIONAL.items():
        found = [values for record in records if (values := getattr(record, field)) is not None]
        if len(found) == len(records):
            arrays[name] = np.concatenate(found).astype(stored)
    if any(record.kl_coef for record in records):
        arrays["kl_coefs"] = np.array([record.kl_coef for record in records])
    rows = [record.row for record in records if record.row is not None]
    if len(rows) == len(records):
        arrays |= row_arrays(rows)
    file = token_file(run, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    from safetensors.numpy import save  # only a run needs it, and checks of a configuration import this module

    content = save(arrays)
    write_bytes(file, content)
    digest = new_digest()
    digest.update(content)
    return {"step": step, "bytes": len(content), "blake2b": digest.hexdigest()}


def read_arrays(run: Path, step: int, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a step's file, those of `names` that it has; ConfigError when it is absent or damaged."""
    from safetensors import safe_open

    file = token_file(run, step)
    try:
        open_regular(file).close()  # a pipe would keep the library waiting
        with safe_open(file, framework="numpy") as stream:
            wanted = [name for name in stream.keys() if names is None or name in names]  # noqa: SIM118 (not a mapping)
            return {name: stream.get_tensor(name) for name in wanted}
    except Exception as error:  # the library raises exceptions of its own
        fix = "restore the file, or choose another step"
        raise ConfigError(Problem(where=str(file), what=f"no readable token records: {error}", fix=fix)) from error


def read_tokens(run: Path, step: int) -> list[TokenRecord]:
    """Return the records of a step; ConfigError when the file is absent or damaged."""
    arrays, file = read_arrays(run, step), token_file(run, step)
    cuts, num = np.cumsum(arrays["lengths"])[:-1], len(arrays["lengths"])
    names = ("tokens", "logprobs", "advantages", *(name for name, _, _ in OPTIONAL.values()))
    split = {name: np.split(arrays[name], cuts) for name in names if name in arrays}
    try:
        rows = rows_of(arrays, split["tokens"]) if "prompt_of" in arrays else []
    except (ValueError, IndexError, KeyError) as error:
        fix = "choose another --step"
        raise ConfigError(Problem(where=str(file), what=f"rows cannot be put together: {error}", fix=fix)) from error
    optional = {each: (name, dtype) for each, (name, _, dtype) in OPTIONAL.items() if name in split}
    return [
        TokenRecord(
            tokens_T=split["tokens"][i].astype(np.int64),
            logprobs_T=split["logprobs"][i].astype(np.float64),
            advantages_T=split["advantages"][i].astype(np.float64),
            kl_coef=float(arrays["kl_coefs"][i]) if "kl_coefs" in arrays else 0.0,
            row=rows[i] if rows else None,
            **{each: split[name][i].astype(dtype) for each, (name, dtype) in optional.items()},
        )
        for i in range(num)
    ]


def row_arrays(rows: Sequence[RowRecord]) -> dict[str, np.ndarray]:
    """Return everything but the action tokens, as flat arrays."""
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
    """Return the rows with these action tokens; ValueError when arrays and actions do not fit together."""
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
    if lengths.sum() != len(values):
        raise ValueError("the lengths of the rows do not add up")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
