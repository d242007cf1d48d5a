"""The data of a report: the runs, the comparison, the lines of `metrics.jsonl`.

A campaign has half a million lines, a page a few hundred points per curve. So one line in `stride` is parsed, plus
every line with an evaluation or a health finding, and the last one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from retrain.kernel.errors import ConfigError
from retrain.records.reading import Record, number, parse_record, parsed_lines, read_object, tables_in, time_of
from retrain.records.record_names import CAMPAIGN_FILE, METRICS
from retrain.records.run import Run, task_names
from retrain.records.runs.curves import HELD_OUT, LARGEST, Curves
from retrain.records.runs.run_status import DONE, LIVE
from retrain.records.runs.source import Candidate, Source, find_runs
from retrain.report.chart_specs import FIELDS, named_fields
from retrain.tasks.scoring.verdict import part_fields
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.sets import set_metrics
from retrain.verdicts.study.study import Options, Study

# Bounds the time of reading a campaign: of longer records one step in `stride` is parsed.
MOST_LINES = 60_000
# Each condition adds three curves to every chart of the page.
MOST_DRAWABLE = 150
# More colours than this look alike.
MOST_SHOWN = 8
ERROR_CHARS = 600
EVAL_MARK, HEALTH_MARK = b'"eval_', b'"health": ['
# Evaluation and health are the last fields of a line, so its end decides whether it must be parsed.
TAIL_BYTES = 1200
STATE_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    state: str
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunLines(Curves):
    """The rows of one run that were read. `problem` says where a damaged file ended the reading."""

    episodes: tuple[Episode, ...] = ()
    problem: str = ""

    def mean(self, field: str) -> float | None:
        """Return the mean over the rows that have the field; None without such a row."""
        values_R = self.column(field)
        values_R = values_R[np.isfinite(values_R)]
        return float(values_R.mean()) if values_R.size else None


NO_LINES = RunLines(steps_R=np.zeros(0), values={})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReportRun:
    """One run as its files describe it; missing parts are empty. `error` says why it is not done, if known."""

    candidate: Candidate
    record: Record
    lines: RunLines
    error: str

    @property
    def is_done(self) -> bool:
        return self.candidate.state == DONE

    @property
    def num_supervised(self) -> int:
        """Supervised steps before the first one, including those that an unfinished warm-up has yet to take."""
        return max(0, -1 - int(self.lines.steps_R[0])) if self.lines.steps_R.size else 0

    @property
    def wall_time_s(self) -> float | None:
        started, ended = (time_of(self.record.get(name)) for name in ("started", "ended"))
        return (ended - started).total_seconds() if started and ended else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Material:
    """The data of a report. `study` is None if nothing can be compared; then `no_study` says why.

    `shown` are the conditions that are drawn at first; one step in `stride` was read.
    """

    source: Source
    runs: tuple[ReportRun, ...]
    study: Study | None
    no_study: str
    shown: tuple[str, ...]
    stride: int

    def of(self, condition: str) -> list[ReportRun]:
        return [run for run in self.runs if run.candidate.condition == condition]

    @property
    def drawable(self) -> tuple[str, ...]:
        """Conditions with curves: those shown at first, and others up to the page's limit."""
        others = (label for label in self.source.conditions if label not in self.shown)
        chosen = {*self.shown, *islice(others, MOST_DRAWABLE - len(self.shown))}
        return tuple(label for label in self.source.conditions if label in chosen)

    def drawn(self, condition: str) -> list[ReportRun]:
        """Return the runs in a condition's mean: the finished ones, or without any all with records."""
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
    entries = {entry.get("run_name"): entry for entry in tables_in(manifest.get("runs"))}
    runs = tuple(_run(each, entries.get(each.name, {}), stride) for each in source.candidates)
    shown = _shown(source, study)
    return Material(source=source, runs=runs, study=study, no_study=no_study, shown=shown, stride=stride)


def _study(paths: Sequence[Path], *, sets: bool) -> tuple[Study | None, str]:
    """Return the comparison, with `sets` over all evaluation sets too; or None and the reason."""
    try:
        return comparison_with_ledger(paths, Options(sets=sets)), ""
    except ConfigError as error:
        # Perhaps no further set has been evaluated yet: the held-out examples can still be compared.
        if sets:
            return _study(paths, sets=False)
        problem = error.problems[0]
        return None, f"{problem.what}: {problem.why}" if problem.why else problem.what


def _run(candidate: Candidate, entry: Mapping[str, object], stride: int) -> ReportRun:
    folder, lines = candidate.folder, NO_LINES
    record = Run(folder).record if folder else {}
    if folder and Run(folder).has(METRICS):
        of_tasks = (f"task_{task}_{each}" for task in task_names(record) for each in ("correct_rate", "share"))
        lines = read_lines(folder / METRICS, (*FIELDS, *of_tasks), stride=stride)
    errors = (candidate.problem, record.get("error"), entry.get("error"), lines.problem)
    error = next((each for each in errors if isinstance(each, str) and each), "")
    if not error and candidate.state == "failed" and type(entry.get("returncode")) is int:
        error = f"exit code {entry['returncode']}; see its stderr.log"
    return ReportRun(candidate=candidate, record=record, lines=lines, error=error[:ERROR_CHARS])


def _shown(source: Source, study: Study | None) -> tuple[str, ...]:
    """Return all conditions, or if there are many the baseline, the best five and the worst two."""
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


def evaluated_steps(run: ReportRun) -> list[int]:
    """Return the steps after which a run was evaluated; -1 is before training."""
    # A run without held-out examples is evaluated only on its sets; its lines then have only the time.
    columns = (run.lines.column(HELD_OUT.field), run.lines.column("eval_time_s"))
    rows = zip(run.lines.steps_R, *columns, strict=True)
    return [int(step) for step, rate, time_s in rows if not (math.isnan(rate) and math.isnan(time_s))]


def read_lines(file: Path, fields: Sequence[str], *, stride: int) -> RunLines:
    """Read `fields`, every `eval_pass_at_*` and the reward's parts of one line in `stride`.

    A last line that was cut by a kill is ignored.
    """
    rows, problem = _Rows(fields, stride), ""
    try:
        for _ in parsed_lines(file, rows.take):
            pass
    except ConfigError as error:
        damage = error.problems[0]
        problem = f"{Path(damage.where).name}: {damage.what}"
    return rows.finished(problem)


class _Rows:
    def __init__(self, fields: Sequence[str], stride: int) -> None:
        self._fields, self._stride = fields, stride
        self._num_lines, self._skipped = 0, b""
        self._steps: list[int] = []
        self._columns: dict[str, dict[int, float]] = {}  # by field: row -> value
        self._parts: tuple[str, ...] | None = None  # of the reward, as the first step names them
        self._open: dict[str, list[int]] = {}
        self._episodes: list[Episode] = []

    def take(self, line: bytes) -> None:
        """Add the next line, unless it is skipped; ValueError if it is not the record of a later step."""
        is_rare = line.find(EVAL_MARK, -TAIL_BYTES) >= 0 or line.find(HEALTH_MARK, -TAIL_BYTES) >= 0
        is_skipped = self._num_lines % self._stride > 0 and not is_rare
        self._num_lines += 1
        self._skipped = line if is_skipped else b""
        if not is_skipped:
            self._add(line)

    def _add(self, line: bytes) -> None:
        record = parse_record(line, allow_nan=True, allow_overflow=True)
        step = record.get("step")
        if type(step) is not int or (self._steps and step <= self._steps[-1]):
            raise ValueError("no step, or not a later one")
        if self._parts is None and step >= 0:
            self._parts = tuple(part_fields(record).values())
        names = [*self._fields, *(self._parts or ())]
        if "eval_time_s" in record or "eval_correct_rate" in record:
            names += named_fields(record)
        for name in dict.fromkeys(names):
            if (value := number(record.get(name))) is not None and abs(value) < LARGEST:
                self._columns.setdefault(name, {})[len(self._steps)] = value
        self._steps.append(step)
        self._note_health(step, record.get("health"))

    def finished(self, problem: str) -> RunLines:
        """Return all rows, including the last line even if it was skipped, because the curve ends there."""
        if self._skipped and not problem:
            with suppress(ValueError, RecursionError):  # cut by a kill
                self._add(self._skipped)
        self._close(list(self._open))
        values = {name: np.full(len(self._steps), math.nan) for name in self._columns}
        for name, found in self._columns.items():
            values[name][list(found)] = list(found.values())
        episodes = tuple(sorted(self._episodes, key=lambda each: each.first_step))
        return RunLines(steps_R=np.array(self._steps, np.float64), values=values, episodes=episodes, problem=problem)

    def _note_health(self, step: int, states: object) -> None:
        """Extend the episodes; one ends with the first parsed step without it, and steps with one are not skipped."""
        found = {str(state)[:STATE_CHARS] for state in states} if isinstance(states, list) else set()
        ended = [state for state, span in self._open.items() if state not in found or step > span[1] + 1]
        self._close(ended)
        for state in found:
            self._open.setdefault(state, [step, step])[1] = step

    def _close(self, states: Sequence[str]) -> None:
        for state in states:
            first, last = self._open.pop(state)
            self._episodes.append(Episode(state=state, first_step=first, last_step=last))
