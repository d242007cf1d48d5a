"""Runs a pack again and compares it with what the pack recorded, line by line, as the lines come."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.records.identity.changes import changes_between
from retrain.records.identity.copies import FOLDER
from retrain.records.manifest import LIBRARIES
from retrain.records.reading import read_regular
from retrain.records.record_names import CONFIG_FILE, EVALUATION, RUN_FILE
from retrain.records.run import Run, is_run
from retrain.text.secrets import HIDDEN
from retrain.text.terminal_text import printable
from retrain.tools.pack.contents import Contents, PackedRun
from retrain.tools.pack.environment import RUN
from retrain.tools.pack.gather import weights_of
from retrain.tools.pack.inputs import with_moved
from retrain.tools.pack.lines import Divergence, Line, RunLines, divergence
from retrain.tools.pack.verdict import Equivalence, equivalence, final_rates, parsed, verdict_of

# Why a rerun is not the run: everything in which the two differ, the most likely cause first.


# What changes a run, and what only rounds it otherwise, by how often it is the cause.
CHANGING = ("seed", "configuration", "data", "model", "code", "plugin", "python", "package", "hardware")
ROUNDING = ("hardware", "package", "python", "plugin", "code", "model", "configuration", "data", "seed")
LOOKED_AT = "seed, configuration, data, model, code, plugins, python, packages, hardware"
# Where a run writes and who watches it: a rerun sets these itself.
OF_THE_RERUN = ("logging", "resume", "campaign")
KEYS_OF_THE_RERUN = frozenset({"training.seed", "backend.adapter_path", "backend.throttle_dir"})
CALCULATING = tuple(name for name in LIBRARIES if name not in ("pydantic", "pluggy"))
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which the rerun is not what the pack says, and of which kind it is."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def ranked(found: list[Difference], first: Divergence | None) -> list[Difference]:
    """The most likely cause first: by kind, and by whether the first divergence is one of rounding."""
    order = ROUNDING if first is not None and first.is_rounding else CHANGING
    return sorted(found, key=lambda each: order.index(each.kind))


def differences(
    contents: Contents, packed: PackedRun, inputs: Path, run: Path, packages: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    """Every difference between a run of a pack and its rerun in `run`.

    `inputs` is the folder of the packed copies, `packages` what is installed where it was run again.
    """
    before, now = contents.record(f"{packed.place}/{RUN_FILE}"), Run(run).manifest
    identity = {**contents.record(packed.identity), FOLDER: str(inputs)}
    found = [*_settings(before, now, contents.moved)]
    for change in changes_between(_renamed(identity, contents), Run(run).identity):
        if str(change.kind) != "package":
            found.append(Difference(kind=str(change.kind), what=str(change)))
    if not any(each.kind in ("data", "configuration", "seed") for each in found):
        found += _examples(before, now)
    found += _packages(contents.packages, packages)
    if before.get("python") != now.get("python"):
        found.append(Difference(kind="python", what=_was(before.get("python"), now.get("python"))))
    return [*found, *_hardware(before, now)]


def _settings(before: Mapping[str, Any], now: Mapping[str, Any], moved: Mapping[str, str]) -> Iterator[Difference]:
    if before.get("seed") != now.get("seed"):
        yield Difference(kind="seed", what=_was(before.get("seed"), now.get("seed")))
    old, new = _flat(with_moved(before.get("config"), moved)), _flat(now.get("config"))
    for path in sorted({*old, *new}):
        values = old.get(path, _ABSENT), new.get(path, _ABSENT)
        is_own = path.partition(".")[0] in OF_THE_RERUN or path in KEYS_OF_THE_RERUN
        if values[0] != values[1] and not is_own:
            yield Difference(kind="configuration", what=f"{path} {_was(*values)}")
        elif HIDDEN in str(values[0]) and not is_own:
            yield Difference(kind="configuration", what=f"{path} holds a secret, which the pack hides")


def _flat(tables: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in (tables if isinstance(tables, dict) else {}).items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return flat


def _renamed(identity: dict[str, Any], contents: Contents) -> dict[str, Any]:
    """The identity with data and code under the names that they have in the rerun's configuration."""
    names = {(file.kind, file.name): file.place for file in contents.files if file.kind != "model"}
    found = dict(identity)
    for kind in ("code", "data"):
        section = found.get(kind)
        if isinstance(section, dict) and isinstance(section.get("files"), dict) and contents.moved:
            files = {names.get((kind, name), name): file for name, file in section["files"].items()}
            found[kind] = {**section, "files": files}
    return found


def _examples(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Of a source that is no file: what it gives."""
    if before.get("examples") != now.get("examples"):
        yield Difference(kind="data", what="the data source gives other examples, or in another order")


def _packages(packed: Mapping[str, Mapping[str, str]], here: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    """Those that calculate first."""
    for name in sorted(packed, key=lambda each: (CALCULATING.index(each) if each in CALCULATING else 99, each)):
        old, new = packed[name], here.get(name, {})
        if old["version"] != new.get("version"):
            yield Difference(kind="package", what=f"{name} {_was(old['version'], new.get('version', _ABSENT))}")
        elif old["digest"] and new.get("digest") and old["digest"] != new["digest"]:
            what = f"{name} {old['version']} is another build: its files have other hashes"
            yield Difference(kind="package", what=what)


def _hardware(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = before.get("hardware") or {}, now.get("hardware") or {}
    for name in ("cpu", "machine", "cores", "threads", "system"):
        if old.get(name) != new.get(name):
            yield Difference(kind="hardware", what=f"{name} {_was(old.get(name), new.get(name))}")
    devices = [(record.get("devices") or {}).get("used") for record in (before, now)]
    if devices[0] != devices[1]:
        yield Difference(kind="hardware", what=f"devices {_was(*devices)}")


def _was(old: object, new: object) -> str:
    shown = ["absent" if each is _ABSENT else repr(each) if isinstance(each, str) else str(each) for each in (old, new)]
    return f"was {shown[0]} and is now {shown[1]}"


POLL_S, GRACE_S = 0.2, 60.0
LOG = "run.log"
Say = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class RunOutcome:
    """A run against its rerun: how many lines were the same, the first that was not, and why."""

    run: PackedRun
    num_same: int = 0
    first: Divergence | None = None
    causes: list[Difference] = field(default_factory=list)
    tested: Equivalence | None = None

    @property
    def verdict(self) -> str:
        """`identical`, `equivalent`, or `different`."""
        if self.first is None:
            return "identical"
        return "equivalent" if self.tested is not None and self.tested.is_equivalent else "different"

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON; of an identical run `causes` are differences without an effect."""
        return {
            "run": self.run.name,
            "verdict": self.verdict,
            "same_lines": self.num_same,
            "first_divergence": self.first.as_data() if self.first else None,
            "causes": [{"kind": each.kind, "what": each.what} for each in self.causes],
            "equivalence": self.tested.as_data() if self.tested else None,
        }


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All runs of a pack, and for a campaign the verdict computed again."""

    runs: list[RunOutcome]
    verdict: Mapping[str, Any] | None = None

    @property
    def is_repeated(self) -> bool:
        """Whether every run is identical or equivalent."""
        return all(run.verdict != "different" for run in self.runs)


@dataclass(slots=True)
class _Followed:
    """One run while it goes on."""

    packed: PackedRun
    folder: Path
    wanted: list[Line]
    outcome: RunOutcome
    reader: RunLines

    def advance(self, say: Say) -> None:
        """Compare the lines that have come since."""
        for line in self.reader.new():
            number = self.outcome.num_same
            if self.outcome.first is None:
                packed = self.wanted[number] if number < len(self.wanted) else None
                self.outcome.first = divergence(self.packed.name, packed, line)
                if self.outcome.first is None:
                    self.outcome.num_same += 1
                    where = "before training" if line["step"] < 0 else f"step {line['step']}"
                    name = f"{printable(self.packed.name)} " if self.packed.name else ""
                    say(f"  {name}{where}: identical, {len(line)} fields")

    def conclude(self) -> None:
        """What only the end shows: lines that never came, and the final weights."""
        number = self.outcome.num_same
        if self.outcome.first is None and number < len(self.wanted):
            self.outcome.first = divergence(self.packed.name, self.wanted[number], None)
        here = weights_of(self.folder)
        if self.outcome.first is None and self.packed.weights != here:
            names = sorted({*self.packed.weights, *here})
            fields = {f"(weights) {name}": (self.packed.weights.get(name), here.get(name)) for name in names}
            step = self.wanted[-1]["step"] if self.wanted else 0
            self.outcome.first = Divergence(run=self.packed.name, step=step, fields=fields)


def rerun(
    contents: Contents,
    work: Path,
    python: Path | str,
    environ: Mapping[str, str],
    arguments: Sequence[str],
    inputs: Path,
    packages: Callable[[], Mapping[str, Mapping[str, str]]],
    say: Say,
) -> Outcome:
    """Run in `work`, follow, compare; the causes are found once the first line differs, and told at once.

    `packages` tells what is installed for `python`. A single run that differs, without a test that the pack declares,
    is stopped there. BackendError when the run itself fails before any line differs.
    """
    folder = work / RUN
    followed = []
    for packed in contents.runs:
        place = folder / "runs" / packed.name if packed.name else folder
        lines = contents.lines(packed)
        followed.append(_Followed(packed, place, lines, RunOutcome(run=packed), RunLines(place)))
    log = work.parent / LOG
    with log.open("wb") as stream:
        command = [str(python), "-P", "-m", "retrain", CONFIG_FILE, *arguments]  # -P: see `prepare_process`
        process = subprocess.Popen(
            command, cwd=work, env=dict(environ), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            _follow(process, followed, contents, inputs, packages, say)
        finally:
            _end(process)
    told = [each for each in followed if each.outcome.first is not None]
    if process.returncode and not told:
        why = "\n".join(printable(line) for line in log.read_text("utf-8", "replace").strip().splitlines()[-8:])
        what = f"the run ended with exit code {process.returncode}"
        raise BackendError(Problem(where=str(log), what=what, why=why, fix="correct what it says, then rerun"))
    for each in followed:
        each.conclude()
        if each not in told:
            _explain(each, contents, inputs, packages, say)
        if contents.equivalence is not None and each.outcome.first is not None:
            each.outcome.tested = _tested(contents, each, contents.equivalence)
    verdict = verdict_of(folder) if contents.is_campaign else None
    return Outcome(runs=[each.outcome for each in followed], verdict=verdict)


def _follow(
    process: subprocess.Popen[bytes],
    followed: Sequence[_Followed],
    contents: Contents,
    inputs: Path,
    packages: Callable[[], Mapping[str, Mapping[str, str]]],
    say: Say,
) -> None:
    while True:
        has_ended = process.poll() is not None  # asked before the lines are read: then none is missed
        for each in followed:
            before = each.outcome.first
            each.advance(say)
            if before is None and each.outcome.first is not None:
                _explain(each, contents, inputs, packages, say)
                if not contents.is_campaign and contents.equivalence is None:
                    say("stopped: the pack declares no test of equivalence")
                    return
        if has_ended:
            return
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)


def _explain(
    each: _Followed,
    contents: Contents,
    inputs: Path,
    packages: Callable[[], Mapping[str, Mapping[str, str]]],
    say: Say,
) -> None:
    """Find in what the rerun differs, and tell it: as causes of the first divergence, or as without an effect."""
    first = each.outcome.first
    if is_run(each.folder):
        with suppress(ConfigError):
            found = differences(contents, each.packed, inputs, each.folder, packages())
            each.outcome.causes = ranked(found, first)
    if first is None:
        lines = [f"  different, without an effect: {cause}" for cause in each.outcome.causes]
    else:
        lines = [*first.lines(), *cause_lines(each.outcome.causes)]
    for line in lines:
        say(printable(line))


def cause_lines(causes: Sequence[Difference]) -> list[str]:
    """For people: the most likely cause, and every other difference."""
    if not causes:
        return [f"cause not found among {LOOKED_AT}: it may be time, a service or a race"]
    more = [f"  also different: {each}" for each in causes[1:]]
    return [f"{'most likely cause' if more else 'cause'}: {causes[0]}", *more]


def _tested(contents: Contents, each: _Followed, margin: float) -> Equivalence:
    packed = final_rates(parsed(contents.opened.read(f"{each.packed.place}/{EVALUATION}")))
    file = each.folder / EVALUATION
    here = final_rates(parsed(read_regular(file))) if file.is_file() else {}
    return equivalence(packed, here, margin)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the run, if it goes on: by the signal at which it saves its state, then at all."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        if process.poll() is None:
            process.kill()
            process.wait()
