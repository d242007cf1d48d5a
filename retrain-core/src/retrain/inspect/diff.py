"""Compares two runs: results, settings, and the first step at which they diverge. Fields have the names of `--json`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from retrain.records.identity.changes import changes_between, source_diff
from retrain.records.reading import TIMED, Record, flattened, number, table_of
from retrain.records.run import Run, accepted_changes

T = TypeVar("T")
MOST_NAMED = 5
FINAL = ("loss", "correct_rate", "mean_reward")
HELD_OUT = ("eval_correct_rate", "eval_mean_reward")
TIMES = ("step_time_s", "eval_time_s", "sft_time_s")
# These fields are settings, compared as such; only results can diverge.
LABELS = frozenset({"step", "algorithm_mode", "advantage_mode", "transform_mode", "uncertainty_kind", "condition"})
# The place of a run's records does not affect results.
PLACES = frozenset({"logging.log_dir", "backend.adapter_path"})
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDiff:
    """The number of examples each run saw, the first few that only one saw, and the first differing batch.

    `differing_part` is `examples` (other prompts), `completions` (the same prompts, other texts), `tokens` (the same
    texts from other tokens) or `missing` (one run has no completions of the step); None without such a batch.
    """

    examples_a: int
    examples_b: int
    examples_both: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    first_differing_batch: int | None
    differing_part: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDiff:
    """The first common step at which a common field differs, and those fields.

    `only_a` and `only_b` are fields that the other run never has; timing (`*_time_s`) and settings are left out.
    """

    common_steps: int
    first_diverging_step: int | None
    fields: Mapping[str, Mapping[str, Any]]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDiff:
    """A differing file; where both runs kept copies, `line` is the first that differs, `diff` their unified diff."""

    kind: str
    name: str
    distribution: str
    what: str
    line: int
    a: str
    b: str
    diff: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeDiff:
    """Commit and uncommitted changes of each side. `same` is None if unknown: no repository, or uncommitted changes."""

    same: bool | None
    a: Mapping[str, Any]
    b: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """Run A against run B; labels are the folders as given.

    `identical`: the same steps with the same batches and results; settings and packages may differ. `config` and
    `packages` are differing values by name, without the side that lacks one. `inputs` are the differing files of code,
    data, model and plugins, None when a run recorded none. `accepted_a` and `accepted_b` are changes that a resume
    accepted with `--resume-anyway`.
    """

    label_a: str
    label_b: str
    status_a: str
    status_b: str
    identical: bool
    final_a: Mapping[str, float | None]
    final_b: Mapping[str, float | None]
    wall_time_a: float
    wall_time_b: float
    steps_a: int
    steps_b: int
    curve_a: list[float]
    curve_b: list[float]
    config: Mapping[str, Mapping[str, Any]]
    code: CodeDiff
    packages: Mapping[str, Mapping[str, str]]
    inputs: tuple[InputDiff, ...] | None
    accepted_a: list[str]
    accepted_b: list[str]
    data: DataDiff
    metrics: MetricsDiff


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Read both folders, streaming the records; ConfigError names the first unreadable file and line."""
    run_a, run_b = Run(a), Run(b)
    manifests = run_a.manifest, run_b.manifest
    config = _config(run_a, run_b)
    curve_a, curve_b, metrics = _metrics(run_a, run_b)
    data = _data(run_a, run_b, curve_a.last_step, curve_b.last_step)
    has_same_steps = curve_a.steps == curve_b.steps == metrics.common_steps > 0
    is_same = metrics.first_diverging_step is None and data.first_differing_batch is None
    packages_a, packages_b = map(_packages, manifests)
    return RunDiff(
        label_a=str(a),
        label_b=str(b),
        status_a=str(manifests[0].get("status", "unknown")),
        status_b=str(manifests[1].get("status", "unknown")),
        identical=has_same_steps and is_same,
        final_a=curve_a.final,
        final_b=curve_b.final,
        wall_time_a=curve_a.wall_time_s,
        wall_time_b=curve_b.wall_time_s,
        steps_a=curve_a.steps,
        steps_b=curve_b.steps,
        curve_a=curve_a.rates,
        curve_b=curve_b.rates,
        config=config,
        code=_code(*manifests),
        packages={
            name: _pair(packages_a.get(name, _ABSENT), packages_b.get(name, _ABSENT))
            for name in sorted({*packages_a, *packages_b})
            if packages_a.get(name) != packages_b.get(name)
        },
        inputs=_inputs(run_a.identity, run_b.identity),
        accepted_a=accepted_changes(manifests[0]),
        accepted_b=accepted_changes(manifests[1]),
        data=data,
        metrics=metrics,
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


# The metrics, step by step in one pass.


@dataclass(slots=True)
class Curve:
    """Results of one run: numbers of its last step, its correct rates, its time in steps and evaluations."""

    steps: int = 0
    last_step: int = -1
    wall_time_s: float = 0.0
    rates: list[float] = field(default_factory=list)
    final: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys((*FINAL, *HELD_OUT)))

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


def _metrics(run_a: Run, run_b: Run) -> tuple[Curve, Curve, MetricsDiff]:
    curve_a, curve_b, names_a, names_b = Curve(), Curve(), set[str](), set[str]()
    common, diverging = 0, None
    fields: dict[str, dict[str, Any]] = {}
    for step, a, b in side_by_side(run_a.steps(required=True), run_b.steps(required=True)):
        for curve, metrics in ((curve_a, a), (curve_b, b)):
            if metrics is not None:
                curve.add(step, metrics)
        if a is None or b is None:
            continue
        common += step >= 0
        results_a, results_b = _results(a), _results(b)
        names_a.update(results_a)
        names_b.update(results_b)
        if diverging is None:
            both = ((name, value, results_b.get(name, value)) for name, value in results_a.items())
            fields = {name: {"a": x, "b": y} for name, x, y in both if x != y}
            diverging = step if fields else None
    found = MetricsDiff(
        common_steps=common,
        first_diverging_step=diverging,
        fields=fields,
        only_a=tuple(sorted(names_a - names_b)),
        only_b=tuple(sorted(names_b - names_a)),
    )
    return curve_a, curve_b, found


def _results(metrics: Record) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name not in LABELS and not name.endswith(TIMED)}


# The batches: which examples each run saw, and the first step whose batch differs.


def _data(run_a: Run, run_b: Run, last_a: int, last_b: int) -> DataDiff:
    """Compare the batches of all steps that both runs finished; memory grows with the examples, not the steps."""
    seen_a, seen_b = set[str](), set[str]()
    differing_step, differing_part = None, None
    batches = side_by_side(_batches(run_a, last_a, seen_a), _batches(run_b, last_b, seen_b))
    for step, batch_a, batch_b in batches:
        if differing_step is None and step <= min(last_a, last_b):
            differing_part = _differing_part(run_a, run_b, step, batch_a, batch_b)
            differing_step = step if differing_part else None
    return DataDiff(
        examples_a=len(seen_a),
        examples_b=len(seen_b),
        examples_both=len(seen_a & seen_b),
        only_a=tuple(sorted(seen_a - seen_b)[:MOST_NAMED]),
        only_b=tuple(sorted(seen_b - seen_a)[:MOST_NAMED]),
        first_differing_batch=differing_step,
        differing_part=differing_part,
    )


# Digests in sampling order: of the examples, and of the examples with their completions.
Batch = tuple[bytes, bytes]


def _batches(run: Run, last_step: int, seen: set[str]) -> Iterator[tuple[int, Batch]]:
    """Yield step and batch; the ids of the examples are added to `seen`.

    Records that a killed run wrote after its last metrics line are not a complete step.
    """
    for step, lines in groupby(run.completions(required=True), key=lambda line: line[0]):
        if step > last_step:
            return
        # Digests, because the texts of a long run do not fit into memory.
        examples, completions = hashlib.blake2b(), hashlib.blake2b()
        for _, record in lines:
            example = str(record.get("example_id"))
            seen.add(example)
            examples.update(_framed(example))
            for part in (example, str(record.get("completion")), str(record.get("num_tokens"))):
                completions.update(_framed(part))
        yield step, (examples.digest(), completions.digest())


def _framed(part: str) -> bytes:
    content = part.encode("utf-8", "surrogatepass")
    # Unambiguous where one part ends.
    return len(content).to_bytes(8, "big") + content


def _differing_part(run_a: Run, run_b: Run, step: int, a: Batch | None, b: Batch | None) -> str | None:
    if a is None or b is None:
        return "missing"
    if a != b:
        return "examples" if a[0] != b[0] else "completions"
    found = [run.token_arrays(step, ("lengths", "tokens")) for run in (run_a, run_b)]
    ids_a, ids_b = ({name: values.tobytes() for name, values in (arrays or {}).items()} for arrays in found)
    return "tokens" if ids_a and ids_b and ids_a != ids_b else None


# Settings, code and packages.


def _config(run_a: Run, run_b: Run) -> dict[str, dict[str, Any]]:
    """Return differing settings with their origins, without the paths of records."""
    sides = {"a": (run_a, flattened(run_a.settings)), "b": (run_b, flattened(run_b.settings))}
    found = {}
    for path in sorted({*sides["a"][1], *sides["b"][1]} - PLACES):
        a, b = (settings.get(path, _ABSENT) for _, settings in sides.values())
        # 1 == 1.0 == True in Python, but a backend may treat them differently.
        if type(a) is not type(b) or a != b:
            origins = {
                f"origin_{side}": _origin(run, path) for side, (run, settings) in sides.items() if path in settings
            }
            found[path] = _pair(a, b) | origins
    return found


def _origin(run: Run, path: str) -> str:
    origins = table_of(run.manifest, "origins")
    while path:
        if path in origins:
            return str(origins[path])
        path = path.rpartition(".")[0]
    return "default"


def _packages(manifest: Record) -> dict[str, str]:
    found = {"python": str(manifest.get("python", ""))}
    for name in ("libraries", "distributions"):
        found |= {package: str(release) for package, release in table_of(manifest, name).items()}
    return found


def _code(manifest_a: Record, manifest_b: Record) -> CodeDiff:
    a, b = (
        {name: table_of(each, "git").get(name) for name in ("commit", "dirty")} for each in (manifest_a, manifest_b)
    )
    # Uncommitted changes on one commit may differ, so equal commits prove nothing then.
    same: bool | None = a["commit"] == b["commit"]
    if not a["commit"] or not b["commit"] or (same and (a["dirty"] or b["dirty"])):
        same = None
    return CodeDiff(same=same, a=a, b=b)


def _inputs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[InputDiff, ...] | None:
    if not a or not b:
        return None
    return tuple(
        InputDiff(
            kind=str(change.kind),
            name=change.name,
            distribution=change.owner,
            what=change.what,
            line=change.line,
            a=change.before,
            b=change.now,
            diff=tuple(source_diff(change, a, b)),
        )
        for change in changes_between(a, b)
    )


def _pair(a: Any, b: Any) -> dict[str, Any]:
    return {side: value for side, value in (("a", a), ("b", b)) if value is not _ABSENT}
