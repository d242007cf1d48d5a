"""Tasks: prompts in a seeded order, rollouts, evaluation; data sources, rewards, environments and their verifier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Completion, Example, Message, SamplingParams, Score, StopReason, Tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """An example with its tokens; `epoch` distinguishes its draws: by default, the passes over the pool before."""

    example: Example
    tokens_T: Tokens
    epoch: int = 0


class Prompts(Protocol):
    """Training prompts, each as often as a sampler chooses it."""

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        """`count` prompts for a step, after the `cursor` ones that the run drew before. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Seeds of completions: the stream of each is keyed by purpose, example, epoch and number.

    Neither the step nor the batch size is in the key, so neither changes a completion.
    """

    seeds: Seeds
    purpose: str

    def of(self, prompt: Prompt, number: int, turn: int = 0) -> int:
        """Seed of completion `number` of a prompt; every turn of an episode has a separate one."""
        # Turn 0 is not in the key, so that a first turn draws the same tokens as a single-turn completion.
        later = (turn,) if turn else ()
        return self.seeds.derive(self.purpose, prompt.example.id, prompt.epoch, number, *later)


class RolloutBatch(Protocol):
    """The rollouts of one step or evaluation: `sample` first, then `scores`, then `metrics`."""

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        """`group_size` completions of every prompt; BackendError when they cannot be sampled."""

    def scores(self) -> list[tuple[Score, ...]]:
        """The score of each completion; RewardError when more failed than the configuration allows."""

    def metrics(self) -> Mapping[str, float]:
        """Further fields for the step's line, after `scores`.

        In several rounds `_mean` and `_rate` fields are the first one's, `_max` the largest; the rest adds up.
        """


class Rollouts(Protocol):
    """The one contract of tasks: a single-turn verifier and an episode of many turns are the same to the step.

    Optional: `has_verifier`, False where nothing is judged, so that no correct rate is recorded.
    """

    def batch(self, label: str, failures: Path | None = None) -> AbstractContextManager[RolloutBatch]:
        """Open the rollouts of a step or an evaluation; work that is unfinished when the block ends is abandoned.

        Texts whose scoring failed are kept in the folder `failures`, under `label`.
        """

    def close(self) -> None:
        """Release processes; safe to call twice."""


class Evaluation(Protocol):
    """Scores the policy on examples that are never trained on."""

    def is_due(self, step: int) -> bool:
        """True if the policy is to be evaluated after this step; before the first one it always is."""

    def measure(self, step: int, backend: Backend, failures: Path | None) -> dict[str, Any]:
        """Fields for the line of a step, -1 before training. Except for times they depend on the policy only."""

    def records(self) -> Sequence[Mapping[str, Any]]:
        """Lines of `eval.jsonl`, one per example, about the last `measure`; empty when called again."""

    def close(self) -> None:
        """Release processes; safe to call twice."""


class Reward(Protocol):
    """A verifier of text answers.

    It is built in the run's process and sent, pickled, to processes that score: hold plain data, and do heavy work in
    `prepare`. With `async def score` it stays in the run's process instead, for calls over a network: at most
    `concurrency` at a time, each cancelled at its time limit.

    Optional: `prepare()`, called once in each scoring process before the first score, outside of any time limit;
    `is_loaded: bool`, true when `prepare` loads nothing that building the reward has not, so that a run may try it at
    once, before it loads anything else; `gold(example) -> str | None`, a completion that must score 1, for the audit
    (None: it cannot give one); `answer_in(text) -> str | None`, the part of a completion that it takes for the answer,
    shown by `retrain init` and paid for by the control `format_only`; `needs_reference: bool`, true when an empty
    reference would make silence correct: such examples are left out; `metrics() -> Mapping[str, float]` of an async
    reward, fields for the step's line, called once per round of prompts (see `RolloutBatch.metrics`); `concurrency:
    int` of an async reward, 16 when absent; `gives_verdicts: bool`, false when it judges nothing (`none`): it is
    neither tried nor audited.
    """

    def score(self, example: Example, text: str) -> Score:
        """Score one completion; a number will do for a Score. An exception becomes a failed score, never a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """Result of a data source: examples, notes for the user, and optionally its own verifier."""

    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    reward: Reward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Input of the policy for its turn: the whole conversation so far, up to its answer, or plain text.

    `tools` are JSON schemas that the chat template shows to the model. `info` is for credit: episodes of a group that
    give the same `state_key` there are in the same state; without it, the messages since the last action are compared.
    """

    prompt: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A turn of the policy: its text without special tokens, and why it stopped."""

    text: str
    stop_reason: StopReason


NEITHER = Score.failed("the environment gave neither a score nor an answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """Result of an episode: its score or its answer, and whether the turn limit ended it.

    In an environment that plays the tasks of `[data]`, `answer`, the text for the rewards, replaces the score.
    `turn_rewards` are rewards of single turns, in order and part of the score: a turn gets the reward that its action
    earned, and the last one the rest of the score.
    """

    score: Score = NEITHER
    hit_turn_limit: bool = False
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, self.turn_rewards)):
            raise ValueError(f"rewards of turns must be finite numbers, not {self.turn_rewards}")


# The names that plugins imported before `reset`, `step` and `results` existed.
Ask, Reply, Ending = Observation, Action, EpisodeResult


class Environment(Protocol):
    """Tasks with an interaction and a verifier; many episodes are played side by side.

    With `traits={"plays_data": True}` in its spec it brings neither: `load` gives no examples, the tasks come from
    `[data]`, and each result has the answer that `[reward]` judges, unless the episode failed.

    The environment is built in the run's process and sent, pickled, to a process that can be killed: hold plain data,
    and do heavy work in `load`, the first call there. Arguments and return values are plain data (JSON). An environment
    sees text; it never sees token ids.
    """

    def load(self) -> LoadedData:
        """All tasks, as `DataSource.load`; each example's `prompt` is the opening, shown in the records."""

    def reset(self, examples: Sequence[Example]) -> Mapping[int, Observation]:
        """Start one episode per entry, numbered from 0; returns the first observations, as `step` does.

        An example that is given several times is a group. Episodes that are still open are dropped.
        """

    def step(self, actions: Mapping[int, Action]) -> Mapping[int, Observation]:
        """Continue the episodes with these numbers; returns the observation of every open episode.

        It returns once each episode waits for the policy or has ended; none waits when the mapping is empty. An
        episode that cannot continue ends with a failed score instead of raising.
        """

    def results(self) -> Sequence[EpisodeResult]:
        """One result per episode, in order; called once, when no episode waits. A group is scored together."""


class DataSource(Protocol):
    """A source of tasks.

    Optional: `preview(count) -> Sequence[Mapping[str, Any]]`, the first rows of a table, before `prompt_key` and
    `answer_key` are applied; `retrain init` looks for these columns in them.
    """

    def load(self) -> LoadedData:
        """All examples, in a fixed order; called once per run, before the model loads. ConfigError on bad data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedScore:
    """A score and the seconds that the verifier took for it, queueing not counted."""

    score: Score
    seconds: float


class Verifier(Protocol):
    """Judges the rollouts of a run, with the processes it needs: rewards of single answers, or an environment.

    `names` are the rewards as configured, or the environment's id; `rewards` is empty for an environment, since only it
    knows a right answer. `timeout_s` is the time limit of one text's score, None = no limit.
    """

    names: tuple[str, ...]
    rewards: tuple[Reward, ...]
    timeout_s: float | None

    def start(self) -> None:
        """Bring the processes up and prepare the rewards; PluginError names the one that fails. Safe to call twice."""

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> Sequence[TimedScore]:
        """Score each text as if the policy had written it, and nothing else; no score comes from a cache.

        Failed scores are returned like any other, however many there are.
        """

    def rollouts(
        self, backend: Backend, context: PluginContext, params: SamplingParams, context_length: int | None
    ) -> Rollouts:
        """The rollouts of a run that samples from `backend`; closing them closes the verifier."""

    def close(self) -> None: ...


class LoadedTasks(Protocol):
    """The tasks of a run once they are loaded: every prompt, for training and held out, and the verifier."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Every prompt, held-out ones last."""

    @property
    def verifier(self) -> Verifier: ...
