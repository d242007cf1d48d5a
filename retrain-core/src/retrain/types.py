"""The things that flow: examples become completions, completions get scores, groups get credit, rows get trained.

Shape suffixes: `_T` one entry per token of a row, `_G` one per completion of a group.
Arrays are numpy and read-only by convention: whoever needs another value makes another array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, with `tool_calls` where tools are used

NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One verifiable task: a prompt, a reference answer and whatever its verifier needs besides.

    `id` is stable across runs and machines, and equal for equal tasks: held-out splits and comparisons go by it.
    `prompt` is the user's message, or a whole chat. `info` is plain data (JSON) that the verifier may read.
    """

    id: str
    prompt: str | Sequence[Message]
    reference: str
    task: str = ""
    info: Mapping[str, object] = field(default_factory=dict)


class Kind(StrEnum):
    """Every kind of part that a TOML can name; the value is the word used in messages."""

    ADVANTAGE = "advantage"
    TRANSFORM = "transform"
    UNCERTAINTY = "uncertainty"
    ALGORITHM = "algorithm"
    PLANNING_DETECTOR = "planning detector"
    CONTROLLER = "controller"
    REWARD = "reward"
    DATA_SOURCE = "data source"
    ENVIRONMENT = "environment"
    BACKEND = "backend"
    INFERENCE_ENGINE = "inference engine"
    RECORDER = "recorder"
    HEALTH_MONITOR = "health monitor"
    PACER = "pacer"
    LAUNCHER = "launcher"
    CONFIG_TABLE = "config table"
    COMMAND = "command"
    TEMPLATE = "init template"


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # an end-of-sequence token was sampled; it is kept and trained
    LENGTH = "length"  # `max_tokens` or the context was full: the answer is truncated
    TURNS = "turns"  # an episode that had not ended after its last permitted turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How completions are drawn; the log-probabilities returned belong to exactly this distribution.

    `max_tokens` new tokens at most; `temperature` > 0 divides the logits. `entropy` asks for the entropy of the
    sampling distribution at each position.
    """

    max_tokens: int
    temperature: float
    entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One prompt and a derived seed for each completion wanted of it; a completion depends on its own seed only."""

    prompt_T: Tokens
    seeds_G: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """What an engine returns for one completion: sampled tokens only, the end-of-sequence token included.

    `logprobs_T` are natural logarithms under the sampling distribution, `entropies_T` (nats) where asked for.
    `policy_version` is the version that `publish` returned before these tokens were drawn. Where `logprobs_T` were
    recomputed with the training model, `engine_logprobs_T` are what the engine itself said about the same distribution.
    """

    tokens_T: Tokens
    logprobs_T: Floats
    stop_reason: StopReason
    policy_version: int
    entropies_T: Floats | None = None
    engine_logprobs_T: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Prompt, sampled and environment tokens, in order; single-turn and multi-turn alike.

    `action_T` marks the tokens that the policy sampled. `logprobs_T`, `entropies_T` and `engine_logprobs_T` (see
    `Sample`) have the row's length and mean something at action tokens only (0 elsewhere). `text` is a view of the
    sampled tokens, never trained on. `starts` are the positions at which the policy was given a context afresh: usually
    0 alone, and more when an episode rewrote its history. What stands before a start was not seen after it, so each
    part is trained as a row of its own. `turns` counts how often the policy was asked.
    """

    tokens_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    text: str
    stop_reason: StopReason
    policy_version: int
    entropies_T: Floats | None = None
    engine_logprobs_T: Floats | None = None
    starts: tuple[int, ...] = (0,)
    turns: int = 1

    @property
    def num_actions(self) -> int:
        """Number of tokens that the policy sampled."""
        return int(np.count_nonzero(self.action_T))


class Outcome(StrEnum):
    """The three ends that scoring can have; they are never merged."""

    SCORED = "scored"
    NO_VERDICT = "no_verdict"  # the verifier cannot tell: left out of its group and counted
    FAILED = "failed"  # the verifier broke: left out, counted, and the run stops past a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The verdict on one completion: a finite `value`, or none and the reason in `detail`.

    `parts` are the values of several rewards that `value` is the weighted sum of, or what an environment measured
    besides; they are logged, and nothing is computed from them.
    """

    outcome: Outcome
    value: float | None = None
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, value: float) -> Score:
        """A verdict; ValueError unless it is a finite number, because a failure must never become one."""
        number = float(value)
        if not np.isfinite(number):
            raise ValueError(f"a score must be a finite number, not {value!r}")
        return cls(outcome=Outcome.SCORED, value=number)

    @classmethod
    def no_verdict(cls, reason: str) -> Score:
        """The verifier looked and cannot tell."""
        return cls(outcome=Outcome.NO_VERDICT, detail=reason)

    @classmethod
    def failed(cls, reason: str) -> Score:
        """The verifier itself broke."""
        return cls(outcome=Outcome.FAILED, detail=reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All completions of one prompt with their scores, in sampling order: `len(completions) == len(scores)`."""

    example: Example
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRow:
    """One row with its credit; all arrays have the row's length, `advantages_T` is 0 where `action_T` is False.

    An action token may well have a zero advantage: it still counts in the loss denominator. `logprobs_T` are those of
    the behaviour policy; `engine_logprobs_T`, where given, take their place in the truncated importance weight.
    """

    tokens_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    advantages_T: Floats
    engine_logprobs_T: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """The rows of one optimizer step."""

    step: int
    rows: tuple[TrainRow, ...]
    temperature: float

    @property
    def num_actions(self) -> int:
        """Loss denominator: all action tokens of the step."""
        return sum(int(np.count_nonzero(row.action_T)) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """What one optimizer step did. `loss` is the token mean unless `loss_is_placeholder`.

    Ratios compare trainer and sampler on the same tokens, rho = exp(logp_trainer - logp_sampler); gaps are
    |logp_trainer - logp_sampler| in nats; `k3` = mean(rho - 1 - log rho); `ess_frac` = (sum rho)^2 / (n sum rho^2).
    `clip_fraction` is the share of action tokens whose ratio or weight was clipped. What a trainer elsewhere does not
    tell is None, and left out of the records.
    """

    loss: float
    grad_norm: float | None
    num_tokens: int
    ratio_mean: float | None
    ratio_max: float | None
    gap_mean: float | None
    gap_p99: float | None
    gap_max: float | None
    k3: float | None
    ess_frac: float | None
    clip_fraction: float | None = 0.0
    loss_is_placeholder: bool = False


class CheckpointMode(StrEnum):
    """What a backend can bring back after a restart."""

    EXACT = "exact"
    ADAPTER_ONLY = "adapter_only"
    UNSUPPORTED = "unsupported"


class Determinism(StrEnum):
    """When the same seed gives the same run."""

    EXACT = "exact"
    SAME_MACHINE = "same_machine"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend promises; the kernel refuses configurations that need more, before anything heavy loads."""

    reports_sync_loss: bool
    preserves_token_advantages: bool
    supports_checkpoint_resume: bool
    checkpoint_resume_mode: CheckpointMode
    determinism: Determinism
    provides_entropy: bool
