"""Splits the spread of a metric over runs by source: data order, initialisation, sampling, evaluation, rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from retrain.kernel.config.schema import SeedSource
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import table_of
from retrain.records.run import Run, settings_key
from retrain.records.runs import curves as run_curves
from retrain.records.runs.example_rates import HELD_OUT_SET
from retrain.records.runs.run_status import DONE
from retrain.records.runs.source import Candidate, chosen_metric, find_runs
from retrain.verdicts.stats.variance import REST, Components, components

SOURCES: tuple[str, ...] = get_args(SeedSource)
CALLED = {"data": "data order"}  # as a reader would; the others are called as in `[training] seeds`
LEAST_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledNoise:
    """The part of a rate's variance from a finite number of completions per example; `share` is of the total."""

    variance: float
    share: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """The shares of variance of a metric at the end of runs that differ only in their seeds within a condition."""

    metric: run_curves.Metric
    budget: float
    conditions: int
    components: Components
    noise: SampledNoise | None
    left_out: tuple[tuple[str, str], ...]


def decompose(paths: Sequence[Path], metric: run_curves.Metric | None = None, *, level: float = 0.95) -> Decomposition:
    """Estimate the shares over the finished runs of a campaign, or run folders; ConfigError if they are too few.

    Only spread within groups of equal settings, seeds apart, counts. A source can be separated where `[training] seeds`
    moved it without another.
    """
    fields = {run_curves.CORRECT.field} | ({metric.field} if metric else set())
    found, left_out = list[tuple[Candidate, Path, run_curves.Curves]](), list[tuple[str, str]]()
    for each in find_runs(paths).candidates:
        if each.state != DONE or each.folder is None or each.seed is None:
            left_out.append((each.name, each.problem or each.state if each.state != DONE else "no seed is recorded"))
        else:
            found.append((each, each.folder, Run(each.folder).curves(fields)))
    if len(found) < LEAST_RUNS:
        what = f"{len(found)} finished runs are too few for shares of variance"
        fix = f"at least {LEAST_RUNS}, better 16: 4 data seeds x 4 initialisation seeds"
        where = ", ".join(map(str, paths[:3]))
        raise ConfigError(Problem(code="compare.too-few-runs", where=where, what=what, fix=fix))
    chosen = chosen_metric(metric, [curves for *_, curves in found], where="--metric")
    spents = [run_curves.along(curves, run_curves.Align.STEPS) for *_, curves in found]
    budget = min(spent.total for spent in spents if spent)
    values, folders, groups, levels = [], [], [], []
    for (run, folder, _), spent in zip(found, spents, strict=True):
        value = (
            run_curves.value_at(spent, chosen, budget=budget, direction=run_curves.Direction.HIGHER) if spent else None
        )
        if value is None:
            left_out.append((run.name, f"it has no {chosen}"))
            continue
        values.append(value)
        folders.append(folder)
        groups.append(settings_key(run.record))
        levels.append(seed_levels(run.record))
    factors = {CALLED.get(source, source): [each[source] for each in levels] for source in SOURCES}
    parts = components(np.array(values), factors, groups, level=level)
    if parts is None:
        what = "no spread is left to compare with"
        why = "every run has a seed combination that its own sources explain, or all runs have the same number"
        fix = "add runs that cross the seeds, such as 4 data seeds x 4 initialisation seeds"
        raise ConfigError(Problem(code="compare.no-spread", where="--variance", what=what, why=why, fix=fix))
    noise = None
    if chosen == run_curves.HELD_OUT and (noises := [each for each in map(_noise_of, folders) if each is not None]):
        variance = float(np.mean(noises))
        share = min(1.0, variance / parts.total) if parts.total > 0 else 1.0
        noise = SampledNoise(variance=variance, share=share, runs=len(noises))
    return Decomposition(
        metric=chosen,
        budget=budget,
        conditions=len(set(groups)),
        components=parts,
        noise=noise,
        left_out=tuple(left_out),
    )


def seed_levels(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the seed that each source of a run followed, by its `run.json`."""
    given, evaluation = table_of(record, "config", "training", "seeds"), table_of(record, "config", "eval").get("seed")
    followed = dict.fromkeys(SOURCES, int(record["seed"]))
    followed["evaluation"] = evaluation if isinstance(evaluation, int) else 0
    return followed | {source: seed for source, seed in given.items() if source in SOURCES}


def _noise_of(run: Path) -> float | None:
    """Return sum_e p_e (1 - p_e) / (S - 1) / E^2, unbiased for E examples of S fresh completions; None with S = 1."""
    rows = list(Run(run).evaluations())
    last = max((int(row["step"]) for row in rows), default=None)
    right = [row["correct"] for row in rows if row["step"] == last and row["set"] == HELD_OUT_SET]
    if not right or min(map(len, right)) < 2:
        return None
    # p (1 - p) is the variance of zeros and ones.
    noises_E = [float(np.var(each)) / (len(each) - 1) for each in right]
    return sum(noises_E) / len(right) ** 2


def variance_sentences(found: Decomposition) -> Iterator[str]:
    parts = found.components
    spread = run_curves.shown_difference(parts.total**0.5, found.metric, signed=False)
    conditions = f" of {found.conditions} conditions" if found.conditions > 1 else ""
    yield (
        f"{parts.runs} runs{conditions}: {found.metric} has a standard deviation of {spread} within a condition "
        f"after {found.budget:,.0f} steps. Shares of that variance, with {100 * parts.level:.0f} % intervals:"
    )
    rest = f"rest (with {_joined(parts.in_rest)})" if parts.in_rest else "rest (interactions, and other chance)"
    for part in parts.parts:
        low, high = part.interval
        name = rest if part.name == REST else part.name
        yield f"{name}: {100 * part.share:.0f} % ({100 * low:.0f} to {100 * high:.0f} %)"
    for names in parts.together:
        yield f"{_joined(names)} always moved together: their shares cannot be separated."
    if parts.constant:
        yield f"never moved: {_joined(parts.constant)}; their share is not in these figures."
    if parts.tangled:
        yield f"{_joined(parts.tangled)} never moved separately: no share can be given."
    if found.left_out:
        reasons = Counter(reason for _, reason in found.left_out)
        yield f"left out: {', '.join(f'{count} runs ({reason})' for reason, count in reasons.most_common())}"
    if noise := found.noise:
        sd = run_curves.shown_difference(noise.variance**0.5, found.metric, signed=False)
        where = "evaluation" if any("evaluation" in part.name for part in parts.parts) else "the rest"
        yield (
            f"Of a single run, the finite number of held-out completions makes up a standard deviation of {sd}, "
            f"{100 * noise.share:.0f} % of the variance; it is a part of {where}."
        )


def variance_data(found: Decomposition) -> dict[str, Any]:
    parts = {name: list(each) if isinstance(each, tuple) else each for name, each in asdict(found.components).items()}
    return {
        "metric": str(found.metric),
        "budget": found.budget,
        "conditions": found.conditions,
        **parts,
        "noise": asdict(found.noise) if found.noise else None,
        "left_out": [{"name": name, "reason": reason} for name, reason in found.left_out],
    }


def _joined(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
