"""Reads the data of a report: the runs, the comparison, the lines of `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from retrain.kernel.errors import ConfigError
from retrain.records.reading import Record, read_object
from retrain.records.record_names import CAMPAIGN_FILE, METRICS
from retrain.records.run import Run
from retrain.records.runs.metric import HELD_OUT
from retrain.records.runs.run_status import DONE, LIVE
from retrain.records.runs.source import Candidate, Source, find_runs
from retrain.report.chart_specs import FIELDS
from retrain.report.lines import NO_LINES, RunLines, read_lines
from retrain.verdicts.study.comparison_with_ledger import looked_at
from retrain.verdicts.study.sets import set_metrics
from retrain.verdicts.study.study import Options, Study

MOST_LINES = 60_000  # parsed in all; of longer records one step in `stride` is parsed
MOST_DRAWABLE = 150  # most conditions with curves on the page
MOST_SHOWN = 8  # most conditions drawn at first, and with completions
ERROR_CHARS = 600


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportRun:
    """One run as its files describe it; missing parts are empty. `error` says why it is not done, if known."""

    candidate: Candidate
    record: Record
    lines: RunLines
    error: str

    @property
    def is_done(self) -> bool:
        """Whether it reached its last step."""
        return self.candidate.state == DONE

    @property
    def num_steps(self) -> int:
        """Finished steps; 0 during a warm-up."""
        return max(0, int(self.lines.steps_R[-1]) + 1) if self.lines.steps_R.size else 0

    @property
    def num_supervised(self) -> int:
        """Supervised steps before the first one, including those that an unfinished warm-up has yet to take."""
        return max(0, -1 - int(self.lines.steps_R[0])) if self.lines.steps_R.size else 0

    @property
    def wall_time_s(self) -> float | None:
        """From its start to its end; None until it has ended."""
        started, ended = (_time(self.record.get(name)) for name in ("started", "ended"))
        return (ended - started).total_seconds() if started and ended else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """The data of a report. `study` is None if nothing can be compared; then `no_study` says why.

    `shown` are the conditions that are drawn at first; one step in `stride` was read.
    """

    source: Source
    manifest: Record
    runs: tuple[ReportRun, ...]
    study: Study | None
    no_study: str
    shown: tuple[str, ...]
    stride: int

    def of(self, condition: str) -> list[ReportRun]:
        """The runs of a condition."""
        return [run for run in self.runs if run.candidate.condition == condition]

    @property
    def drawable(self) -> tuple[str, ...]:
        """Conditions with curves: those shown at first, and others up to the page's limit."""
        others = (label for label in self.source.conditions if label not in self.shown)
        chosen = {*self.shown, *islice(others, MOST_DRAWABLE - len(self.shown))}
        return tuple(label for label in self.source.conditions if label in chosen)

    def drawn(self, condition: str) -> list[ReportRun]:
        """The runs in a condition's mean: those that are done, or all with records if none is."""
        recorded = [run for run in self.of(condition) if run.lines.steps_R.size]
        return [run for run in recorded if run.is_done] or recorded

    @property
    def unfinished(self) -> list[ReportRun]:
        """Runs that ended before their last step, without active and unstarted ones."""
        return [
            run for run in self.runs if not run.is_done and run.candidate.state not in (*LIVE, "not started", "queued")
        ]


def gather(paths: Sequence[Path]) -> Material:
    """Read a campaign, or run folders; ConfigError for anything else."""
    source = find_runs(paths)
    study, no_study = _study(paths, sets=len(set_metrics(source.candidates, None)) > 1)
    manifest = read_object(source.campaign / CAMPAIGN_FILE) if source.campaign else {}
    num_lines = sum(Run(each.folder).num_steps for each in source.candidates if each.folder)
    stride = max(1, math.ceil(num_lines / MOST_LINES))
    entries = {entry.get("run_name"): entry for entry in _entries(manifest)}
    runs = tuple(_run(each, entries.get(each.name, {}), stride) for each in source.candidates)
    return Material(
        source=source,
        manifest=manifest,
        runs=runs,
        study=study,
        no_study=no_study,
        shown=_shown(source, study),
        stride=stride,
    )


def _study(paths: Sequence[Path], *, sets: bool) -> tuple[Study | None, str]:
    """The comparison, over all evaluation sets too if runs have several; None and why not."""
    try:
        return looked_at(paths, Options(sets=sets)), ""
    except ConfigError as error:
        if sets:  # none of them has been evaluated yet, say
            return _study(paths, sets=False)
        problem = error.problems[0]
        return None, f"{problem.what}: {problem.why}" if problem.why else problem.what


def _run(candidate: Candidate, entry: Mapping[str, object], stride: int) -> ReportRun:
    folder, lines = candidate.folder, NO_LINES
    record = Run(folder).record if folder else {}
    if folder and Run(folder).has(METRICS):
        lines = read_lines(folder / METRICS, FIELDS, stride=stride)
    errors = (candidate.problem, record.get("error"), entry.get("error"), lines.problem)
    error = next((each for each in errors if isinstance(each, str) and each), "")
    if not error and candidate.state == "failed" and type(entry.get("returncode")) is int:
        error = f"exit code {entry['returncode']}; see its stderr.log"
    return ReportRun(candidate=candidate, record=record, lines=lines, error=error[:ERROR_CHARS])


def _shown(source: Source, study: Study | None) -> tuple[str, ...]:
    """All conditions, or if there are many the baseline, the best five and the worst two."""
    if len(source.conditions) <= MOST_SHOWN:
        return source.conditions
    if study is None:
        return source.conditions[:MOST_SHOWN]
    metric = str(study.metric)
    means = {each.label: each.estimates[metric].mean for each in study.conditions}
    sign = 1.0 if study.direction == "lower" else -1.0
    ranked = sorted((sign * mean, label) for label, mean in means.items() if mean is not None)
    labels = [label for _, label in ranked if label != study.baseline]
    chosen = {study.baseline, *labels[: MOST_SHOWN - 3], *labels[-2:]}
    return tuple(label for label in source.conditions if label in chosen)


def _entries(manifest: Record) -> list[Mapping[str, object]]:
    found = manifest.get("runs")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _time(value: object) -> datetime | None:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None


def evaluated_steps(run: ReportRun) -> list[int]:
    """Steps after which a run was evaluated; -1 stands for before training."""
    columns = (run.lines.column(HELD_OUT.field), run.lines.column("eval_time_s"))  # without held-out ones, of a set
    rows = zip(run.lines.steps_R, *columns, strict=True)
    return [int(step) for step, rate, time_s in rows if not (math.isnan(rate) and math.isnan(time_s))]
