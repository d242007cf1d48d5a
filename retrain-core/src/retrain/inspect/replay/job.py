"""Replays one step: the gradients at the policy before it, then the step itself as it was."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.inspect.replay.conditions import Condition, build_condition
from retrain.inspect.replay.gradients import Folding, GivesGradients, StepGradient, Turn, step_gradient, turn_of
from retrain.inspect.replay.position import Agreement, Position, before_step, checkpoints_by_steps
from retrain.inspect.replay.token_weights import TokenChange, TokenWeights, token_changes
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Group, TrainBatch
from retrain.records.files import digest_of
from retrain.records.run import StoredStep
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
TAKEN = "as taken"
WEIGHTS = "*.safetensors"  # of a checkpoint: weights and moments; `PUBLISHED` are of the sampler
PUBLISHED = "published_"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsItWas:
    """The step trained again on its stored tokens, after `forward` others.

    `start` names the checkpoint that it began with, empty for the beginning of the run. `after` names the checkpoint
    after the step, empty where there is none, and `files` its files: whether each has the same bytes now.
    """

    start: str
    forward: Mapping[int, Agreement]
    step: Agreement
    after: str
    files: Mapping[str, bool]

    @property
    def is_exact(self) -> bool:
        """Whether everything that could be compared has the same bits."""
        return self.step.is_exact and all(each.is_exact for each in self.forward.values()) and all(self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """A condition of a replayed step; `prompts` and `tokens` are those that turn its gradient most."""

    name: str
    turn: Turn
    loss: float
    clip_fraction: float
    trained_tokens: int
    trained_groups: int
    tokens: Sequence[TokenChange] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What `retrain replay` found; the first condition is the step as it was taken."""

    run: Path
    step: int
    updates: int
    stored: StoredStep
    groups: Sequence[Group]
    tokenizer: Any
    conditions: Sequence[Seen]
    resamples: int
    passes: int
    as_it_was: AsItWas


def replay_step(run: Path, step: int, tries: Sequence[str], plugins: Plugins, *, resamples: int, most: int) -> Replay:
    """Replay a step as it was and under the conditions `tries`; ConfigError when it cannot be replayed."""
    with before_step(run, step, plugins) as position:
        conditions = [build_condition(text, position, plugins) for text in tries]
        stored, groups, credit = position.stored(step)
        if not credit.rows or "rejected" in stored.metrics:
            what = f"step {step} trained nothing: {stored.metrics.get('rejected') or 'no group was informative'}"
            raise ConfigError(Problem(where=printable(str(run)), what=what, fix="choose another --step"))
        batch = position.batch(step, credit)
        comparison = _Comparison(position, groups, plugins, resamples=resamples if tries else 0, most=most)
        seen = [comparison.taken(batch), *map(comparison.other, conditions)]
        return Replay(
            run=run,
            step=step,
            updates=int(stored.metrics.get("updates", 1)),
            stored=stored,
            groups=groups,
            tokenizer=position.context.tokenizer,
            conditions=seen,
            resamples=comparison.resamples,
            passes=comparison.passes,
            as_it_was=_as_it_was(position, step),
        )


class _Comparison:
    """Holds the gradient taken, and looks at one other at a time."""

    def __init__(
        self, position: Position, groups: Sequence[Group], plugins: Plugins, *, resamples: int, most: int
    ) -> None:
        if not isinstance(position.backend, GivesGradients):
            config = position.context.config
            what = f"backend {config.backend.backend!r} on {config.backend.devices!r} gives no gradients"
            fix = "replay runs of backend local that train on one device"
            raise BackendError(Problem(where=config.place("backend.backend"), what=what, fix=fix))
        self._backend, self._position, self._plugins = position.backend, position, plugins
        self._groups, self._most, self.resamples, self.passes = groups, most, resamples, 0
        self._folding = Folding(position.context.seeds) if resamples else None
        temperature = position.checked.config.training.temperature
        logprobs = getattr(position.backend, "logprobs", None) if most else None
        self._token_weights = TokenWeights(groups, plugins, logprobs, temperature) if logprobs else None

    def taken(self, batch: TrainBatch) -> Seen:
        """The step under the run's own credit and loss."""
        config = self._position.context.config
        self._taken = self._gradient(config, batch)
        self._weights = self._token_weights.of(config, batch) if self._token_weights else None
        seen = self._seen(TAKEN, batch, self._taken)
        self._norm = seen.turn.norm
        return seen

    def other(self, condition: Condition) -> Seen:
        """The step under another condition."""
        config, step = condition.checked.config, self._position.step
        LOG.info("Step %d under %s", step, printable(condition.name))
        credit = condition.algorithm.assign(step, self._groups)
        if not credit.rows:
            what = f"{condition.name}: no group of step {step} is trained under it"
            raise ConfigError(Problem(where="--try", what=printable(what), fix="leave this condition out"))
        batch = self._position.batch(step, credit)
        found = self._gradient(config, batch)
        seen = self._seen(condition.name, batch, found)
        weights = self._token_weights.of(config, batch) if self._token_weights else None
        if weights is None or self._weights is None or not seen.turn.turns:
            return seen
        norms = self._norm, seen.turn.norm
        open_ = self._token_weights.open if self._token_weights else {}
        return replace(seen, tokens=token_changes(self._weights, weights, open_, norms=norms, most=self._most))

    def _gradient(self, config: Config, batch: TrainBatch) -> StepGradient:
        found = step_gradient(self._backend, config, self._plugins, batch, self._folding)
        self.passes += 1 + len(found.shares)
        return found

    def _seen(self, name: str, batch: TrainBatch, found: StepGradient) -> Seen:
        seeds, step = self._position.context.seeds, self._position.step
        turn = turn_of(self._taken, found, seeds=seeds, step=step, groups=len(self._groups), resamples=self.resamples)
        return Seen(
            name=name,
            turn=turn,
            loss=found.loss,
            clip_fraction=found.clipped / batch.num_actions,
            trained_tokens=batch.num_actions,
            trained_groups=len({row.group for row in batch.rows}),
        )


def _as_it_was(position: Position, step: int) -> AsItWas:
    """Train the step, and hold policy and optimizer against the checkpoint after it, where there is one."""
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
    return AsItWas(
        start=position.start.path.name if position.start else "",
        forward=position.forward,
        step=found,
        after=after.path.name if after else "",
        files=files,
    )
