"""What a data rank receives, read from the published description of the wire alone: it shares no code with ours.

A batch of a rank is a msgpack array of micro-batches, a micro-batch an array of sixteen fields in a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

PER_TOKEN = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "temperatures", "env_names")
FIELDS = (
    *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids", "sequence_lengths"),
    *("temperatures", "env_names", "seq_lens", "ref_logprobs", "routed_experts", "mm_kwargs", "mm_token_type_ids"),
    *("rl_weights", "ce_weights", "ref_kl_weights"),
)


class WireError(Exception):
    """The payload breaks a rule of the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One packed sample, taken out again."""

    tokens: list[int]
    mask: list[bool]
    advantages: list[float]
    logprobs: list[float]
    temperature: float
    env_name: str


def read(payload: bytes, *, seq_len: int) -> list[dict[str, Any]]:
    """The micro-batches by field name; WireError on the first rule that one breaks."""
    batches = [dict(zip(FIELDS, fields, strict=True)) for fields in msgspec.msgpack.decode(payload)]
    _require(bool(batches), "a rank must get at least one micro-batch")
    for batch in batches:
        _check(batch, seq_len)
    return batches


def rows_of(batch: dict[str, Any]) -> list[Row]:
    """The packed samples of one micro-batch, in order, without the padding."""
    rows, start = [], 0
    *lengths, last = batch["sequence_lengths"]
    for length in [*lengths, last - batch["env_names"].count("")]:
        part = slice(start, start + length)
        rows.append(
            Row(
                tokens=batch["input_ids"][part],
                mask=batch["loss_mask"][part],
                advantages=batch["advantages"][part],
                logprobs=batch["inference_logprobs"][part],
                temperature=batch["temperatures"][start],
                env_name=batch["env_names"][start],
            )
        )
        start += length
    return rows


def is_filler(batch: dict[str, Any]) -> bool:
    """Nothing in it is trained."""
    return not any(batch["loss_mask"])


def _check(batch: dict[str, Any], seq_len: int) -> None:
    length = len(batch["input_ids"])
    _require(0 < length <= seq_len, f"{length} tokens in a micro-batch of at most {seq_len}")
    for name in PER_TOKEN:
        _require(len(batch[name]) == length, f"{name} has {len(batch[name])} entries for {length} tokens")
    lengths = batch["sequence_lengths"]
    _require(lengths == batch["seq_lens"] and sum(lengths) == length and min(lengths) > 0, "sequence lengths")
    padding = batch["env_names"].count("")
    wanted = [position for part in [*lengths[:-1], lengths[-1] - padding, padding] for position in range(part)]
    _require(batch["position_ids"] == wanted, "positions restart per sample, and in the padding at the end of the last")
    _require(not any(batch["loss_mask"][length - padding :]), "no token of the padding counts")
    numbers = zip(batch["loss_mask"], batch["advantages"], batch["inference_logprobs"], strict=True)
    for is_trained, advantage, logprob in numbers:
        _require(isinstance(is_trained, bool), "loss_mask holds booleans")
        _require(math.isfinite(advantage) and math.isfinite(logprob) and logprob <= 0.0, "finite numbers")
        if not is_trained:
            # a filler is a copy of a real micro-batch and keeps its log-probabilities
            _require(advantage == 0.0 and (logprob == 0.0 or is_filler(batch)), "zeros where nothing is trained")
    _require(all(isinstance(token, int) and token >= 0 for token in batch["input_ids"]), "token ids")
    _require(all(temperature > 0.0 for temperature in batch["temperatures"]), "temperatures")
    names = batch["env_names"][: length - padding]
    _require(all(name and name != "all" for name in names), "a name per token but the padding, never 'all'")
    _require(all(batch[name] is None for name in FIELDS[9:]), "fields of features that are not used")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise WireError(rule)
