"""Compact records of what credit needs per completion: ids, log-probabilities, entropies, planning marks, credit.

One safetensors file per step, flat arrays over all action tokens in the order of `generations.jsonl`; `lengths` splits
them into completions. Numbers are float32, which is all the precision that samplers have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats, Mask, Tokens
from retrain.rooms.session.records.files import new_digest
from retrain.rooms.text.whole_file import write_bytes

FOLDER = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """One completion's action tokens; `planning_T` is None when the run had no planning detector."""

    tokens_T: Tokens
    logprobs_T: Floats
    advantages_T: Floats
    entropies_T: Floats | None = None
    planning_T: Mask | None = None


def token_file(emergence: Path, step: int) -> Path:
    """The file of a step's records."""
    return emergence / FOLDER / f"step_{step:06d}.safetensors"


def write_tokens(emergence: Path, step: int, records: Sequence[TokenRecord]) -> dict[str, Any]:
    """Write the records of a step, completely or not at all; return the line of `token_files.jsonl` about the file."""
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(record.tokens_T) for record in records], dtype=np.int64),
        "tokens": np.concatenate([record.tokens_T for record in records]).astype(np.int32),
        "logprobs": np.concatenate([record.logprobs_T for record in records]).astype(np.float32),
        "advantages": np.concatenate([record.advantages_T for record in records]).astype(np.float32),
    }
    entropies = [record.entropies_T for record in records if record.entropies_T is not None]
    planning = [record.planning_T for record in records if record.planning_T is not None]
    if len(entropies) == len(records):
        arrays["entropies"] = np.concatenate(entropies).astype(np.float32)
    if len(planning) == len(records):
        arrays["planning"] = np.concatenate(planning).astype(np.uint8)
    file = token_file(emergence, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    from safetensors.numpy import save  # only a run needs it, and checks of a configuration import this module

    content = save(arrays)
    write_bytes(file, content)
    digest = new_digest()
    digest.update(content)
    return {"step": step, "bytes": len(content), "blake2b": digest.hexdigest()}


def read_tokens(emergence: Path, step: int) -> list[TokenRecord]:
    """The records of a step; ConfigError when there are none or the file is damaged."""
    from safetensors import safe_open

    file = token_file(emergence, step)
    try:
        open_regular(file).close()  # a pipe would keep the library waiting
        with safe_open(file, framework="numpy") as stream:
            arrays = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:  # the library raises exceptions of its own
        fix = "choose another --step, or a run made by this version"
        raise ConfigError(Problem(where=str(file), what=f"no readable token records: {error}", fix=fix)) from error
    cuts = np.cumsum(arrays["lengths"])[:-1]
    split = {name: np.split(values, cuts) for name, values in arrays.items() if name != "lengths"}
    return [
        TokenRecord(
            tokens_T=split["tokens"][i].astype(np.int64),
            logprobs_T=split["logprobs"][i].astype(np.float64),
            advantages_T=split["advantages"][i].astype(np.float64),
            entropies_T=split["entropies"][i].astype(np.float64) if "entropies" in split else None,
            planning_T=split["planning"][i].astype(np.bool_) if "planning" in split else None,
        )
        for i in range(len(arrays["lengths"]))
    ]
