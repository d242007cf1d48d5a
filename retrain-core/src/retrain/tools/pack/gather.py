"""Gathers the inputs and the records of a finished run or campaign; refuses one that could not be repeated."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.version import __version__
from retrain.records import record_names
from retrain.records.checkpoints import SUMS, checkpoint_folders
from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import FOLDER
from retrain.records.identity.hashing import Budget, plugin_files
from retrain.records.identity.recorded import with_places
from retrain.records.reading import read_object, read_regular
from retrain.records.run import Run, accepted_changes, is_run
from retrain.text.amounts import first_few
from retrain.text.secrets import HIDDEN, hide, redacted
from retrain.tools.pack.archive import FORMAT
from retrain.tools.pack.comparison import RunLines, encoded, expected_half_width, final_rates, parsed, verdict_of
from retrain.tools.pack.inputs import Inputs, Leak, collect_inputs, leaks_in, texts_of, with_moved
from retrain.tools.pack.wheels import extras_of, installed_digests, required, wheel_of
from retrain.verdicts.ledger.chain import ledger_folder

LEDGER = "ledger.jsonl"
OF_A_CAMPAIGN = (record_names.CAMPAIGN_FILE, record_names.CAMPAIGN_CONTENT)
WEIGHTS = ("adapter_model.safetensors", "model.safetensors")
OF_THE_PROCESS = ("pid", "command", "config_file", "paths")
PLACES = ("path", "root", "places", "written")  # where files lay on the machine that packs
MOST_LEAKS = 20
FIX = "pack in the environment in which it ran, or run it again here and pack that run"


@dataclass(slots=True, kw_only=True)
class Gathered:
    """The manifest of a pack, its members by name, and notes for the user."""

    manifest: dict[str, Any]
    members: dict[str, bytes]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    name: str
    folder: Path
    record: Mapping[str, Any]
    identity: Mapping[str, Any]


def gather(folder: Path, *, most_bytes: int, margin: float | None, hide_secrets: bool) -> Gathered:
    """Return the pack of a run or campaign; ConfigError says why it cannot be made, or which lines hold a secret.

    `most_bytes` is the size up to which a data file is packed, `margin` the one of an equivalence test.
    """
    is_campaign = (folder / record_names.CAMPAIGN_FILE).is_file() and not is_run(folder)
    runs = list(_campaign_runs(folder) if is_campaign else [_recorded("", folder)])
    _check_repeatable(runs)
    tables = Run(folder).settings
    identities = {str(run.folder): run.identity for run in runs}
    inputs = collect_inputs(identities, tables, most_bytes=most_bytes, hide_secrets=hide_secrets)
    software = collect_software(runs, [text for _, text in texts_of(tables)])
    members = {**inputs.members, **software.members, **_plugin_copies(runs)}
    members[record_names.CONFIG_FILE] = tomli_w.dumps(hide(with_moved(tables, inputs.moved))).encode()
    found = Gathered(manifest={}, members=members)
    listed = [_run_entry(run, found, margin) for run in runs]
    if is_campaign:
        for name in OF_A_CAMPAIGN:
            members[f"campaign/{name}"] = read_regular(folder / name)
        if (ledger := ledger_folder(folder) / LEDGER).is_file():
            members[f"campaign/{LEDGER}"] = read_regular(ledger)
    model, name = runs[0].identity.get("model") or {}, str(tables.get("model", {}).get("model", ""))
    found.manifest = {
        "format": FORMAT,
        "kind": "campaign" if is_campaign else "run",
        "name": folder.resolve().name,
        "retrain": __version__,
        "python": runs[0].record.get("python", ""),
        "hardware": runs[0].record.get("hardware", {}),
        "model": {"name": name, "digest": model.get("digest", ""), "num_files": model.get("num_files", 0)},
        "wheels": software.wheels,
        "packages": software.packages,
        "placed": inputs.placed,
        "left_out": inputs.left_out,
        "moved": inputs.moved,
        "hidden": inputs.hidden,
        "runs": listed,
        "equivalence": margin,
        "verdict": verdict_of(folder) if is_campaign else None,
    }
    if HIDDEN in members[record_names.CONFIG_FILE].decode():
        note = "the configuration holds a secret, now hidden; where it matters, rerun with --set TABLE.KEY=VALUE"
        found.notes.append(note)
    _check_no_leaks(inputs, software, members)
    found.manifest = redacted(found.manifest)
    return found


def _campaign_runs(folder: Path) -> Iterator[Recorded]:
    manifest = read_object(folder / record_names.CAMPAIGN_FILE)
    if manifest.get("status") != "done":
        what = f"is a campaign that is {manifest.get('status')}, not done"
        fix = "finish it: the same command, or `retrain --resume`"
        raise ConfigError(Problem(code="pack.campaign-unfinished", where=str(folder), what=what, fix=fix))
    for entry in manifest["runs"]:
        if entry.get("status") == "done":
            name = str(entry["run_name"])
            yield _recorded(name, folder / "runs" / name)


def _recorded(name: str, folder: Path) -> Recorded:
    if not is_run(folder):
        what = "is neither a run nor a campaign"
        fix = "give the folder of a run or of a campaign; `retrain status` lists them"
        raise ConfigError(Problem(code="pack.not-a-run", where=str(folder), what=what, fix=fix))
    run = Run(folder)
    identity = with_places(run.identity, run.manifest, folder)
    return Recorded(name=name, folder=folder, record=run.manifest, identity=identity)


def _check_repeatable(runs: Sequence[Recorded]) -> None:
    problems = []
    for run in runs:
        where = str(run.folder)
        if (status := run.record.get("status")) != "done":
            what, fix = f"is a run that is {status}, not done", f"`retrain --resume {run.folder}` finishes it"
            problems.append(Problem(code="pack.run-unfinished", where=where, what=what, fix=fix))
        if not run.identity:
            what, fix = "recorded no hashes of its code and data", "run it again with this version"
            problems.append(Problem(code="pack.no-hashes", where=where, what=what, fix=fix))
        # A resume that accepted a change continued another run: no single set of inputs repeats both parts.
        if changes := accepted_changes(run.record):
            what, fix = f"is not one run from end to end: {changes[0]}", "run it again in one go, then pack that run"
            problems.append(Problem(code="pack.changed-on-resume", where=where, what=what, fix=fix))
    if not runs:
        what, fix = "the campaign has no finished run", "run it to its end, then pack it"
        problems.append(Problem(code="pack.no-finished-run", what=what, fix=fix))
    if problems:
        raise ConfigError(*problems)


def _run_entry(run: Recorded, found: Gathered, margin: float | None) -> dict[str, Any]:
    place = f"runs/{run.name}" if run.name else "run"
    lines = list(RunLines(run.folder).new())
    text = b"".join(map(encoded, lines))
    found.members[f"{place}/{record_names.METRICS}"] = text
    record = {name: value for name, value in run.record.items() if name not in OF_THE_PROCESS}
    manifest = json.dumps(redacted(record), indent=1, sort_keys=True) + "\n"
    found.members[f"{place}/{record_names.RUN_FILE}"] = manifest.encode()
    identity = json.dumps(redacted(_without_places(run.identity)), sort_keys=True).encode()
    member = f"identities/{hashlib.sha256(identity).hexdigest()[:16]}.json"
    found.members[member] = identity
    entry = {
        "name": run.name,
        "place": place,
        "condition": str(run.record.get("condition", "")),
        "seed": run.record.get("seed"),
        "steps": sum(line["step"] >= 0 for line in lines),
        "lines": len(lines),
        "digest": hashlib.sha256(text).hexdigest(),
        "identity": member,
        "weights": weights_of(run.folder),
    }
    if (run.folder / record_names.EVALUATION).is_file():
        evaluations = read_regular(run.folder / record_names.EVALUATION)
        found.members[f"{place}/{record_names.EVALUATION}"] = evaluations
        rates = [] if margin is None else list(parsed(evaluations))
        width = expected_half_width(final_rates(rates), len(rates[-1].get("correct") or ()) if rates else 0)
        if margin is not None and margin < width < math.inf:
            note = f"two runs that differ only in sampling have an interval of about ± {100 * width:.1f} points"
            note += f" on these held-out examples: a margin of {100 * margin:g} points will hardly be shown"
            found.notes += [note] if note not in found.notes else []
    elif margin is not None:
        what, fix = "was not evaluated on held-out examples: nothing can be tested", "leave --equivalence out"
        raise ConfigError(Problem(code="pack.not-evaluated", where=str(run.folder), what=what, fix=fix))
    return entry


def weights_of(run: Path) -> dict[str, str]:
    folders = checkpoint_folders(run / record_names.ADAPTERS)
    sums = read_object(folders[0] / SUMS) if folders else {}
    return {name: str(sums[name]) for name in WEIGHTS if name in sums}


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_places(each) for name, each in value.items() if name not in (*PLACES, FOLDER, "notes")}
    return value


def _plugin_copies(runs: Sequence[Recorded]) -> dict[str, bytes]:
    """Return the copies of plugins' files that runs kept, with which a rerun shows the line that differs."""
    return {
        f"{FOLDER}/{file.relative_to(run.folder / FOLDER).as_posix()}": read_regular(file)
        for run in runs
        for file in sorted((run.folder / FOLDER / "plugins").rglob("*"))
        if file.is_file() and not file.is_symlink()
    }


def _check_no_leaks(inputs: Inputs, software: Software, members: Mapping[str, bytes]) -> None:
    """Check every text of the pack that is not known to be clean; ConfigError names files and lines."""
    leaks: list[Leak] = [*inputs.leaks, *software.leaks]
    for name in members.keys() - inputs.members.keys() - software.members.keys():
        leaks += leaks_in(name, members[name])
    if leaks:
        fix = "take the secrets out and run again, or pack without them: --hide-secrets"
        shown = [
            Problem(
                code="pack.secret-found", where=f"{leak.file}:{leak.line}", what=f"holds a secret: {leak.what}", fix=fix
            )
            for leak in leaks[:MOST_LEAKS]
        ]
        if (more := len(leaks) - MOST_LEAKS) > 0:
            shown.append(Problem(code="pack.secret-found", what=f"and {more} more lines", fix=fix))
        raise ConfigError(*shown)


# The software that a rerun installs: plugins as wheels, and the versions of the packages that they need.


@dataclass(slots=True, kw_only=True)
class Software:
    """`wheels` and `packages` as the manifest has them, the wheels' bytes by member, and secrets in their files."""

    wheels: dict[str, dict[str, Any]] = field(default_factory=dict)
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    members: dict[str, bytes] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)


def collect_software(runs: Sequence[Recorded], words: Sequence[str]) -> Software:
    """Return the installed software of runs; ConfigError names software that differs from the one that ran.

    `words` are the names of parts that the configuration selects, among others.
    """
    plugins: dict[str, dict[str, Any]] = {}
    others: set[str] = set()
    for run in runs:
        plugins |= run.identity.get("plugins") or {}
        others |= set(run.identity.get("packages") or {})
    modules = {  # the top-level ones, by the files that the run recorded
        name: {file.partition("/")[0].removesuffix(".py") for file in plugin.get("files") or {}}
        for name, plugin in plugins.items()
    }
    problems = [*_changed_plugins(plugins, modules)]
    found, roots = Software(), {name: list[str]() for name in others}
    for name, plugin in plugins.items() if not problems else ():
        wheel = wheel_of(name, str(plugin["version"]), modules[name])
        is_ours = bool(plugin.get("first_party"))
        roots[name] = extras_of(name, words)
        member = f"wheels/{wheel.file}"
        found.members[member] = wheel.content
        entry = {"version": plugin["version"], "member": member, "extras": roots[name], "editable": wheel.is_editable}
        digest = hashlib.sha256(wheel.content).hexdigest()
        found.wheels[name] = {**entry, "first_party": is_ours, "files": len(wheel.sources), "sha256": digest}
        for source, content in wheel.sources.items():
            leaks = leaks_in(f"{name}: {source}", content)
            found.leaks += [leak for leak in leaks if not is_ours or "environment" in leak.what]
    versions = {name: version for name, version in required(roots).items() if name not in found.wheels}
    for run in runs:
        libraries = run.record.get("libraries") or {}
        problems += [
            _other_version(name, libraries[name], version)
            for name, version in versions.items()
            if name in libraries and libraries[name] != version
        ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    found.packages = installed_digests(versions)
    return found


def _changed_plugins(plugins: Mapping[str, Mapping[str, Any]], modules: dict[str, set[str]]) -> Iterator[Problem]:
    now = Identity(plugins=plugin_files(modules, Budget())).as_data()["plugins"]
    for name, before in plugins.items():
        found = now.get(name, {})
        if "files" not in before:
            what = "inputs/files.json is missing or damaged"
            yield Problem(code="pack.plugin-unknown", where=name, what=what, fix=FIX)
        elif found.get("version") != before.get("version"):
            yield _other_version(name, before.get("version"), found.get("version") or "not installed")
        elif found.get("digest") != before.get("digest"):
            a, b = ({(each, file.get("hash")) for each, file in side["files"].items()} for side in (found, before))
            differing = first_few(sorted({each for each, _ in a ^ b}))
            what = f"its files are not the ones that ran: {differing}"
            yield Problem(code="pack.plugin-changed", where=name, what=what, fix=FIX)


def _other_version(name: str, before: object, now: str) -> Problem:
    what = f"was {before} when the run ran, and is {now} here"
    return Problem(code="pack.version-changed", where=name, what=what, fix=FIX)
