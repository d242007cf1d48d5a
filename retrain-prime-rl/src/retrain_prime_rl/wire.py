"""Messages to a PRIME-RL trainer: msgpack arrays whose field order is the protocol.

`MicroBatch` is the wire of 0.8, one list of them per step and data rank. `ScalarBatch` is the format of earlier
trainers, before advantages were per token: unpacked samples with one advantage each, packed by the trainer.

Suffix `_T`: one entry per token, at the index of the token it describes.
"""

from __future__ import annotations

from typing import Any

import msgspec


class MicroBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One forward and backward pass of one data rank: packed samples, one after another.

    All per-token lists have the length of `input_ids`. `position_ids` restart at 0 with every packed sample, whose
    lengths `sequence_lengths` and `seq_lens` list; both sum to the length. `inference_logprobs` (nats) and
    `advantages` are 0 where `loss_mask` is False. The optional fields belong to features that are not used here.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: Any = None
    mm_kwargs: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class ScalarSample(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A sample of the older wire. `completion_mask` is False at the tokens of an environment; `advantage` is one."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    advantage: float | None = None


class ScalarBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """All samples of one step of the older wire."""

    examples: list[ScalarSample]
    step: int


def encode(message: list[MicroBatch] | ScalarBatch) -> bytes:
    return msgspec.msgpack.encode(message)
