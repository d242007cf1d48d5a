"""The data of a step: examples become completions, completions get scores, groups get credit, rows get trained.

Shape suffixes: `_T` one entry per token of a row, `_G` one per completion of a group.
Arrays are numpy and read-only by convention: to change a value, make a new array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.declared import Capabilities as Capabilities
from retrain.kernel.declared import CheckpointMode as CheckpointMode
from retrain.kernel.declared import Determinism as Determinism
from retrain.kernel.declared import Kind as Kind

Tokens = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Experts = NDArray[np.int16]
# exp(20) = 5e8 is beyond any mismatch of sampler and trainer that could still be trained on, and its square, of which
# the effective sample size has sums, stays finite in float32.
MAX_LOG_RATIO = 20.0
Message = Mapping[str, Any]  # {"role": "user", "content": "..."}, with `tool_calls` where tools are used
NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """One verifiable task: a prompt, a reference answer and anything else that its verifier needs.

    `id` is stable across runs and machines, and equal for equal tasks: held-out splits and comparisons rely on it.
    `prompt` is the user's message, or a whole chat. `info` is plain data (JSON) that the verifier may read.
    """

    id: str
    prompt: str | Sequence[Message]
    reference: str
    task: str = ""
    info: Mapping[str, object] = field(default_factory=dict)


class StopReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # an end-of-sequence token was sampled; it is kept and trained
    LENGTH = "length"  # `max_tokens` or the context limit was reached: the answer is truncated
    TURNS = "turns"  # the episode had not ended after its last permitted turn


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Settings of sampling; the log-probabilities returned belong to exactly this distribution.

    `max_tokens` limits the new tokens; `temperature` > 0 divides the logits. `entropy` requests the entropy of the
    sampling distribution at each position. `greedy` takes the likeliest token each time, and seeds have no effect.
    """

    max_tokens: int
    temperature: float
    entropy: bool = False
    greedy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRequest:
    """One prompt and a derived seed per completion; a completion depends on its prompt and seed only."""

    prompt_T: Tokens
    seeds_G: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One completion as an engine returns it: sampled tokens only, the end-of-sequence token included.

    `logprobs_T` are natural logarithms under the sampling distribution, `entropies_T` (nats) only if requested.
    `policy_version` is the version that `publish` returned before these tokens were sampled. If `logprobs_T` were
    recomputed with the training model, `engine_logprobs_T` are the engine's own for the same tokens. `forced_T` marks
    tokens that were put there, not sampled, such as the closing tag of a thought; their numbers are 0. Of a mixture of
    experts `experts_TLK` has the K experts of each of its layers in the pass that a token was sampled from, -1 where
    unknown, and `context_experts_TLK` the experts of the prompt's tokens.
    """

    tokens_T: Tokens
    logprobs_T: Floats
    stop_reason: StopReason
    policy_version: int
    entropies_T: Floats | None = None
    engine_logprobs_T: Floats | None = None
    forced_T: Mask | None = None
    experts_TLK: Experts | None = None
    context_experts_TLK: Experts | None = None

    @property
    def action_T(self) -> Mask:
        return np.ones(len(self.tokens_T), np.bool_) if self.forced_T is None else ~self.forced_T


def joined_experts(parts: Sequence[Experts | None], tokens: Sequence[Tokens]) -> Experts | None:
    """All parts as one array, -1 for the tokens of a part that lacks them; None when all do."""
    sizes = next((part.shape[1:] for part in parts if part is not None), None)
    if sizes is None:
        return None
    unknown = (np.full((len(tokens_T), *sizes), -1, np.int16) for tokens_T in tokens)
    return np.concatenate([one if part is None else part for part, one in zip(parts, unknown, strict=True)])


class TeacherRow(NamedTuple):
    """Sampled tokens in the context of a teacher that sees more, and its log-probabilities of them, `[A]`."""

    tokens_T: Tokens
    action_T: Mask
    logprobs_A: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of an episode, in order: sampled tokens, rewards, and the state that each began in.

    The score's share beyond these rewards belongs to the last turn. Equal texts are equal states, "" = unknown.
    """

    lengths: tuple[int, ...]
    rewards: tuple[float, ...] = ()
    states: tuple[str, ...] = ()

    def rewards_of(self, score: float) -> Floats:
        """Return the reward of each turn, `[K]`; their sum is the score."""
        count = len(self.lengths)
        rewards_K = np.array([*self.rewards, *[0.0] * count][:count], dtype=np.float64)
        # A difference, so that the only turn gets exactly the score.
        rewards_K[-1:] = score - rewards_K[:-1].sum()
        return rewards_K


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """Prompt, sampled and environment tokens, in order; single-turn and multi-turn alike.

    `action_T` marks the tokens that the policy sampled. `logprobs_T`, `entropies_T` and `engine_logprobs_T` (see
    `Sample`) have the row's length and are meaningful at action tokens only (0 at the others). `text` is a view of the
    sampled tokens, never trained on; if the model thought, `reasoning` and `answer` are its parts. `starts` are the
    positions at which the policy got a fresh context: usually only 0, and more when an episode rewrote its history;
    each part is trained as a separate row. `turns` counts how often the policy was sampled, `by_turn` is about each
    time; None = a single turn. `rewards_T` are rewards of single tokens in addition to the score, for a transform that
    takes them. `reference_logprobs_T` and `kl_coef` are for a KL term of the loss (see `TrainRow`), `teacher` is for a
    distillation term, `experts_TLK` for a mixture of experts (see `Sample`). `squared_probs_T` is the trainer's sum of
    squared probabilities at each token, where credit needs it.
    """

    tokens_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    text: str
    stop_reason: StopReason
    policy_version: int
    entropies_T: Floats | None = None
    engine_logprobs_T: Floats | None = None
    rewards_T: Floats | None = None
    starts: tuple[int, ...] = (0,)
    turns: int = 1
    by_turn: Turns | None = None
    reference_logprobs_T: Floats | None = None
    kl_coef: float = 0.0
    teacher: TeacherRow | None = None
    experts_TLK: Experts | None = None
    squared_probs_T: Floats | None = None
    reasoning: str = ""
    answer: str | None = None

    @property
    def num_actions(self) -> int:
        return int(np.count_nonzero(self.action_T))

    @property
    def contexts(self) -> list[slice]:
        """Spans that each began with a fresh context and in which the policy sampled something."""
        parts = map(slice, self.starts, (*self.starts[1:], len(self.tokens_T)))
        return [part for part in parts if self.action_T[part].any()]


class Outcome(StrEnum):
    """The three outcomes of scoring; they are never merged."""

    SCORED = "scored"
    NO_VERDICT = "no_verdict"  # the verifier cannot decide: left out of its group and counted
    FAILED = "failed"  # the verifier broke: left out, counted, and the run stops past a limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The verdict on one completion: a finite `value`, or none and the reason in `detail`.

    `parts` are the rewards whose weighted sum is `value`, or further measurements of an environment, by name.
    """

    outcome: Outcome
    value: float | None = None
    detail: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    shadow: Score | None = None  # by `[reward] shadow` on the same text: recorded, never trained

    @classmethod
    def of(cls, value: float) -> Score:
        """A verdict; ValueError unless it is a finite number, because a failure must never become one."""
        if not np.isfinite(number := float(value)):
            raise ValueError(f"a score must be a finite number, not {value!r}")
        return cls(outcome=Outcome.SCORED, value=number)

    @classmethod
    def no_verdict(cls, reason: str) -> Score:
        return cls(outcome=Outcome.NO_VERDICT, detail=reason)

    @classmethod
    def failed(cls, reason: str) -> Score:
        return cls(outcome=Outcome.FAILED, detail=reason)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """All completions of one prompt with their scores, in sampling order; scores above `correct_above` are correct.

    Credit uses `scores`, all else `raw_scores`: the same, unless a `Shaper` changed them (see `shaped`). `round` counts
    the rounds of prompts before its own in the step; `is_surplus`: it can teach, but the step has enough such groups.
    `greedy`, where credit needs it, is one more completion of the prompt, always of the likeliest tokens, with its
    score: a baseline that is not trained.
    """

    example: Example
    completions: tuple[Completion, ...]
    scores: tuple[Score, ...]
    correct_above: float = CORRECT_ABOVE
    raw_scores: tuple[Score, ...] = ()
    round: int = 0
    is_surplus: bool = False
    greedy: Completion | None = None
    greedy_score: Score | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "raw_scores", self.raw_scores or self.scores)

    def shaped(self, scores: Sequence[Score]) -> Group:
        """Return the group with other scores for credit; the raw ones stay."""
        return replace(self, scores=tuple(scores))


class ActionRow(Protocol):
    """A row of tokens, some of which the policy sampled: a `TrainRow`, a `Completion` or similar."""

    @property
    def tokens_T(self) -> Tokens: ...

    @property
    def action_T(self) -> Mask:
        """True where the policy sampled; never at the first token."""


class LogprobRow(NamedTuple):
    """Tokens whose log-probabilities are requested where `action_T` is True: the minimal `ActionRow`."""

    tokens_T: Tokens
    action_T: Mask

    @classmethod
    def of(cls, prompt_T: Tokens, tokens_T: Tokens) -> LogprobRow:
        """Join a prompt and its completion; the completion's log-probabilities are requested."""
        row_T = np.concatenate([prompt_T, tokens_T])
        return cls(row_T, np.arange(len(row_T)) >= len(prompt_T))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainRow:
    """One row with its credit; all arrays have the row's length, `advantages_T` is 0 where `action_T` is False.

    An action token with zero advantage still counts in the loss denominator. `logprobs_T` are the behaviour
    log-probabilities; `engine_logprobs_T`, if given, replace them in the truncated importance weight. A KL term of
    weight `kl_coef` compares with `reference_logprobs_T`. A row is one sequence of the loss. `group` is the position of
    its group in the step, and `is_truncated` says that its completion was cut off. `experts_TLK` is for a mixture of
    experts (see `Sample`). `turns_T` numbers the turn of each action token; None = one turn. `teacher` is
    for a distillation term; None = the row has no teacher.
    """

    tokens_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    advantages_T: Floats
    engine_logprobs_T: Floats | None = None
    reference_logprobs_T: Floats | None = None
    kl_coef: float = 0.0
    group: int = 0
    is_truncated: bool = False
    experts_TLK: Experts | None = None
    turns_T: Tokens | None = None
    teacher: TeacherRow | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainBatch:
    """The rows of one optimizer step.

    `lr` is its learning rate, None = `[training] lr`. `num_masked` sequences have no row because they were masked, and
    still count where the loss divides by sequences; `masked_groups` are their groups, where known. It is update number
    `update` of the step's `updates`, all before the next `publish`. `loss` names its loss, empty = `[algorithm] loss`.
    """

    step: int
    rows: tuple[TrainRow, ...]
    temperature: float
    lr: float | None = None
    num_masked: int = 0
    masked_groups: tuple[int, ...] = ()
    update: int = 0
    updates: int = 1
    loss: str = ""

    @property
    def num_actions(self) -> int:
        """Loss denominator: all action tokens of the step."""
        return sum(int(np.count_nonzero(row.action_T)) for row in self.rows)


def percentile_99(values_N: Floats) -> float:
    """The 99th percentile, equal to the bit to `np.percentile`, whose imports cost 25 ms in a run's first step."""
    rank = 0.99 * (values_N.size - 1)
    below = int(rank)
    above = min(below + 1, values_N.size - 1)
    low, high = np.partition(values_N, (below, above))[[below, above]]
    share = rank - below
    # NumPy interpolates from the nearer end; the other form can differ in the last bit.
    return float(low + (high - low) * share if share < 0.5 else high - (high - low) * (1.0 - share))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """Report of one optimizer step. `loss` is the token mean unless `loss_is_placeholder`.

    Ratios compare trainer and sampler on the same tokens, rho = exp(logp_trainer - logp_sampler); gaps are
    |logp_trainer - logp_sampler| in nats; `k3` = mean(rho - 1 - log rho); `ess_frac` = (sum rho)^2 / (n sum rho^2).
    `clip_fraction` is the share of action tokens whose ratio or weight was clipped. None = not reported by a remote
    trainer; records omit it. `lr` is the learning rate that was applied.

    For a step of several `updates`, ratios and gaps describe the first one, `clip_fractions` lists them all, and
    `rejected` says why the step ended before its last update.
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
    lr: float | None = None
    updates: int = 1
    clip_fractions: tuple[float, ...] = ()
    rejected: str = ""

    @classmethod
    def measured(
        cls, *, loss: float, grad_norm: float | None, gaps_N: Floats, clipped: int, lr: float | None = None
    ) -> TrainReport:
        """From `gaps_N`, log rho of every action token, at least one; `clipped` of them had ratio or weight clipped.

        For the ratios log rho is clamped to [-20, 20], so that one extreme token does not make them infinite.
        """
        clamped_N = np.clip(gaps_N, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratios_N, sizes_N = np.exp(clamped_N), np.abs(gaps_N)
        return cls(
            loss=loss,
            grad_norm=grad_norm,
            num_tokens=len(gaps_N),
            ratio_mean=float(ratios_N.mean()),
            ratio_max=float(ratios_N.max()),
            gap_mean=float(sizes_N.mean()),
            gap_p99=percentile_99(sizes_N),
            gap_max=float(sizes_N.max()),
            # expm1, because exp(x) - 1 - x cancels for the small gaps that are usual
            k3=float((np.expm1(clamped_N) - clamped_N).mean()),
            ess_frac=float(ratios_N.sum() ** 2 / (len(ratios_N) * np.square(ratios_N).sum())),
            clip_fraction=clipped / len(gaps_N),
            lr=lr,
        )


class GroupStatus(StrEnum):
    """The reason why a group of completions is not informative, if it is not."""

    INFORMATIVE = "informative"
    ALL_RIGHT = "all right"
    ALL_WRONG = "all wrong"
    TIED = "all same"  # equal scores from a verifier that gives partial credit
    SURPLUS = "surplus"  # informative, and not trained: see `Group.is_surplus`
    NO_VERDICT = "no verdict"  # fewer than two completions have a score


def verdicts(group: Group) -> list[float]:
    """Return the raw scores of a group's completions that have one, in order."""
    return values_of(group.raw_scores)


def prefix_of(task: str) -> str:
    """Return the beginning of the ids of one of `[[data.tasks]]`; empty, as every id begins, for a run's only task."""
    return f"{task}/" if task else ""


def groups_of(task: str, groups: Iterable[Group]) -> list[Group]:
    return [group for group in groups if group.example.id.startswith(prefix_of(task))]


def num_correct(group: Group) -> int:
    return sum(value > group.correct_above for value in verdicts(group))


def values_of(scores: Iterable[Score]) -> list[float]:
    return [score.value for score in scores if score.outcome is Outcome.SCORED and score.value is not None]


def group_status(group: Group) -> GroupStatus:
    """INFORMATIVE unless all scores are exactly equal or fewer than two completions have one.

    Decided on raw scores, except for completions that a shaper left without a verdict.
    """
    pairs = zip(group.raw_scores, group.scores, strict=True)
    status = status_of(values_of(raw for raw, score in pairs if score.outcome is Outcome.SCORED))
    return GroupStatus.SURPLUS if status is GroupStatus.INFORMATIVE and group.is_surplus else status


def status_of(values: Sequence[float]) -> GroupStatus:
    if len(values) < 2:
        return GroupStatus.NO_VERDICT
    if any(value != values[0] for value in values):
        return GroupStatus.INFORMATIVE
    # A binary verifier gives 0 or 1; equal scores in between are partial credit.
    if values[0] >= 1.0:
        return GroupStatus.ALL_RIGHT
    return GroupStatus.ALL_WRONG if values[0] <= 0.0 else GroupStatus.TIED
