"""What the factory of each kind returns: the contracts that built-in and outside plugins share.

| kind | the factory is | called |
|---|---|---|
| advantage, transform, uncertainty, algorithm | see `retrain.advantages` | once per run |
| detector, controller, reward, data source, environment | `f(context) -> protocol below` | once per run |
| backend, recorder, health monitor | `f(context) -> protocol below` | once per run |
| pacer | `f(context) -> Pacer` of `retrain.plugins.pacing` | once per run |
| inference engine | `f(context, policy) -> Engine`, see `retrain.plugins.serving` for both | once per run |
| config table | a pydantic model with `extra="forbid"` | once per command |
| launcher | `f(context) -> Launcher`, see `retrain.plugins.launching` | once per campaign |
| command | a `click.Command` | when typed |
| init template | the text of the TOML file | when asked for |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from retrain.types import (
    ActionRow,
    Capabilities,
    Example,
    Floats,
    Mask,
    Message,
    Sample,
    SampleRequest,
    SamplingParams,
    Score,
    StopReason,
    Tokens,
    TrainBatch,
    TrainReport,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from retrain.config.resolved import Config
    from retrain.plugins.manager import Plugins
    from retrain.seeding import Seeds


def _never_stop() -> None:
    """Outside a run nobody asks for a stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginContext:
    """What a factory may look at: the resolved config, its own validated parameters, the seeds, other plugins.

    `tokenizer` is a `transformers` tokenizer, present for every kind but the data source's and the config table's.
    `check_stop()` raises when the run was asked to stop: long work inside `Backend.train`, which is shielded from
    signals, calls it where nothing has changed yet (between micro-batches, never after the optimizer has stepped).
    """

    config: Config
    seeds: Seeds
    plugins: Plugins
    params: BaseModel | None = None
    tokenizer: Any = None
    check_stop: Callable[[], None] = _never_stop


Deliver = Callable[[int, int, Sample], None]  # (number of the request, number of the seed, the finished sample)


class Reward(Protocol):
    """A verifier of text answers.

    It is built in the run's process and sent, pickled, to processes that score: hold plain data, and make what is
    heavy in `prepare`. With `async def score` it stays in the run's process instead, for calls over a network: at most
    `concurrency` at a time, each cancelled at its time limit.

    Optional: `prepare()`, called once in each scoring process before the first score, outside of any time limit;
    `gold(example) -> str | None`, a completion that must score 1, for the audit (None: there is none to give);
    `metrics() -> Mapping[str, float]` of an async reward, fields for the step's line, asked once per step;
    `concurrency: int` of an async reward, 16 when absent.
    """

    def score(self, example: Example, text: str) -> Score:
        """Judge one completion. A number will do for a Score; an exception becomes a failed score, never a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """What a data source found: the examples, lines worth telling the user, and its own verifier if it has one."""

    examples: tuple[Example, ...]
    notes: tuple[str, ...] = ()
    reward: Reward | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an episode wants of the policy: the whole conversation so far, up to the answer, or plain text.

    `tools` are JSON schemas that the chat template shows to the model.
    """

    prompt: str | Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy said: its text without special tokens, and why it stopped."""

    text: str
    stop_reason: StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an episode went: its score, and why it ended when that was not of its own accord."""

    score: Score
    hit_turn_limit: bool = False


class Environment(Protocol):
    """Tasks with an interaction and a verifier of their own, played by many episodes side by side.

    Everything that goes in and out is plain data (JSON): the environment is built in the run's process and sent,
    pickled, to a process that can be killed, so hold plain data and make what is heavy in `load`, which is called there
    first. Token ids are the kernel's business; the environment sees text.
    """

    def load(self) -> LoadedData:
        """All tasks, as `DataSource.load`; each example's `prompt` is the opening, shown in the records."""

    def begin(self, examples: Sequence[Example]) -> None:
        """Start one episode per entry, numbered by place; the same example again and again is a group.

        Episodes that were still open are dropped.
        """

    def advance(self, replies: Mapping[int, Reply]) -> Mapping[int, Ask]:
        """Go on with the episodes that got a reply, or from the beginning when none did.

        Returns once every open episode waits for the policy or has ended: what each of those that wait asks. An
        episode that cannot go on ends with a failed score; it does not raise.
        """

    def finish(self) -> Sequence[Ending]:
        """The endings of all episodes, in order; called once when none asks any more. A group is scored together."""


class DataSource(Protocol):
    """Where tasks come from."""

    def load(self) -> LoadedData:
        """All examples, in a fixed order. Called once per run, before the model loads; ConfigError on bad data."""


class PlanningDetector(Protocol):
    """Marks the tokens that plan rather than execute."""

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length; ids are action tokens only. Called once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerView:
    """What a controller sees after a step: rates over all completions, pooled variance over execution tokens.

    `correct_rate` and `execution_variance` are None when there was nothing to measure.
    """

    step: int
    correct_rate: float | None
    execution_variance: float | None


class Controller(Protocol):
    """A schedule with state: one number per step."""

    def value(self, step: int) -> float:
        """The number for this step, in [0, 1], asked before the step's observation."""

    def observe(self, view: ControllerView) -> None:
        """Learn from a finished step."""

    def metrics(self) -> Mapping[str, float | bool]:
        """Extra fields for the step's line in `metrics.jsonl`."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""


class Engine(Protocol):
    """Draws completions from the current policy. What else it may do stands in `retrain.plugins.serving`."""

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One list per request, one sample per seed, in order; a sample depends on its prompt and seed alone.

        An engine that finishes some before others takes a third parameter, `deliver: Deliver | None`, and calls it,
        in the same thread, with each sample as soon as it is finished: it is then scored meanwhile.
        """

    def close(self) -> None:
        """Release what is held; safe to call twice."""


class Backend(Protocol):
    """Owns the policy: samples from it, trains it, saves it. It may be `Measuring` and `SamplesAhead` besides."""

    capabilities: Capabilities

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """As `Engine.sample`, from the policy last published; a third parameter `deliver` likewise."""

    def train(self, batch: TrainBatch) -> TrainReport:
        """One optimizer step over at least one row; BackendError, and unchanged weights, on a non-finite number."""

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Optional: log-probabilities that `train` has for the rows' action tokens, 0 elsewhere; nothing changes."""

    def publish(self) -> int:
        """Make the trained policy the one that `sample` uses; returns its version, 0 before any training."""

    def save_adapter(self, folder: Path) -> None:
        """Write a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`) into an existing empty folder."""

    def save(self, folder: Path) -> None:
        """Write adapter and optimizer, all that `load` needs, into an existing empty folder."""

    def load(self, folder: Path) -> None:
        """Continue from what `save` wrote."""

    def close(self) -> None:
        """Release device memory and processes; safe to call twice."""


class Recorder(Protocol):
    """Receives what a run writes down, beside the JSONL files that are always written.

    Whatever a method raises is reported once, by the recorder's name, and never stops training. `state`, `restore` and
    `checkpoint` are optional: a recorder without them keeps nothing over a resume and takes no adapters.
    """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave; on a resume alone, before `start`."""

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Once per session, with the content of `run.json`, secrets hidden, and the run's folder.

        After an exception here only `state` and `finish` are still called.
        """

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Each line of `metrics.jsonl`, after it was written."""

    def checkpoint(self, folder: Path, name: str) -> None:
        """Each saved checkpoint: its complete folder, with the PEFT adapter, to be read during the call only."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; asked at each checkpoint."""

    def finish(self, error: BaseException | None = None) -> None:
        """Once, however the run ends: `error` is what ended it, None when it reached its last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong with the run as a whole, as a health monitor sees it.

    `state` names it in `metrics.jsonl` (`truncation`, `entropy_collapse`: lower case and underscores). `message` says
    the cause and the smallest fix, naming a key of the configuration. `severity` "stop" ends the run whatever
    `[health] policy` says, "warn" leaves that to the policy.
    """

    state: str
    message: str
    severity: Literal["warn", "stop"] = "warn"


class HealthMonitor(Protocol):
    """Watches the lines of `metrics.jsonl` for a run that goes on and learns nothing.

    Whatever a method raises is reported once, by the monitor's name, and never stops training. What it finds must
    depend on the lines alone, so that a resumed run finds the same.
    """

    def observe(self, metrics: Mapping[str, Any]) -> Sequence[Finding]:
        """All that is wrong at this step, for as long as it is; before the line is written. Fields may be absent."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON; asked at each checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` gave."""
