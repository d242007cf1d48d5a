"""A run in its state before one of its steps: policy, optimizer and algorithm, without sampling anything."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrain.credit.algorithm import build_algorithm
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import CheckpointError, ConfigError, NonFiniteError, Problem
from retrain.kernel.progress import train_fields
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Completion, Example, Floats, Group, Outcome, Score, StopReason, TrainBatch
from retrain.records.checkpoints import Checkpoint, read_checkpoint
from retrain.records.completions import turns_of
from retrain.records.record_names import CONFIG_FILE
from retrain.records.run import Run, StoredCompletion, StoredStep
from retrain.run.backend import build_backend, choose_devices
from retrain.run.configure import Checked, load_file
from retrain.run.interrupts import Interrupts
from retrain.run.opened import SILENT, run_context
from retrain.run.steps.controls import controlled_algorithm
from retrain.run.steps.updates import Updates
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
# Rounding on another machine may change as much; another policy changes far more.
RELATIVE, ABSOLUTE = 1e-2, 1e-3
# Every trained step records these, so a report that lacks one is not the recorded step.
MEASURED = ("grad_norm", "ratio_mean", "logprob_gap_mean", "lr")
# These depend on the backend's reporting, not on the step's numbers.
SKIPPED = ("loss_is_placeholder", "rejected", "reported_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The fields of the optimizer step that were compared, and those that differ, as (recorded, found now)."""

    compared: tuple[str, ...]
    different: Mapping[str, tuple[Any, Any]]

    @property
    def is_close(self) -> bool:
        """True if rounding explains the differences: within 1 % or 0.001 each, and the gradient's norm within 1 %."""
        return all(_close(name, *values) for name, values in self.different.items())

    @property
    def worst(self) -> str:
        names = sorted(self.different, key=lambda name: _close(name, *self.different[name]))
        was, now = self.different[names[0]]
        return f"{names[0]} {now}, and {was} is recorded"


def agreement(line: Mapping[str, Any], found: Mapping[str, Any]) -> Agreement:
    """Compare the report of a training step with its line in `metrics.jsonl`."""
    measured = [name for name in MEASURED if name in line]
    names = tuple(name for name in dict.fromkeys([*found, *measured]) if name not in SKIPPED)
    different = {name: (line.get(name), found.get(name)) for name in names if line.get(name) != found.get(name)}
    return Agreement(compared=names, different=different)


def _close(name: str, was: Any, now: Any) -> bool:
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return all(_close(name, *pair) for pair in zip(was, now, strict=True))
    if not isinstance(was, int | float) or not isinstance(now, int | float):
        return False
    # A gradient's norm may be tiny throughout, so an absolute tolerance would accept any; counts are exact.
    absolute = 0.0 if name in ("grad_norm", "trained_tokens", "updates", "lr") else ABSOLUTE
    return math.isclose(was, now, rel_tol=0.0 if name in ("trained_tokens", "updates") else RELATIVE, abs_tol=absolute)


@dataclass(slots=True, kw_only=True, eq=False)
class Position:
    """The run before `step`. `start` is the checkpoint that was loaded, None for the model as the seed makes it.

    `forward` are the steps trained since, and the agreement of each with its record.
    """

    run: Path
    step: int
    checked: Checked
    context: PluginContext
    algorithm: Algorithm
    backend: Backend
    updates: Updates
    start: Checkpoint | None
    manifest: Mapping[str, Any]
    forward: dict[int, Agreement] = field(default_factory=dict)

    def stored(self, step: int) -> tuple[StoredStep, tuple[Group, ...], Credit]:
        """Return a step's records, its groups, and their recorded credit; ConfigError when one is missing."""
        stored = Run(self.run).step(step)
        groups = groups_of(stored, correct_above=self.context.config.scoring.correct_above)
        credit = self.algorithm.assign(step, groups)
        check_credit(stored, credit)
        return stored, groups, credit

    def batch(self, step: int, credit: Credit) -> TrainBatch:
        return TrainBatch(
            step=step,
            rows=credit.rows,
            temperature=self.context.config.training.temperature,
            num_masked=credit.num_masked,
            masked_groups=credit.masked_groups,
        )

    def take(self, step: int) -> Agreement:
        """Train a step on its stored tokens and compare with its line; ConfigError when it is another step."""
        stored, groups, credit = self.stored(step)
        report = None
        if credit.rows:
            try:
                report = self.updates.train(self.batch(step, credit))
            except NonFiniteError:
                # The run continued without this step, too.
                report = None
        self.algorithm.observe(step, groups, credit)
        found = agreement(stored.metrics, train_fields(report))
        if not found.is_close:
            what = f"trained on its stored tokens, step {step} has {found.worst}"
            why = "policy, data or code differ from the run's, so nothing after it can be replayed"
            fix = "replay on the machine and with the versions that ran; `retrain status RUN --resume` names changes"
            raise refused(self.run, code="replay.step-differs", what=what, why=why, fix=fix)
        return found


def refused(where: Path | str, *, code: str, what: str, why: str = "", fix: str) -> ConfigError:
    return ConfigError(Problem(code=code, where=printable(str(where)), what=printable(what), why=why, fix=fix))


@contextmanager
def before_step(run: Path, step: int, plugins: Plugins) -> Iterator[Position]:
    """Within the block the run is in its state before `step`; ConfigError names the steps that can be replayed."""
    manifest = Run(run).started_manifest()
    known = Run(run).token_steps()
    start = _start(run, manifest, step, known)
    overrides = [f"--set={path}={value}" for path, value in SILENT.items()]
    if start:
        # The run began with it, and the checkpoint contains it.
        overrides.append("--set=model.adapter=")
    checked = load_file(run / CONFIG_FILE, overrides, plugins)
    config = choose_devices(checked.config, plugins, manifest).config
    if config.training.control == "no_update":
        what, fix = "is a control with no_update: no step was trained", "replay the run that it controls"
        raise refused(run, code="replay.no-update", what=what, fix=fix)
    context = run_context(config, plugins, int(manifest["seed"]))
    algorithm = controlled_algorithm(build_algorithm(checked.flow, context), config)
    if start and (saved := start.state["algorithm"]):
        algorithm.restore(saved)
    backend = build_backend(context)
    try:
        if start:
            backend.load(start.path)
        stops = Interrupts(grace_s=config.training.grace_s)
        position = Position(
            run=run,
            step=step,
            checked=checked,
            context=context,
            algorithm=algorithm,
            backend=backend,
            updates=Updates(config, backend, context.seeds, stops),
            start=start,
            manifest=manifest,
        )
        for number in range(start.first_unwritten_step if start else 0, step):
            # A step whose sampling failed has no records and trained nothing.
            if number in known:
                LOG.info("Step %d again, on its stored tokens", number)
                position.forward[number] = position.take(number)
        yield position
    finally:
        backend.close()


def checkpoints_by_steps(run: Path, manifest: Mapping[str, Any]) -> dict[int, Checkpoint]:
    found: dict[int, Checkpoint] = {}
    for folder in Run(run).checkpoints():
        try:
            checkpoint = read_checkpoint(folder)
        except CheckpointError as error:
            LOG.warning("Damaged checkpoint passed over: %s", error)
            continue
        # A run that was restarted in its folder may have left earlier checkpoints there.
        if checkpoint.state.get("run_started") == manifest.get("started"):
            found.setdefault(checkpoint.first_unwritten_step, checkpoint)
    return found


def _start(run: Path, manifest: Mapping[str, Any], step: int, known: list[int]) -> Checkpoint | None:
    """Return the newest checkpoint before the step, None for the beginning of the run."""
    found = checkpoints_by_steps(run, manifest)
    has_warm_up = bool(manifest.get("config", {}).get("sft", {}).get("steps", 0))
    # Supervised steps keep no tokens, so a run with a warm-up is replayed from its first checkpoint on.
    first = 0 if not has_warm_up else min((steps for steps in found if steps >= 0), default=None)
    replayable = [] if first is None else [each for each in known if each >= first]
    if step not in replayable:
        there = _spans(replayable) or "none"
        what = f"step {step} cannot be replayed; those that can: {there}"
        why = "" if step not in known else "supervised steps come before its first checkpoint, and keep no records"
        fix = f"give one of them: --step {replayable[-1]}" if replayable else "replay a run that has trained a step"
        raise refused(run, code="replay.unknown-step", what=what, why=why, fix=fix)
    return found.get(max((steps for steps in found if 0 <= steps <= step), default=-1))


def _spans(steps: list[int]) -> str:
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in spans)


# The scored groups of a step as credit was assigned to them, from the run's records.


def groups_of(stored: StoredStep, *, correct_above: float) -> tuple[Group, ...]:
    """Return the groups; ConfigError when the records lack a value that credit or training needs.

    Values that a run does not store are empty: an example's `task` and `info`, and the part of a score that a shaper
    changed.
    """
    groups = []
    for members in stored.groups:
        record = members[0].record
        scores = [_scores(member.record) for member in members]
        groups.append(
            Group(
                example=Example(id=record["example_id"], prompt=record["prompt"], reference=record["reference"]),
                completions=tuple(_completion(stored.step, member) for member in members),
                scores=tuple(shaped for _, shaped in scores),
                raw_scores=tuple(raw for raw, _ in scores),
                correct_above=correct_above,
                round=int(record.get("round", 0)),
                is_surplus=bool(record.get("surplus", False)),
                greedy_score=_greedy_score(record),
            )
        )
    return tuple(groups)


def check_credit(stored: StoredStep, credit: Credit) -> None:
    """Raise ConfigError unless this is the stored credit, every token of it as float32."""
    tokens = [tokens for group in credit.tokens_PG for tokens in group]
    members = [completion for group in stored.groups for completion in group]
    for found, member in zip(tokens, members, strict=True):
        # Records hold float32, so credit is compared at that precision.
        was_A, is_A = member.tokens.advantages_T.astype(np.float32), found.advantages_A.astype(np.float32)
        different = np.flatnonzero(was_A != is_A)
        if len(different):
            record, at = member.record, int(different[0])
            token = f"group {record['group']}, completion {record['index']}, token {at}"
            what = f"credit of {token} was {was_A[at]:.9g} and is now {is_A[at]:.9g}"
            why = "a plugin of credit has changed since, or reads values that a run does not store"
            fix = "replay with the code that ran, see `inputs/` of the run"
            raise refused(f"step {stored.step}", code="replay.credit-differs", what=what, why=why, fix=fix)


def _scores(record: Mapping[str, Any]) -> tuple[Score, Score]:
    """Return the raw score, and the one that credit was assigned to."""
    raw = Score(
        outcome=Outcome(record["outcome"]),
        value=record["reward"],
        detail=record.get("detail", ""),
        parts=record.get("reward_parts") or {},
    )
    if "shaped_reward" not in record:
        return raw, raw
    value = record["shaped_reward"]
    if value is None:
        return raw, Score.no_verdict("left out before credit was assigned")
    return raw, Score(outcome=Outcome.SCORED, value=value, parts=raw.parts)


def _greedy_score(record: Mapping[str, Any]) -> Score | None:
    if "greedy_reward" not in record:
        return None
    value = record["greedy_reward"]
    return Score.no_verdict("not recorded") if value is None else Score.of(value)


def _completion(step: int, member: StoredCompletion) -> Completion:
    record, tokens = member.record, member.tokens
    if tokens.row is None:
        what = "its records contain no prompt tokens"
        raise refused(f"step {step}", code="replay.no-prompt-tokens", what=what, fix="replay another run")
    row = tokens.row

    def spread(values_A: Floats | None) -> Floats | None:
        if values_A is None:
            return None
        values_T = np.zeros(len(row.tokens_T))
        values_T[row.action_T] = values_A
        return values_T

    logprobs_T = spread(tokens.logprobs_T)
    assert logprobs_T is not None, "every record has them"
    return Completion(
        tokens_T=row.tokens_T,
        action_T=row.action_T,
        logprobs_T=logprobs_T,
        text=record["completion"],
        stop_reason=StopReason(record["stop_reason"]),
        policy_version=int(record["policy_version"]),
        entropies_T=spread(tokens.entropies_T),
        engine_logprobs_T=spread(tokens.engine_logprobs_T),
        rewards_T=spread(tokens.rewards_T),
        squared_probs_T=spread(tokens.squared_probs_T),
        starts=row.starts,
        turns=int(record.get("turns", 1)),
        by_turn=turns_of(record),
        reference_logprobs_T=spread(tokens.reference_logprobs_T),
        kl_coef=tokens.kl_coef,
        reasoning=record.get("reasoning", ""),
        answer=record.get("answer"),
    )
