"""The account of one run: tokens by cause, prompts, credit, cost of held-out gain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from retrain.inspect.signal.drawn import (
    CAUSES,
    Cause,
    CreditShares,
    Drawn,
    Ints,
    RunFacts,
    causes_of,
    read_credit,
    read_drawn,
)
from retrain.inspect.signal.prompts import Forecasts, PromptAccount, forecast_groups, prompt_accounts
from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Floats
from retrain.records.reading import Record, number
from retrain.records.record_names import GENERATIONS
from retrain.records.run import Control, Run, control_of_record, eval_sets, task_names
from retrain.records.runs.curves import HELD_OUT
from retrain.records.runs.example_rates import NoExamplesError, aligned, per_example, read_rates
from retrain.records.runs.source import Candidate
from retrain.text.amounts import counted
from retrain.verdicts.stats.paired import t_interval

# The cost of a percentage point of held-out gain, with an interval that knows when there was no gain.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The held-out rate after the last evaluation less the first one, in percentage points, with its interval.

    `values_C` are the gains whose mean it is: of a run's clusters of examples, or of a condition's runs. Without an
    interval there are too few.
    """

    points: float
    interval: tuple[float, float] | None
    values_C: tuple[float, ...]
    first: int
    last: int


def gain_of(run: Path, held_out: Mapping[int, float]) -> Gain | str:
    """Return the gain of a run between its first and its last evaluation, over its examples; or why it is unknown."""
    if len(held_out) < 2:
        return "evaluated once" if held_out else "no held-out evaluation"
    first, last = min(held_out), max(held_out)
    figure = per_example(HELD_OUT)
    try:
        before, after = (read_rates(run, figure, step=step, expected=held_out[step]) for step in (first, last))
        rates_2E = aligned([("the first evaluation", before), ("the last one", after)])
    except NoExamplesError:
        points = 100.0 * (held_out[last] - held_out[first])
        return Gain(points=points, interval=None, values_C=(points,), first=first, last=last)
    _, cluster_E = np.unique(before.clusters, return_inverse=True)
    sums_C, sizes_C = np.bincount(cluster_E, weights=rates_2E[1] - rates_2E[0]), np.bincount(cluster_E)
    # Their mean is the mean over examples, whatever the clusters' sizes.
    return _gain(100.0 * sums_C / sizes_C.mean(), first, last)


def mean_gain(gains: list[Gain]) -> Gain:
    return _gain(np.array([gain.points for gain in gains]), gains[0].first, max(gain.last for gain in gains))


def _gain(values_C: Floats, first: int, last: int) -> Gain:
    # Equal values say nothing about the error: Student's interval would have no width.
    mean, is_spread = float(values_C.mean()), float(np.ptp(values_C)) > 1e-9
    interval = t_interval(values_C) if is_spread else None
    return Gain(points=mean, interval=interval, values_C=tuple(values_C.tolist()), first=first, last=last)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPerPoint:
    """Cost over gain. Without a gain shown there is no `interval`, but the least cost of a point, `at_least`.

    `at_least` is the cost over the upper limit of the gain; None where that is no gain either, or not known.
    """

    value: float | None
    interval: tuple[float, float] | None
    at_least: float | None


def cost_per_point(costs: Floats, gain: Gain) -> CostPerPoint:
    """Return mean of `costs`, one for each of `gain.values_C` or a single one, over the mean gain (Fieller's theorem).

    The limits are the roots c of (mean(x) - c mean(y))^2 = t^2 var(x - c y) / n with costs x and gains y (Fieller,
    JRSS B 16:175, 1954). The set is bounded, and an interval, just if Student's interval of the gain is without 0.
    """
    points = np.array(gain.values_C)
    x = np.broadcast_to(costs, points.shape) if costs.size == 1 else costs
    value = float(x.mean()) / gain.points if gain.points > 0 else None
    if gain.interval is None:
        return CostPerPoint(value=value, interval=None, at_least=None)
    low, high = gain.interval
    if low <= 0.0:
        return CostPerPoint(value=value, interval=None, at_least=float(x.mean()) / high if high > 0.0 else None)
    n, mean_x, mean_y = points.size, float(x.mean()), gain.points
    # Half the width of Student's interval, squared: t^2 var(y) / n in the formula above.
    squared = ((high - low) / 2) ** 2
    t2_n = squared / float(points.var(ddof=1)) if squared else 0.0
    var_x = float(x.var(ddof=1)) if n > 1 else 0.0
    cov = float(np.cov(x, points)[0, 1]) if n > 1 else 0.0
    a, b, c = mean_y**2 - squared, mean_x * mean_y - t2_n * cov, mean_x**2 - t2_n * var_x
    # Rounding may make the discriminant of a certain gain slightly negative.
    root = math.sqrt(max(0.0, b * b - a * c))
    return CostPerPoint(value=value, interval=((b - root) / a, (b + root) / a), at_least=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Tokens, and their completions; None where one completion has tokens of several causes."""

    tokens: int = 0
    completions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Account:
    """The tokens that a run sampled, and their use. `tallies` add up to `drawn_tokens`.

    `stated_tokens` is the sum in the lines of its steps. `by_step`: the steps [S], and their tokens by CAUSES [S, C],
    without evaluations and tokens without a record.
    """

    name: str
    condition: str
    seed: int | None
    state: str
    num_steps: int
    tallies: Mapping[Cause, Tally]
    by_step: tuple[Ints, Ints]
    stated_tokens: int
    num_groups: int
    teaching_groups: int
    seconds: float
    sft_tokens: int
    prompts: Sequence[PromptAccount]
    forecasts: Forecasts
    credit: CreditShares
    gain: Gain | str
    notes: tuple[str, ...] = field(default=())
    tasks: tuple[str, ...] = ()

    @property
    def drawn_tokens(self) -> int:
        return sum(tally.tokens for tally in self.tallies.values())

    @property
    def step_tokens(self) -> int:
        return self.drawn_tokens - self.tallies.get(Cause.EVALUATION, Tally()).tokens


def read_account(candidate: Candidate) -> Account:
    """Return the account of a run that has a folder; ConfigError names the first unreadable record."""
    assert candidate.folder is not None, "the caller checks"
    run = Run(candidate.folder)
    recorded, drawn = read_recorded(run), read_drawn(run)
    cause_N, teaches_G = causes_of(drawn, recorded.facts)
    credit = read_credit(run, drawn)
    is_trained_N = cause_N == CAUSES.index(Cause.TRAINED)
    taught_N = np.where(is_trained_N, drawn.tokens_N - np.where(credit.is_known_N, credit.zero_tokens_N, 0), 0)
    forecasts, book = forecast_groups(drawn, teaches_G, correct_above=recorded.correct_above)
    tallies, steps_note = _tallies(drawn, recorded, credit, cause_N, is_trained_N)
    missing = "" if run.has(GENERATIONS) else "no completion is stored: the run has just begun"
    return Account(
        name=candidate.name,
        condition=candidate.condition,
        seed=candidate.seed,
        state=candidate.state,
        num_steps=len(recorded.facts.sampled_tokens),
        tallies=tallies,
        by_step=_by_step(drawn, cause_N, taught_N),
        stated_tokens=sum(tokens or 0 for tokens in recorded.facts.sampled_tokens.values()),
        num_groups=drawn.starts_G.size,
        teaching_groups=int(teaches_G.sum()),
        seconds=recorded.seconds,
        sft_tokens=recorded.sft_tokens,
        prompts=prompt_accounts(
            drawn,
            taught_N,
            credit.credit_N,
            teaches_G,
            book,
            group_size=recorded.group_size or 1,
            correct_above=recorded.correct_above,
        ),
        forecasts=forecasts,
        credit=credit,
        gain=gain_of(run.folder, recorded.held_out),
        notes=tuple(note for note in (missing, *recorded.notes, steps_note, *credit.notes) if note),
        tasks=task_names(run.record),
    )


def _tallies(
    drawn: Drawn, recorded: Recorded, credit: CreditShares, cause_N: Ints, is_trained_N: np.ndarray
) -> tuple[dict[Cause, Tally], str]:
    """Count tokens and completions by cause; with a note on steps whose line and completions disagree."""
    tokens_C = np.bincount(cause_N, weights=drawn.tokens_N, minlength=len(CAUSES)).astype(np.int64)
    count_C = np.bincount(cause_N, minlength=len(CAUSES))
    found = {cause: Tally(tokens=int(tokens_C[i]), completions=int(count_C[i])) for i, cause in enumerate(CAUSES)}
    is_known_N = is_trained_N & credit.is_known_N
    zero, known = int(credit.zero_tokens_N[is_known_N].sum()), int(drawn.tokens_N[is_known_N].sum())
    count, trained = int(is_known_N.sum()), found[Cause.TRAINED]
    found[Cause.TAUGHT] = Tally(tokens=known - zero, completions=count)
    found[Cause.ZERO_CREDIT] = Tally(tokens=zero)
    found[Cause.TRAINED] = Tally(tokens=trained.tokens - known, completions=(trained.completions or 0) - count)
    # Tokens of steps' lines that no stored completion has; with a note where a line has fewer.
    steps, inverse = np.unique(drawn.step_N, return_inverse=True)
    sums = np.bincount(inverse, weights=drawn.tokens_N).astype(int)
    stored = dict(zip(steps.tolist(), sums.tolist(), strict=False))
    unrecorded, odd = 0, 0
    for step, tokens in recorded.facts.sampled_tokens.items():
        if tokens is not None:
            # Runs may store only some completions of a step, but never more than it sampled.
            unrecorded += max(0, tokens - stored.get(step, 0))
            odd += tokens < stored.get(step, 0)
    note = f"{odd:,} steps have more tokens in their completions than in their line" if odd else ""
    found[Cause.UNRECORDED] = Tally(tokens=unrecorded)
    found[Cause.EVALUATION] = Tally(tokens=recorded.eval_tokens or 0)
    return {cause: tally for cause, tally in found.items() if tally.tokens or tally.completions}, note


def _by_step(drawn: Drawn, cause_N: Ints, taught_N: Ints) -> tuple[Ints, Ints]:
    """Return the steps, and their tokens by cause; trained completions are split by credit."""
    steps_S, step_N = np.unique(drawn.step_N, return_inverse=True)
    tokens_SC = np.zeros((steps_S.size, len(CAUSES)), dtype=np.int64)
    is_trained_N = cause_N == CAUSES.index(Cause.TRAINED)
    np.add.at(tokens_SC, (step_N, cause_N), np.where(is_trained_N, 0, drawn.tokens_N))
    np.add.at(tokens_SC[:, CAUSES.index(Cause.TAUGHT)], step_N, taught_N)
    zero_N = np.where(is_trained_N, drawn.tokens_N - taught_N, 0)
    np.add.at(tokens_SC[:, CAUSES.index(Cause.ZERO_CREDIT)], step_N, zero_N)
    return steps_S, tokens_SC


def try_account(candidate: Candidate) -> Account | str:
    if candidate.folder is None:
        return candidate.state
    if candidate.problem:
        return candidate.problem
    try:
        return read_account(candidate)
    except ConfigError as error:
        return "; ".join(f"{each.where}: {each.what}" for each in error.problems)


# The statements of `run.json`, `metrics.jsonl` and `eval.jsonl` about a run's tokens, seconds and held-out results.


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run by its lines: facts for causes, tokens and seconds spent, held-out rates by step, and uncounted tokens.

    `seconds` were spent in steps, without evaluations and warm-up. `eval_tokens` is None where the lines of evaluations
    have no lengths. `sft_tokens` are of given answers: trained, not sampled.
    """

    facts: RunFacts
    seconds: float
    eval_tokens: int | None
    sft_tokens: int
    held_out: Mapping[int, float]
    notes: tuple[str, ...]
    correct_above: float
    group_size: int


def read_recorded(run: Run) -> Recorded:
    lines = [record for _, record in run.steps()]
    training, scoring = run.table("training"), run.table("scoring")
    steps = [record for record in lines if record["step"] >= 0]
    facts = RunFacts(
        sampled_tokens={r["step"]: None if (n := number(r.get("sampled_tokens"))) is None else int(n) for r in steps},
        rejected=frozenset(r["step"] for r in steps if "rejected" in r and not r.get("num_datums")),
        is_no_update=control_of_record(run.record) is Control.NO_UPDATE,
        leaves_truncated=training.get("overlong", "keep") != "keep",
    )
    eval_tokens, eval_note = _eval_tokens(run, sum(HELD_OUT.field in r or bool(eval_sets(r)) for r in lines))
    above = number(scoring.get("correct_above"))
    return Recorded(
        facts=facts,
        seconds=sum(number(record.get("step_time_s")) or 0.0 for record in steps),
        eval_tokens=eval_tokens,
        sft_tokens=sum(int(number(record.get("sft_tokens")) or 0) for record in lines),
        held_out={r["step"]: v for r in lines if (v := number(r.get(HELD_OUT.field))) is not None},
        notes=tuple(note for note in (*_notes(steps, run.record), eval_note) if note),
        correct_above=CORRECT_ABOVE if above is None else above,
        group_size=int(number(training.get("group_size")) or 0),
    )


def _eval_tokens(run: Run, evaluations: int) -> tuple[int | None, str]:
    if not evaluations:
        return 0, ""
    try:
        return sum(sum(record["lengths"]) for record in run.evaluations(required=True)), ""
    except (ConfigError, KeyError, TypeError):
        return None, f"the tokens of {counted(evaluations, 'evaluation')} are not recorded"


def _notes(steps: list[Record], manifest: Record) -> list[str]:
    """Name sampled tokens that are in no record; with numbers where there are some, and no guesses."""
    lost = sum("sampled_tokens" not in record for record in steps)
    dropped = sum(int(number(record.get("dropped_call_count")) or 0) for record in steps)
    resumes = manifest.get("resumes")
    resumed = len(resumes) if isinstance(resumes, list) else 0
    again = f"resumed {counted(resumed, 'time')}: samples repeated after a checkpoint are not recorded"
    memory = "memory ran out: samples before the step was tried with less are not recorded"
    return [
        f"{counted(lost, 'step')} rejected while sampling: those tokens are not recorded" if lost else "",
        f"{counted(dropped, 'answer')} that no agent received: those tokens are not recorded" if dropped else "",
        again if resumed else "",
        memory if any("bp_ceiling" in record for record in steps) else "",
    ]
