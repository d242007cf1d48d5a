"""The token files of a run, read: `completions` writes them and describes their arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Tokens
from retrain.records.completions import OPTIONAL, RowRecord, TokenRecord
from retrain.records.record_names import token_file


def read_arrays(run: Path, step: int, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of a step's file, optionally some `names`; ConfigError when it is absent or damaged."""
    from safetensors import safe_open

    file = token_file(run, step)
    try:
        open_regular(file).close()  # a pipe would keep the library waiting
        with safe_open(file, framework="numpy") as stream:
            wanted = [name for name in stream.keys() if names is None or name in names]  # noqa: SIM118 (not a mapping)
            return {name: stream.get_tensor(name) for name in wanted}
    except Exception as error:  # the library has other exceptions
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> ConfigError:
    what, fix = f"no readable token records: {error}", "restore the file, or choose another --step"
    return ConfigError(Problem(code="record.tokens-unreadable", where=str(file), what=what, fix=fix))


def read_tokens(run: Path, step: int) -> list[TokenRecord]:
    """Return the records of a step; ConfigError when the file is absent or damaged."""
    arrays = read_arrays(run, step)
    cuts, num = np.cumsum(arrays["lengths"])[:-1], len(arrays["lengths"])
    names = ("tokens", "logprobs", "advantages", *(name for name, _, _ in OPTIONAL.values()))
    split = {name: np.split(arrays[name], cuts) for name in names if name in arrays}
    try:
        rows = rows_of(arrays, split["tokens"]) if "prompt_of" in arrays else []
    except (ValueError, IndexError, KeyError) as error:
        raise _unreadable(token_file(run, step), error) from error
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


def rows_of(arrays: Mapping[str, np.ndarray], actions: Sequence[Tokens]) -> list[RowRecord]:
    """Return the rows with these action tokens; ValueError when arrays and actions do not fit together."""
    prompts = _cut(arrays["prompts"], arrays["prompt_lengths"])
    runs, starts = _cut(arrays["runs"], arrays["num_runs"]), _cut(arrays["starts"], arrays["num_starts"])
    environment = _cut(arrays["environment"], np.array([int(each[1::2].sum()) for each in runs], dtype=np.int64))
    rows = []
    for index, tokens_A in enumerate(actions):
        prompt = prompts[int(arrays["prompt_of"][index])]
        is_action = np.repeat(np.arange(len(runs[index])) % 2 == 0, runs[index])
        action_T = np.concatenate([np.zeros(len(prompt), np.bool_), is_action])
        tokens_T = np.concatenate([prompt, np.zeros(len(is_action))]).astype(np.int64)
        tokens_T[action_T] = tokens_A
        tokens_T[len(prompt) :][~is_action] = environment[index]
        rows.append(RowRecord(tokens_T=tokens_T, action_T=action_T, starts=tuple(starts[index].tolist())))
    return rows


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    if lengths.sum() != len(values):
        raise ValueError("the lengths of the rows do not add up")
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
