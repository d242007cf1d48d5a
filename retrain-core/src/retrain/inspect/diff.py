"""Compares two runs: results, settings, and the first step at which they diverge."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from retrain.records.identity.changes import Change, changes_between, source_diff
from retrain.records.reading import TIMED, Record, number, table_of
from retrain.records.run import Run, accepted_changes

# Compares the batches of two runs: which examples each saw, and the first step whose batch differs.


MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Digests of one step in sampling order: its examples; its examples with their completions."""

    examples: bytes
    completions: bytes


@dataclass(slots=True)
class Reader:
    """Streams the batches of a run's complete steps; `seen` collects the ids of their examples."""

    run: Run
    last_step: int
    seen: set[str] = field(default_factory=set)

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Step and batch. What a killed run wrote after its last metrics line is not a complete step."""
        for step, lines in groupby(self.run.completions(required=True), key=lambda line: line[0]):
            if step > self.last_step:
                return
            yield step, self._batch(record for _, record in lines)

    def tokens(self, step: int) -> bytes | None:
        """Digest of the step's token ids, completion by completion; None if the run has no tokens of that step."""
        arrays = self.run.token_arrays(step, ("lengths", "tokens"))
        if arrays is None:
            return None
        digest = hashlib.blake2b()
        for name in ("lengths", "tokens"):
            digest.update(arrays[name].tobytes())
        return digest.digest()

    def _batch(self, records: Iterator[Record]) -> Batch:
        examples, completions = hashlib.blake2b(), hashlib.blake2b()
        for record in records:
            example = str(record.get("example_id"))
            self.seen.add(example)
            examples.update(_framed(example))
            for part in (example, str(record.get("completion")), str(record.get("num_tokens"))):
                completions.update(_framed(part))
        return Batch(examples=examples.digest(), completions=completions.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDiff:
    """How many examples each run saw, the first few that only one saw, and the first differing batch.

    `differing_part` is `examples` (other prompts), `completions` (the same prompts, other texts), `tokens` (the same
    texts from other tokens) or `missing` (one run has no completions of the step).
    """

    num_a: int
    num_b: int
    num_both: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differing_step: int | None
    differing_part: str

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "examples_a": self.num_a,
            "examples_b": self.num_b,
            "examples_both": self.num_both,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "first_differing_batch": self.differing_step,
            "differing_part": self.differing_part or None,
        }


def compare_data(a: Reader, b: Reader) -> DataDiff:
    """The batches of all steps that both runs finished, in lockstep; memory grows with the examples, not the steps."""
    differing_step, differing_part = None, ""
    last_common = min(a.last_step, b.last_step)
    for step, batch_a, batch_b in side_by_side(a.batches(), b.batches()):
        if differing_step is None and step <= last_common:
            differing_part = _differing_part(step, (a, batch_a), (b, batch_b))
            differing_step = step if differing_part else None
    return DataDiff(
        num_a=len(a.seen),
        num_b=len(b.seen),
        num_both=len(a.seen & b.seen),
        only_a=tuple(sorted(a.seen - b.seen)[:MOST_NAMED]),
        only_b=tuple(sorted(b.seen - a.seen)[:MOST_NAMED]),
        differing_step=differing_step,
        differing_part=differing_part,
    )


def _differing_part(step: int, a: tuple[Reader, Batch | None], b: tuple[Reader, Batch | None]) -> str:
    (reader_a, batch_a), (reader_b, batch_b) = a, b
    if batch_a is None or batch_b is None:
        return "missing"
    if batch_a.examples != batch_b.examples:
        return "examples"
    if batch_a.completions != batch_b.completions:
        return "completions"
    tokens_a, tokens_b = reader_a.tokens(step), reader_b.tokens(step)
    return "tokens" if tokens_a and tokens_b and tokens_a != tokens_b else ""


def _framed(part: str) -> bytes:
    content = part.encode("utf-8", "surrogatepass")
    return len(content).to_bytes(8, "big") + content  # unambiguous where one part ends


# Compares the metrics of two runs step by step, in one pass.


T = TypeVar("T")
FINAL = ("loss", "correct_rate", "mean_reward")
HELD_OUT = ("eval_correct_rate", "eval_mean_reward")
TIMES = ("step_time_s", "eval_time_s", "sft_time_s")
# These fields are settings, compared as such; only results can diverge.
LABELS = frozenset({"step", "algorithm_mode", "advantage_mode", "transform_mode", "uncertainty_kind", "condition"})
_ABSENT = object()


@dataclass(slots=True)
class Curve:
    """Results of one run: numbers of its last step, its correct rates, its time in steps and evaluations."""

    steps: int = 0
    last_step: int = -1
    wall_time_s: float = 0.0
    rates: list[float] = field(default_factory=list)
    final: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys((*FINAL, *HELD_OUT)))
    names: set[str] = field(default_factory=set)

    def add(self, step: int, metrics: Record) -> None:
        """Add the next line; a negative step is the evaluation before training, or one of a warm-up."""
        self.wall_time_s += sum(number(metrics.get(name)) or 0.0 for name in TIMES)
        self.final |= {name: value for name in HELD_OUT if (value := number(metrics.get(name))) is not None}
        if step < 0:
            return
        self.steps += 1
        self.last_step = step
        self.final |= {name: number(metrics.get(name)) for name in FINAL}
        if (rate := number(metrics.get("correct_rate"))) is not None:
            self.rates.append(rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDiff:
    """Where two runs diverge: the first common step at which a common field differs, and those fields.

    `only_a` and `only_b` are fields that the other run never has; timing (`*_time_s`) and settings are left out.
    """

    curve_a: Curve
    curve_b: Curve
    common_steps: int
    diverging_step: int | None
    fields: Mapping[str, Mapping[str, Any]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """The same steps with the same results."""
        both = self.curve_a.steps == self.curve_b.steps == self.common_steps > 0
        return both and self.diverging_step is None

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "common_steps": self.common_steps,
            "first_diverging_step": self.diverging_step,
            "fields": self.fields,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
        }


def compare_metrics(run_a: Run, run_b: Run) -> MetricsDiff:
    """Compare the metrics of two runs line by line."""
    curve_a, curve_b = Curve(), Curve()
    common, diverging, fields = 0, None, {}
    for step, a, b in side_by_side(run_a.steps(required=True), run_b.steps(required=True)):
        for curve, metrics in ((curve_a, a), (curve_b, b)):
            if metrics is not None:
                curve.add(step, metrics)
        if a is None or b is None:
            continue
        common += step >= 0
        results_a, results_b = _results(a), _results(b)
        curve_a.names.update(results_a)
        curve_b.names.update(results_b)
        if diverging is None and (fields := _differing(results_a, results_b)):
            diverging = step
    return MetricsDiff(
        curve_a=curve_a,
        curve_b=curve_b,
        common_steps=common,
        diverging_step=diverging,
        fields=fields,
        only_a=tuple(sorted(curve_a.names - curve_b.names)),
        only_b=tuple(sorted(curve_b.names - curve_a.names)),
    )


def side_by_side(a: Iterator[tuple[int, T]], b: Iterator[tuple[int, T]]) -> Iterator[tuple[int, T | None, T | None]]:
    """Merge two streams in order of steps: each step once, None where a side lacks it."""
    next_a, next_b = next(a, None), next(b, None)
    while next_a or next_b:
        step = min(entry[0] for entry in (next_a, next_b) if entry)
        value_a = next_a[1] if next_a and next_a[0] == step else None
        value_b = next_b[1] if next_b and next_b[0] == step else None
        yield step, value_a, value_b
        next_a = next(a, None) if value_a is not None else next_a
        next_b = next(b, None) if value_b is not None else next_b


def _results(metrics: Record) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in LABELS and not name.endswith(TIMED)}


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"a": value, "b": b[name]} for name, value in a.items() if b.get(name, _ABSENT) not in (_ABSENT, value)
    }


# Compares settings, code and packages of two runs.


PLACES = frozenset({"logging.log_dir", "backend.adapter_path"})  # paths of records do not affect results


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run's `run.json`, its settings by `table.key`, and the files that it recorded as its inputs."""

    manifest: Record
    settings: Mapping[str, Any]
    identity: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where a setting came from: a line of a file, a flag, or `default`."""
        origins = table_of(self.manifest, "origins")
        while path:
            if path in origins:
                return str(origins[path])
            path = path.rpartition(".")[0]
        return "default"

    def packages(self) -> dict[str, str]:
        """Version of Python, of every distribution that registered something, and of every relevant library."""
        found = {"python": str(self.manifest.get("python", ""))}
        for name in ("libraries", "distributions"):
            found |= {package: str(release) for package, release in table_of(self.manifest, name).items()}
        return found

    def code(self) -> dict[str, Any]:
        """Commit and whether there were uncommitted changes; both None outside a repository."""
        git = table_of(self.manifest, "git")
        return {"commit": git.get("commit"), "dirty": git.get("dirty")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupDiff:
    """Differing settings and packages by name (no value for a side that lacks one), and the code of both.

    `same_code` is None if unknown: no repository, or uncommitted changes. `inputs` are the differing files of code,
    data, model and plugins, each with the unified diff of the copies that the runs kept; None when a run recorded none.
    `accepted_a` and `accepted_b` are changes that the runs were resumed with by `--resume-anyway`.
    """

    settings: Mapping[str, Mapping[str, Any]]
    packages: Mapping[str, Mapping[str, str]]
    code_a: Mapping[str, Any]
    code_b: Mapping[str, Any]
    same_code: bool | None
    inputs: tuple[tuple[Change, tuple[str, ...]], ...] | None = None
    accepted_a: tuple[str, ...] = ()
    accepted_b: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "config": self.settings,
            "code": {"same": self.same_code, "a": self.code_a, "b": self.code_b},
            "packages": self.packages,
            "inputs": None if self.inputs is None else [_input_data(change, diff) for change, diff in self.inputs],
            "accepted_a": list(self.accepted_a),
            "accepted_b": list(self.accepted_b),
        }


def read_setup(folder: Path) -> Setup:
    """Read `run.json` and `config.toml`; ConfigError with file and line if they cannot be read."""
    run = Run(folder)
    return Setup(manifest=run.manifest, settings=_flat(run.settings), identity=run.identity)


def compare_setups(a: Setup, b: Setup) -> SetupDiff:
    """Every difference except the paths of records."""
    settings = {}
    for path in sorted({*a.settings, *b.settings} - PLACES):
        values = a.settings.get(path, _ABSENT), b.settings.get(path, _ABSENT)
        if type(values[0]) is not type(values[1]) or values[0] != values[1]:
            origins = {f"origin_{side}": run.origin(path) for side, run in (("a", a), ("b", b)) if path in run.settings}
            settings[path] = _pair(*values) | origins
    packages_a, packages_b = a.packages(), b.packages()
    packages = {
        name: _pair(packages_a.get(name, _ABSENT), packages_b.get(name, _ABSENT))
        for name in sorted({*packages_a, *packages_b})
        if packages_a.get(name) != packages_b.get(name)
    }
    code_a, code_b = a.code(), b.code()
    same: bool | None = code_a["commit"] == code_b["commit"]
    if not code_a["commit"] or not code_b["commit"] or (same and (code_a["dirty"] or code_b["dirty"])):
        same = None
    return SetupDiff(
        settings=settings,
        packages=packages,
        code_a=code_a,
        code_b=code_b,
        same_code=same,
        inputs=_inputs(a.identity, b.identity),
        accepted_a=tuple(accepted_changes(a.manifest)),
        accepted_b=tuple(accepted_changes(b.manifest)),
    )


def _inputs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[Change, tuple[str, ...]], ...] | None:
    if not a or not b:
        return None
    return tuple((change, tuple(source_diff(change, a, b))) for change in changes_between(a, b))


def _input_data(change: Change, diff: Sequence[str]) -> dict[str, Any]:
    """A differing input as JSON; `line` is the first differing one, 0 without copies."""
    named = {"kind": str(change.kind), "name": change.name, "distribution": change.owner, "what": change.what}
    return named | {"line": change.line, "a": change.before, "b": change.now, "diff": list(diff)}


def _flat(tables: Record, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return {path: value for path, value in flat.items() if value != {}}


def _pair(a: Any, b: Any) -> dict[str, Any]:
    return {side: value for side, value in (("a", a), ("b", b)) if value is not _ABSENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """Run A against run B; labels are the folders as given."""

    label_a: str
    label_b: str
    status_a: str
    status_b: str
    setup: SetupDiff
    data: DataDiff
    metrics: MetricsDiff

    @property
    def is_identical(self) -> bool:
        """The same steps with the same batches and results; settings and packages may differ."""
        return self.metrics.is_same and self.data.differing_step is None

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        a, b = self.metrics.curve_a, self.metrics.curve_b
        return {
            "label_a": self.label_a,
            "label_b": self.label_b,
            "status_a": self.status_a,
            "status_b": self.status_b,
            "identical": self.is_identical,
            "final_a": {name: a.final[name] for name in (*FINAL, *HELD_OUT)},
            "final_b": {name: b.final[name] for name in (*FINAL, *HELD_OUT)},
            "wall_time_a": a.wall_time_s,
            "wall_time_b": b.wall_time_s,
            "steps_a": a.steps,
            "steps_b": b.steps,
            "curve_a": a.rates,
            "curve_b": b.rates,
            **self.setup.as_data(),
            "data": self.data.as_data(),
            "metrics": self.metrics.as_data(),
        }


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Read both folders, streaming the records; ConfigError names the first unreadable file and line."""
    setup_a, setup_b = read_setup(a), read_setup(b)
    metrics = compare_metrics(Run(a), Run(b))
    return RunDiff(
        label_a=str(a),
        label_b=str(b),
        status_a=str(setup_a.manifest.get("status", "unknown")),
        status_b=str(setup_b.manifest.get("status", "unknown")),
        setup=compare_setups(setup_a, setup_b),
        data=compare_data(Reader(Run(a), metrics.curve_a.last_step), Reader(Run(b), metrics.curve_b.last_step)),
        metrics=metrics,
    )
