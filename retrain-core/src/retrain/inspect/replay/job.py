"""Replays one step: the gradients at the policy before it, then the step itself."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.credit.algorithm import build_algorithm
from retrain.credit.recipes import PART_OF
from retrain.inspect.replay import gradients
from retrain.inspect.replay.position import Position, before_step, checkpoints_by_steps, refused
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, ConfigError, Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Group, TrainBatch
from retrain.records.files import digest_of
from retrain.records.reading import flattened
from retrain.records.run import Run, StoredStep
from retrain.run.configure import Checked, load_file
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import token_texts

LOG = logging.getLogger("retrain")
SHORT = {
    "advantage": "advantage_mode",
    "transform": "transform_mode",
    "uncertainty": "uncertainty_kind",
    "algorithm": "algorithm_mode",
}
# The tables that configure credit and loss: other keys would change the samples, and these are on record.
TABLES = ("algorithm", "entropy", "gtpo", "hicra", "planning", "sepa")
MODES = ("algorithm.advantage_mode", "algorithm.transform_mode")
RECIPE, MODE = "algorithm.recipe", "algorithm.algorithm_mode"
TAKEN = "as taken"
ONE_STEP = (
    "One step: directions of the gradient at one policy. It does not say where training under these conditions would "
    "have led."
)
# A checkpoint's weights and moments. `PUBLISHED` weights belong to the sampler, and a replay samples nothing.
WEIGHTS = "*.safetensors"
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
    after the step, empty without one, and `files` its files: whether each has the same bytes now. `is_exact`:
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
    tokens: Sequence[gradients.TokenChange] = ()


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
            raise refused(run, code="replay.untrained-step", what=what, fix="choose another --step")
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
        config = position.context.config
        if not isinstance(position.backend, gradients.GivesGradients) or config.distil.teacher:
            what = f"[distil] or backend {config.backend.backend!r} on {config.backend.devices!r} gives no gradients"
            fix = "replay runs of backend local that train on one device"
            where = config.place("backend.backend")
            raise BackendError(Problem(code="replay.no-gradients", where=where, what=what, fix=fix))
        self._backend, self._position, self._stored, self._plugins = position.backend, position, stored, plugins
        self._groups, self._most, self.resamples, self.passes = groups, most, resamples, 0
        self._folding = gradients.Folding(position.context.seeds) if resamples else None
        temperature = position.checked.config.training.temperature
        logprobs = getattr(position.backend, "logprobs", None) if most else None
        self._token_weights = gradients.TokenWeights(groups, plugins, logprobs, temperature) if logprobs else None

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
            raise refused("--try", code="replay.untrained-condition", what=what, fix="leave this condition out")
        batch = self._position.batch(step, credit)
        seen, turn = self._seen(condition.name, batch, self._gradient(config, batch))
        weights = self._token_weights.of(config, batch) if self._token_weights else None
        if weights is None or self._weights is None or not turn.turns:
            return seen
        norms = self._norm, turn.norm
        open_ = self._token_weights.open if self._token_weights else {}
        named = []
        for change in gradients.token_changes(self._weights, weights, open_, norms=norms, most=self._most):
            member = self._stored.groups[change.group][change.index]
            texts = token_texts(self._position.context.tokenizer, member.tokens.tokens_T.tolist())
            named.append(replace(change, token=texts[change.position], reward=member.reward))
        return replace(seen, tokens=named)

    def _gradient(self, config: Config, batch: TrainBatch) -> gradients.StepGradient:
        found = gradients.step_gradient(self._backend, config, self._plugins, batch, self._folding)
        self.passes += 1 + len(found.shares)
        return found

    def _seen(self, name: str, batch: TrainBatch, found: gradients.StepGradient) -> tuple[Seen, gradients.Turn]:
        seeds, step = self._position.context.seeds, self._position.step
        turn = gradients.turn_of(
            self._taken, found, seeds=seeds, step=step, groups=len(self._groups), resamples=self.resamples
        )
        prompts = []
        for group, part in gradients.largest(turn.parts, self._most):
            example = self._groups[group].example
            text = example.prompt if isinstance(example.prompt, str) else str(example.prompt[-1].get("content", ""))
            prompts.append(TurningPrompt(group=group, example_id=example.id, part=part, prompt=text))
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
            prompts=prompts,
        )
        return seen, turn


def _as_it_was(position: Position, step: int) -> AsItWas:
    """Train the step, and compare policy and optimizer with the checkpoint after it, where there is one."""
    found = position.take(step)
    files: dict[str, bool] = {}
    after = checkpoints_by_steps(position.run, position.manifest).get(step + 1)
    if after:
        # A replay writes nothing into the run's folder.
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


# Other credit and losses for a stored step: the user's words become a configuration.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Condition:
    name: str
    checked: Checked
    algorithm: Algorithm


def parse_settings(text: str) -> dict[str, str]:
    """Parse `loss=gspo, advantage_mode=rloo` by key, `algorithm.` before bare names; ConfigError for anything else."""
    found: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        path = key if "." in key else f"algorithm.{SHORT.get(key, key)}"
        where = f"--try {text!r}"
        if not (key and equals):
            what = f"{part.strip()!r} is not KEY=VALUE"
            raise refused(where, code="replay.bad-condition", what=what, fix='write "loss=gspo"')
        if path.partition(".")[0] not in TABLES:
            what = f"{path} changes neither the credit of stored completions nor their loss"
            fix = f"give keys of {', '.join(f'[{table}]' for table in TABLES)}"
            raise refused(where, code="replay.foreign-key", what=what, fix=fix)
        found[path] = value
    if not found:
        fix = 'write --try "loss=gspo,advantage=rloo"'
        raise refused("--try", code="replay.bad-condition", what="names no key", fix=fix)
    return found


def build_condition(text: str, position: Position, plugins: Plugins) -> Condition:
    """Return the condition that `text` describes, in the state of the run's algorithm where it has the same parts.

    A controller that the run did not have begins as in a new run.
    """
    settings = parse_settings(text)
    tables = changed_tables(Run(position.run).settings, settings, position.manifest.get("origins") or {})
    checked = load_file(tables, [f"--set={path}={value}" for path, value in settings.items()], plugins, will_run=False)
    context = PluginContext(
        config=checked.config, seeds=position.context.seeds, plugins=plugins, tokenizer=position.context.tokenizer
    )
    algorithm = build_algorithm(checked.flow, context)
    # The state of one controller means nothing to another.
    is_same = checked.flow.controller == position.checked.flow.controller and not checked.flow.is_custom
    if is_same and (saved := position.algorithm.state()):
        try:
            algorithm.restore(saved)
        except ResumeError as error:
            raise ConfigError(*error.problems) from error
    return Condition(name=text, checked=checked, algorithm=algorithm)


def changed_tables(
    tables: Mapping[str, Any], settings: Mapping[str, str], origins: Mapping[str, str]
) -> dict[str, Any]:
    """Return the run's tables without the values that do not belong to the condition.

    Values of the run's recipe go, and come again with it; so do parameters of a part that the condition replaces (the
    clip of another loss). A condition with a recipe drops the run's `[algorithm]`.
    """
    kept = {name: dict(table) for name, table in tables.items() if isinstance(table, Mapping)}
    own = kept.get("algorithm", {})
    if RECIPE in settings:
        kept["algorithm"] = {}
        return kept
    before = flattened(kept)
    replaced = {part for part, now in settings.items() if before.get(part) != now}
    dropped = [path for path, origin in origins.items() if str(origin).startswith("recipe ")]
    dropped += [path for path, part in PART_OF.items() if part in replaced]
    if MODE not in settings and set(MODES) & settings.keys():
        # A whole algorithm would override them.
        dropped.append(MODE)
    for path in dropped:
        table, _, name = path.partition(".")
        if path not in settings:
            kept.get(table, own).pop(name, None)
    return kept


def _parts(text: str) -> Sequence[str]:
    """Cut `text` at its commas, but not within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]
