"""Decides how an interrupted run continues: from which checkpoint, and whether it is still the same run."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.kernel.plugins.installed import versions_of
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import FINAL, Checkpoint, newest_valid
from retrain.records.files import digest_of
from retrain.records.folder import CHECKSUMS, SIZES, check_sizes
from retrain.records.identity.changes import Change, changes_between
from retrain.records.identity.collect import Identity
from retrain.records.manifest import LIBRARIES, public_values
from retrain.records.reading import parse_record, read_steps, table_of, time_now
from retrain.records.record_names import TOKEN_FILES, token_file
from retrain.records.run import RESUMES, Run, resumes
from retrain.run.check import backend_options
from retrain.run.steps.updates import Course
from retrain.text.terminal_text import printable

STEPS, OPTIONS = "training.max_steps", "backend.options"
COURSE = "with schedule = {!r} the learning rate of every step depends on it, including the steps already taken"
NOT_THE_SAME = "the run would not be the one that was stopped"
MOST_NAMED = 5  # damaged token files


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCheck:
    """The records of a run compared with its checkpoint: a resume continues from `digests`.

    `damaged` names files that have changed; `notices` refuse no resume.
    """

    digests: Mapping[str, blake2b] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def check_records(run: Path, state: Mapping[str, Any]) -> RecordCheck:
    """Compare the records of a run with the checksums in a checkpoint's state; missing token files are a notice."""
    sizes, wanted = state[SIZES], state[CHECKSUMS]
    digests = {name: digest_of(run / name, int(size)) for name, size in sizes.items()}
    damaged = [name for name in sizes if digests[name].hexdigest() != wanted.get(name)]
    found = [_damage(run / name) for name in damaged]
    # A damaged list would accuse intact token files.
    bad, missing = ([], []) if TOKEN_FILES in damaged else _token_files(run, sizes.get(TOKEN_FILES, 0))
    found += [f"{file} is damaged: its checksum differs" for file in bad[:MOST_NAMED]]
    found += [f"{len(bad) - MOST_NAMED} more token files are damaged"] if len(bad) > MOST_NAMED else []
    notices: tuple[str, ...] = ()
    if missing:
        files = "1 token file is" if len(missing) == 1 else f"{len(missing)} token files are"
        notices = (f"{files} missing, first {missing[0]}: `retrain credit` cannot show such a step",)
    return RecordCheck(digests=digests, damaged=tuple(found), notices=notices)


def _damage(file: Path) -> str:
    """Return where a damaged file shows it: at a line that cannot be read, if there is one."""
    try:
        for _ in read_steps(file):
            pass
    except ConfigError as error:
        return f"{error.problems[0].where} is damaged: {error.problems[0].what}"
    return f"{file} is damaged: its checksum differs, yet every line can be read"


def _token_files(run: Path, size: int) -> tuple[list[Path], list[Path]]:
    """Return the damaged and the missing token files among those in the first `size` bytes of the list."""
    damaged, missing = [], []
    with (run / TOKEN_FILES).open("rb") as stream:
        lines = [parse_record(line) for line in stream.read(size).splitlines()]
    for line in lines:
        file = token_file(run, int(line["step"]))
        try:
            if digest_of(file).hexdigest() != line["blake2b"]:
                damaged.append(file)
        except FileNotFoundError:
            missing.append(file)
        except OSError:
            damaged.append(file)
    return damaged, missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A key whose value differs from the one the run was started with."""

    path: str
    before: Any
    now: Any
    place: str = ""
    why: str = ""  # if it is not plain

    def __str__(self) -> str:
        return f"{self.path} was {self.before!r} and is now {self.now!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """Plan of a resume. Without a valid checkpoint the run restarts from the beginning, with its own seed."""

    run: Path
    adapters: Path
    manifest: Mapping[str, Any]
    checkpoint: Checkpoint | None
    damaged: tuple[Problem, ...]
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...] = ()
    libraries: tuple[str, ...] = ()
    records: RecordCheck = field(default_factory=RecordCheck)

    @property
    def next_step(self) -> int:
        return self.checkpoint.next_step if self.checkpoint else 0

    def is_complete(self, max_steps: int) -> bool:
        """True if the run ended normally and its last checkpoint contains at least `max_steps` steps."""
        last = self.checkpoint
        is_whole = last is not None and last.path.name == FINAL and self.manifest.get("status") == "done"
        return is_whole and self.next_step >= max_steps

    @property
    def refused(self) -> list[Change]:
        return [change for change in self.changes if change.refuses]

    @property
    def accepted(self) -> list[str]:
        """Everything that `--resume-anyway` accepts, one line each."""
        return [*(str(each) for each in (*self.differences, *self.refused)), *self.records.damaged]

    @property
    def input_notices(self) -> list[str]:
        return [*(str(change) for change in self.changes if not change.refuses), *self.libraries]

    @property
    def notices(self) -> list[str]:
        return [*self.input_notices, *self.records.notices]

    def recorded(self, accepted: Sequence[str] = ()) -> dict[str, Any]:
        """Entries of `run.json` about this resume, with `accepted` in addition, and about earlier ones."""
        time, accepted = time_now(), [*self.accepted, *accepted]
        entry = {"step": self.next_step, "time": time, "accepted": accepted, "noticed": list(self.notices)}
        return {
            "started": self.manifest["started"],
            "resumed_at_step": self.next_step,
            RESUMES: [*resumes(self.manifest), entry],
        }

    @property
    def seed(self) -> int:
        """Root seed of the run, regardless of the configuration."""
        return int(self.manifest["seed"])


def plan_resume(run: Path, config: Config, keys: list[Key], identity: Identity, plugins: Plugins) -> ResumePlan:
    """Inspect a run folder without changing it; ResumeError when it is not a run, or its records are truncated."""
    opened = Run(run)
    manifest, adapters, stored = opened.started_manifest(), opened.adapters, opened.identity
    checkpoint, damaged = newest_valid(adapters)
    if checkpoint is not None:
        # Two runs may have had the same [backend] adapter_path, one after the other.
        other, own = checkpoint.state.get("run_started"), manifest.get("started")
        if other != own:
            what = f"is a checkpoint of the run that started at {other}, not of this one ({own})"
            fix = "its own checkpoints were moved aside when that run began: move them back to [backend] adapter_path"
            raise ResumeError(Problem(code="resume.other-run", where=str(checkpoint.path), what=what, fix=fix))
        check_sizes(run, checkpoint.state["record_sizes"])
    records = check_records(run, checkpoint.state) if checkpoint else RecordCheck()
    return ResumePlan(
        run=run,
        adapters=adapters,
        manifest=manifest,
        checkpoint=checkpoint,
        damaged=tuple(damaged),
        differences=tuple(_differences(manifest, config, keys, plugins)),
        changes=tuple(changes_between(stored, identity.as_data())),
        libraries=tuple(_library_changes(manifest)),
        records=records,
    )


def refuse_changes(plan: ResumePlan, *, anyway: bool) -> None:
    """ResumeError naming every change that makes it a different run, and every damaged record, unless `anyway`.

    A different run: the change of a key, of code, data, model or plugin.
    """
    if anyway or not plan.accepted:
        return
    where, fix, found = f"[resume] {plan.run}", "take it back, or insist with --resume-anyway", list[Problem]()
    for each in plan.differences:
        what, why = f"{each.path} was {each.before!r} and is now {each.now!r} ({each.place})", each.why or NOT_THE_SAME
        found.append(Problem(code="resume.changed-key", where=where, what=what, why=why, fix=fix))
    for change in plan.refused:
        what = f"an input changed: {printable(str(change))}"
        found.append(Problem(code="resume.changed-input", where=where, what=what, why=NOT_THE_SAME, fix=fix))
    why, fix = "it would be kept as part of the run", "restore the file, or accept it with --resume-anyway"
    for damage in plan.records.damaged:
        what = f"a record is damaged: {printable(damage)}"
        found.append(Problem(code="record.damaged", where=where, what=what, why=why, fix=fix))
    raise ResumeError(*found)


def _library_changes(manifest: Mapping[str, Any]) -> list[str]:
    before = {"Python": manifest.get("python"), **dict(manifest.get("libraries") or {})}
    now = {"Python": platform.python_version(), **versions_of(LIBRARIES)}
    return [
        f"{name} was {before[name]} and is now {version}"
        for name, version in now.items()
        if before.get(name) not in (None, version)
    ]


def _differences(manifest: Mapping[str, Any], config: Config, keys: list[Key], plugins: Plugins) -> list[Difference]:
    before, now = manifest.get("config", {}), public_values(config)
    found, course = [], Course.of(config)
    free, free_names = interchangeable(config, manifest, plugins), _free_options(config, plugins)
    for key in keys:
        # A falling rate depends on the number of steps, so another number contradicts the steps already taken.
        is_course = key.path == STEPS and course.falls
        if (key.free_on_resume and not is_course) or key.path in free or key.table not in now:
            continue
        old, new = (values.get(key.table, {}).get(key.name, key.default) for values in (before, now))
        if key.path == "training.seed":
            old = manifest["seed"]
            new = old if config.training.seed < 0 else new
        if key.path == OPTIONS:
            old, new = ({name: each[name] for name in each if name not in free_names} for each in (old, new))
        if old != new:
            why = COURSE.format(course.schedule) if is_course else ""
            found.append(Difference(path=key.path, before=old, now=new, place=config.place(key.path), why=why))
    return found


PATHS = frozenset({"backend.devices", "backend.options"})


def interchangeable(config: Config, manifest: Mapping[str, Any], plugins: Plugins) -> frozenset[str]:
    """The keys whose recorded values may differ from the values of `config`, according to its backend.

    The model of its `[backend.options]` says it with `kept_on_resume(devices)`, if it has that: the parts of `[backend]
    devices` and these options that a resumed run must keep, as plain data.
    """
    before = table_of(manifest, "config", "backend")
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    model = entries[0].spec.load_params() if len(entries) == 1 else None
    if model is None or not hasattr(model, "kept_on_resume") or before.get("backend") != config.backend.backend:
        return frozenset()
    try:
        both = (before.get("options", {}), backend_options(config, plugins))
        then, now = cast("tuple[Any, Any]", tuple(model(**options) for options in both))
    except (ValidationError, TypeError):
        # Another version wrote these options; the comparison of keys names them.
        return frozenset()
    is_same = then.kept_on_resume(before.get("devices", "")) == now.kept_on_resume(config.backend.devices)
    return PATHS if is_same else frozenset()


def _free_options(config: Config, plugins: Plugins) -> frozenset[str]:
    """The backend's options that a resumed run may change: `free_on_resume` in the model it declares."""
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    model = entries[0].spec.load_params() if len(entries) == 1 else None
    keys = keys_of("backend.options", model) if model else ()
    return frozenset(key.name for key in keys if key.free_on_resume)
