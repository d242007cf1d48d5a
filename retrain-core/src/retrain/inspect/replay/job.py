"""Replays one step: the gradients at the policy before it, then the step itself."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.inspect.replay.conditions import Condition, build_condition
from retrain.inspect.replay.gradients import (
    Folding,
    GivesGradients,
    StepGradient,
    Turn,
    largest,
    step_gradient,
    turn_of,
)
from retrain.inspect.replay.position import Position, before_step, checkpoints_by_steps
from retrain.inspect.replay.token_weights import TokenChange, TokenWeights, token_changes
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Group, TrainBatch
from retrain.records.files import digest_of
from retrain.records.run import StoredStep
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import token_texts

LOG = logging.getLogger("retrain")
TAKEN = "as taken"
ONE_STEP = (
    "One step: directions of the gradient at one policy. What training under these conditions would have led to, "
    "it does not say."
)
WEIGHTS = "*.safetensors"  # of a checkpoint: weights and moments; `PUBLISHED` are of the sampler
PUBLISHED = "published_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of an optimizer step that has other bits than on record."""

    step: int
    field: str
    was: Any
    now: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AsItWas:
    """The step trained again on its stored tokens, after the steps `forward`.

    `start` names the checkpoint that it began with, empty for the beginning of the run. `after` names the checkpoint
    after the step, empty where there is none, and `files` its files: whether each has the same bytes now. `is_exact`:
    everything that could be compared has the same bits.
    """

    start: str
    forward: list[int]
    is_exact: bool
    compared: tuple[str, ...]
    different: list[Difference]
    after: str
    files: Mapping[str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurningPrompt:
    """A prompt, and its part of 1 - cosine."""

    group: int
    example_id: str
    part: float
    prompt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A condition of a replayed step; `prompts` and `tokens` are those that turn its gradient most."""

    name: str
    cosine: float | None
    low: float | None
    high: float | None
    norm: float
    norm_ratio: float | None
    loss: float
    clip_fraction: float
    trained_tokens: int
    trained_groups: int
    parts: list[float]
    prompts: list[TurningPrompt]
    tokens: Sequence[TokenChange] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result, with the names of `--json`; the first condition is the step as taken. Texts in it are untrusted."""

    run: str
    step: int
    updates: int
    as_it_was: AsItWas
    conditions: list[Seen]
    resamples: int
    passes: int
    note: str = ONE_STEP


def replay_step(run: Path, step: int, tries: Sequence[str], plugins: Plugins, *, resamples: int, most: int) -> Replay:
    """Replay a step as recorded and under the conditions `tries`; ConfigError when it cannot be replayed."""
    with before_step(run, step, plugins) as position:
        conditions = [build_condition(text, position, plugins) for text in tries]
        stored, groups, credit = position.stored(step)
        if not credit.rows or "rejected" in stored.metrics:
            what = f"step {step} trained nothing: {stored.metrics.get('rejected') or 'no group was informative'}"
            raise ConfigError(Problem(where=printable(str(run)), what=what, fix="choose another --step"))
        comparison = _Comparison(position, stored, groups, plugins, resamples=resamples if tries else 0, most=most)
        seen = [comparison.taken(position.batch(step, credit)), *map(comparison.other, conditions)]
        return Replay(
            run=str(run),
            step=step,
            updates=int(stored.metrics.get("updates", 1)),
            conditions=seen,
            resamples=comparison.resamples,
            passes=comparison.passes,
            as_it_was=_as_it_was(position, step),
        )


class _Comparison:
    """Holds the gradient taken, and looks at one other at a time."""

    def __init__(
        self,
        position: Position,
        stored: StoredStep,
        groups: Sequence[Group],
        plugins: Plugins,
        *,
        resamples: int,
        most: int,
    ) -> None:
        if not isinstance(position.backend, GivesGradients):
            config = position.context.config
            what = f"backend {config.backend.backend!r} on {config.backend.devices!r} gives no gradients"
            fix = "replay runs of backend local that train on one device"
            raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))
        self._backend, self._position, self._stored, self._plugins = position.backend, position, stored, plugins
        self._groups, self._most, self.resamples, self.passes = groups, most, resamples, 0
        self._folding = Folding(position.context.seeds) if resamples else None
        temperature = position.checked.config.training.temperature
        logprobs = getattr(position.backend, "logprobs", None) if most else None
        self._token_weights = TokenWeights(groups, plugins, logprobs, temperature) if logprobs else None

    def taken(self, batch: TrainBatch) -> Seen:
        config = self._position.context.config
        self._taken = self._gradient(config, batch)
        self._weights = self._token_weights.of(config, batch) if self._token_weights else None
        seen, turn = self._seen(TAKEN, batch, self._taken)
        self._norm = turn.norm
        return seen

    def other(self, condition: Condition) -> Seen:
        config, step = condition.checked.config, self._position.step
        LOG.info("Step %d under %s", step, printable(condition.name))
        credit = condition.algorithm.assign(step, self._groups)
        if not credit.rows:
            what = f"{condition.name}: no group of step {step} is trained under it"
            raise ConfigError(Problem(where="--try", what=printable(what), fix="leave this condition out"))
        batch = self._position.batch(step, credit)
        seen, turn = self._seen(condition.name, batch, self._gradient(config, batch))
        weights = self._token_weights.of(config, batch) if self._token_weights else None
        if weights is None or self._weights is None or not turn.turns:
            return seen
        norms = self._norm, turn.norm
        open_ = self._token_weights.open if self._token_weights else {}
        changes = token_changes(self._weights, weights, open_, norms=norms, most=self._most)
        return replace(seen, tokens=[self._named(change) for change in changes])

    def _named(self, change: TokenChange) -> TokenChange:
        member = self._stored.groups[change.group][change.index]
        texts = token_texts(self._position.context.tokenizer, member.tokens.tokens_T.tolist())
        return replace(change, token=texts[change.position], reward=member.reward)

    def _gradient(self, config: Config, batch: TrainBatch) -> StepGradient:
        found = step_gradient(self._backend, config, self._plugins, batch, self._folding)
        self.passes += 1 + len(found.shares)
        return found

    def _seen(self, name: str, batch: TrainBatch, found: StepGradient) -> tuple[Seen, Turn]:
        seeds, step = self._position.context.seeds, self._position.step
        turn = turn_of(self._taken, found, seeds=seeds, step=step, groups=len(self._groups), resamples=self.resamples)
        seen = Seen(
            name=name,
            cosine=turn.cosine,
            low=turn.low,
            high=turn.high,
            norm=turn.norm,
            norm_ratio=turn.norm_ratio,
            loss=found.loss,
            clip_fraction=found.clipped / batch.num_actions,
            trained_tokens=batch.num_actions,
            trained_groups=len({row.group for row in batch.rows}),
            parts=list(turn.parts.values()),
            prompts=[self._prompt(group, part) for group, part in largest(turn.parts, self._most)],
        )
        return seen, turn

    def _prompt(self, group: int, part: float) -> TurningPrompt:
        example = self._groups[group].example
        text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
        return TurningPrompt(group=group, example_id=example.id, part=part, prompt=text)


def _as_it_was(position: Position, step: int) -> AsItWas:
    """Train the step, and compare policy and optimizer with the checkpoint after it, where there is one."""
    found = position.take(step)
    files: dict[str, bool] = {}
    after = checkpoints_by_steps(position.run, position.manifest).get(step + 1)
    if after:
        with tempfile.TemporaryDirectory(prefix="retrain-replay-") as folder:
            position.backend.save(Path(folder))
            written = [file.relative_to(folder) for file in sorted(Path(folder).rglob(WEIGHTS))]
            for name in written:
                if not name.name.startswith(PUBLISHED) and (after.path / name).is_file():
                    same = digest_of(Path(folder) / name).digest() == digest_of(after.path / name).digest()
                    files[name.as_posix()] = same
    different = [
        Difference(step=number, field=name, was=was, now=now)
        for number, agreed in (*position.forward.items(), (step, found))
        for name, (was, now) in agreed.different.items()
    ]
    return AsItWas(
        start=position.start.path.name if position.start else "",
        forward=list(position.forward),
        is_exact=not different and all(files.values()),
        compared=found.compared,
        different=different,
        after=after.path.name if after else "",
        files=files,
    )
