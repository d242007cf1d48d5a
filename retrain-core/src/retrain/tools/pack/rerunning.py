"""Runs a pack again and compares it with the pack's records, line by line, as the lines come."""

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
from retrain.records.reading import Record, flattened, read_regular, table_of
from retrain.records.record_names import CONFIG_FILE, EVALUATION, RUN_FILE
from retrain.records.run import Run, is_run
from retrain.text.secrets import HIDDEN
from retrain.text.terminal_text import printable
from retrain.tools.pack import comparison
from retrain.tools.pack.archive import Contents, PackedRun, Release
from retrain.tools.pack.environment import RUN, Say
from retrain.tools.pack.gather import weights_of
from retrain.tools.pack.inputs import with_moved

# Causes of another run, and causes of another rounding, the most frequent first.
CHANGING = ("seed", "configuration", "data", "model", "code", "plugin", "python", "package", "hardware")
ROUNDING = ("hardware", "package", "python", "plugin", "code", "model", "configuration", "data", "seed")
LOOKED_AT = "seed, configuration, data, model, code, plugins, python, packages, hardware"
# Records and watchers of a run: a rerun sets these.
OF_THE_RERUN = ("logging", "resume", "campaign")
KEYS_OF_THE_RERUN = frozenset({"training.seed", "backend.adapter_path", "backend.throttle_dir"})
CALCULATING = tuple(name for name in LIBRARIES if name not in ("pydantic", "pluggy"))
VALUES = (  # of `run.json`: kind, words before it, path
    ("seed", "", ("seed",)),
    ("python", "", ("python",)),
    *(("hardware", f"{name} ", ("hardware", name)) for name in ("cpu", "machine", "cores", "threads", "system")),
    ("hardware", "devices ", ("devices", "used")),
)
POLL_S, GRACE_S = 0.2, 60.0
LOG = "run.log"
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def ranked(found: list[Difference], first: comparison.Divergence | None) -> list[Difference]:
    """Sort by likelihood of being the cause: by kind, and by whether the first divergence is one of rounding."""
    order = ROUNDING if first is not None and first.is_rounding else CHANGING
    return sorted(found, key=lambda each: order.index(each.kind))


def differences(
    contents: Contents, packed: PackedRun, inputs: Path, run: Path, packages: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    """Return every difference between a run of a pack and its rerun in `run`.

    `inputs` is the folder of the packed copies, `packages` the installed ones of the rerun.
    """
    before, now = contents.record(f"{packed.place}/{RUN_FILE}"), Run(run).manifest
    identity = {**contents.record(packed.identity), FOLDER: str(inputs)}
    found = [*_settings(before, now, contents.moved)]
    for change in changes_between(_renamed(identity, contents), Run(run).identity):
        if str(change.kind) != "package":
            found.append(Difference(kind=str(change.kind), what=str(change)))
    has_cause = any(each.kind in ("data", "configuration") for each in found) or before.get("seed") != now.get("seed")
    # The only trace of a data source that is no file, and whose code has not changed.
    if not has_cause and before.get("examples") != now.get("examples"):
        found.append(Difference(kind="data", what="the data source gives other examples, or in another order"))
    found += _packages(contents.packages, packages)
    for kind, name, path in VALUES:
        old, new = (table_of(record, *path[:-1]).get(path[-1]) for record in (before, now))
        if old != new:
            found.append(Difference(kind=kind, what=f"{name}{_was(old, new)}"))
    return found


def _settings(before: Mapping[str, Any], now: Mapping[str, Any], moved: Mapping[str, str]) -> Iterator[Difference]:
    old, new = flattened(with_moved(table_of(before, "config"), moved)), flattened(table_of(now, "config"))
    for path in sorted({*old, *new}):
        values = old.get(path, _ABSENT), new.get(path, _ABSENT)
        is_own = path.partition(".")[0] in OF_THE_RERUN or path in KEYS_OF_THE_RERUN
        if values[0] != values[1] and not is_own:
            yield Difference(kind="configuration", what=f"{path} {_was(*values)}")
        elif HIDDEN in str(values[0]) and not is_own:
            yield Difference(kind="configuration", what=f"{path} holds a secret, hidden in the pack")


def _renamed(identity: dict[str, Any], contents: Contents) -> dict[str, Any]:
    """Return the identity with data and code under their names in the rerun's configuration."""
    names = {(file.kind, file.name): file.place for file in contents.files if file.kind != "model"}
    found = dict(identity)
    for kind in ("code", "data"):
        section = found.get(kind)
        if isinstance(section, dict) and isinstance(section.get("files"), dict) and contents.moved:
            files = {names.get((kind, name), name): file for name, file in section["files"].items()}
            found[kind] = {**section, "files": files}
    return found


def _packages(packed: Mapping[str, Release], here: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    for name in sorted(packed, key=lambda each: (CALCULATING.index(each) if each in CALCULATING else 99, each)):
        old, new = packed[name], here.get(name, {})
        if old["version"] != new.get("version"):
            yield Difference(kind="package", what=f"{name} {_was(old['version'], new.get('version', _ABSENT))}")
        elif old["digest"] and new.get("digest") and old["digest"] != new["digest"]:
            what = f"{name} {old['version']} is another build: its files have other hashes"
            yield Difference(kind="package", what=what)


def _was(old: object, new: object) -> str:
    shown = ["absent" if each is _ABSENT else repr(each) if isinstance(each, str) else str(each) for each in (old, new)]
    return f"was {shown[0]} and is now {shown[1]}"


@dataclass(slots=True, kw_only=True, eq=False)
class RunOutcome:
    """A run against its rerun in `folder`: the number of equal lines, the first that differs, and why."""

    run: PackedRun
    folder: Path
    wanted: list[Record]
    reader: comparison.RunLines
    num_same: int = 0
    first: comparison.Divergence | None = None
    causes: list[Difference] = field(default_factory=list)
    tested: comparison.Equivalence | None = None

    @property
    def verdict(self) -> str:
        if self.first is None:
            return "identical"
        return "equivalent" if self.tested is not None and self.tested.is_equivalent else "different"

    def as_data(self) -> dict[str, Any]:
        """Return plain data; of an identical run, `causes` are differences without an effect."""
        return {
            "run": self.run.name,
            "verdict": self.verdict,
            "same_lines": self.num_same,
            "first_divergence": self.first.as_data() if self.first else None,
            "causes": [{"kind": each.kind, "what": each.what} for each in self.causes],
            "equivalence": self.tested.as_data() if self.tested else None,
        }

    def advance(self, say: Say) -> bool:
        """Compare the new lines; True if one of them is the first that differs."""
        for line in self.reader.new():
            if self.first is None:
                packed = self.wanted[self.num_same] if self.num_same < len(self.wanted) else None
                self.first = comparison.divergence(self.run.name, packed, line)
                if self.first is not None:
                    return True
                self.num_same += 1
                where = "before training" if line["step"] < 0 else f"step {line['step']}"
                name = f"{printable(self.run.name)} " if self.run.name else ""
                say(f"  {name}{where}: identical, {len(line)} fields")
        return False

    def conclude(self) -> None:
        here = weights_of(self.folder)
        if self.first is None and self.num_same < len(self.wanted):
            self.first = comparison.divergence(self.run.name, self.wanted[self.num_same], None)
        elif self.first is None and self.run.weights != here:
            names = sorted({*self.run.weights, *here})
            fields = {f"(weights) {name}": (self.run.weights.get(name), here.get(name)) for name in names}
            step = self.wanted[-1]["step"] if self.wanted else 0
            self.first = comparison.Divergence(run=self.run.name, step=step, fields=fields)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """All runs of a pack, and for a campaign the verdict computed again."""

    runs: list[RunOutcome]
    verdict: Mapping[str, Any] | None = None

    @property
    def is_repeated(self) -> bool:
        return all(run.verdict != "different" for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """A pack, and where it is run again: in `work`, by `python` in `environ`.

    `inputs` are the packed copies of files, and `packages` those installed for `python`.
    """

    contents: Contents
    work: Path
    python: Path | str
    environ: Mapping[str, str]
    inputs: Path
    packages: Callable[[], Mapping[str, Mapping[str, str]]]
    say: Say

    def outcome(self, arguments: Sequence[str]) -> Outcome:
        """Run, follow, compare; causes are sought as soon as a line differs.

        A single run that differs, without a test that the pack declares, is stopped there. BackendError when the run
        fails before any line differs.
        """
        contents, folder = self.contents, self.work / RUN
        runs = []
        for packed in contents.runs:
            place = folder / "runs" / packed.name if packed.name else folder
            reader = comparison.RunLines(place)
            runs.append(RunOutcome(run=packed, folder=place, wanted=contents.lines(packed), reader=reader))
        log = self.work.parent / LOG
        with log.open("wb") as stream:
            # -P, so that no file in the folder of the rerun is imported in place of retrain.
            command = [str(self.python), "-P", "-m", "retrain", CONFIG_FILE, *arguments]
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            try:
                self._follow(process, runs)
            finally:
                _end(process)
        differing = [run for run in runs if run.first is not None]
        if process.returncode and not differing:
            why = "\n".join(printable(line) for line in log.read_text("utf-8", "replace").strip().splitlines()[-8:])
            what, fix = f"the run ended with exit code {process.returncode}", "correct that, then rerun"
            raise BackendError(Problem(code="rerun.run-failed", where=str(log), what=what, why=why, fix=fix))
        for run in runs:
            run.conclude()
            if run not in differing:
                self._explain(run)
            if contents.equivalence is not None and run.first is not None:
                packed_text = contents.opened.read(f"{run.run.place}/{EVALUATION}")
                packed_rates = comparison.final_rates(comparison.parsed(packed_text))
                file = run.folder / EVALUATION
                here = comparison.final_rates(comparison.parsed(read_regular(file))) if file.is_file() else {}
                run.tested = comparison.equivalence(packed_rates, here, contents.equivalence)
        return Outcome(runs=runs, verdict=comparison.verdict_of(folder) if contents.is_campaign else None)

    def _follow(self, process: subprocess.Popen[bytes], runs: Sequence[RunOutcome]) -> None:
        while True:
            # Asked before the lines are read: a run that ends in between has written its last ones by the next turn.
            has_ended = process.poll() is not None
            for run in runs:
                if run.advance(self.say):
                    self._explain(run)
                    if not self.contents.is_campaign and self.contents.equivalence is None:
                        self.say("stopped: the pack declares no test of equivalence")
                        return
            if has_ended:
                return
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)

    def _explain(self, run: RunOutcome) -> None:
        """Find and report the differences: as causes of the first divergence, or as without an effect."""
        if is_run(run.folder):
            with suppress(ConfigError):
                found = differences(self.contents, run.run, self.inputs, run.folder, self.packages())
                run.causes = ranked(found, run.first)
        harmless = [f"  different, without an effect: {cause}" for cause in run.causes]
        for line in [*run.first.lines(), *cause_lines(run.causes)] if run.first else harmless:
            self.say(printable(line))


def cause_lines(causes: Sequence[Difference]) -> list[str]:
    if not causes:
        return [f"cause not found among {LOOKED_AT}: it may be time, a service or a race"]
    more = [f"  also different: {each}" for each in causes[1:]]
    return [f"{'most likely cause' if more else 'cause'}: {causes[0]}", *more]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the run, if it is still running: first by the signal at which it saves its state."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        if process.poll() is None:
            process.kill()
            process.wait()
