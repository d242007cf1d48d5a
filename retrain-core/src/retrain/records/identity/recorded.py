"""Reads the configuration of a run that is opened again, and finds its inputs wherever they are now.

A first run reads relative paths from the current folder and records each place. Later the record decides: next to the
run (inputs may have been copied with it), at the original place, or here. Only a candidate with the recorded
content is taken. A path on the command line belongs to the current folder; a resume takes it for the new place of that
input, if its content is the same.
"""

from __future__ import annotations

import copy
import glob
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import locate_adapter
from retrain.records.files import new_digest
from retrain.records.identity import hashing, inputs
from retrain.records.identity.copies import stored_identity
from retrain.records.identity.hashing import Budget, HashedFile, fixed_part, hash_file, weights_below
from retrain.records.identity.inputs import CODE, COMMAND, DATA, OWN_MODEL, PATH, Keys, value_at
from retrain.records.places import Place, is_there, recorded_folder, recorded_places
from retrain.records.reading import read_if_any, table_of
from retrain.records.record_names import CAMPAIGN_FILE, RUN_FILE
from retrain.records.run import StartedFrom, is_run
from retrain.text.terminal_text import printable

LOG_DIR, ADAPTER_PATH = ("logging", "log_dir"), ("backend", "adapter_path")


def with_places(identity: Mapping[str, Any], manifest: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return a stored identity whose files also have `written`, their configured path if any, and present `places`."""
    known, found = recorded_places(manifest, run), dict(identity)
    models = [place for place in known if place.keys == OWN_MODEL]
    heads = {each: (_head(each.written), each.written if each.sort in (DATA, CODE) else "\0") for each in known}
    for kind in (CODE, DATA, "model"):
        files = table_of(identity, kind, "files")
        placed = {}
        for name in files:
            file = table_of(files, name)
            own = [place for place in known if place.keys != OWN_MODEL and name.startswith(heads[place])]
            belongs = next(iter(own or (models if kind == "model" else [])), None)
            written = name if kind != "model" else ""
            places = [str(file.get("path") or name)]
            if belongs:
                rest = name if belongs.keys == OWN_MODEL else name.removeprefix(fixed_part(belongs.written)).lstrip("/")
                written = os.path.join(belongs.written, name) if belongs.keys == OWN_MODEL else name
                places = [os.path.join(fixed_part(each), rest).rstrip("/") for each in belongs.candidates] + places
            placed[name] = {**file, "written": written, "places": places}
        if files:
            found[kind] = {**table_of(identity, kind), "files": placed}
    return found


def _identities(records: Sequence[StartedFrom]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        if is_run(record.folder):
            yield stored_identity(record.folder, record.manifest)
            continue
        for run in sorted((record.folder / "runs").glob(f"*/{RUN_FILE}")):
            yield stored_identity(run.parent, read_if_any(run))


class Follower:
    """Finds the recorded places of the run to which a configuration file belongs or that it resumes."""

    def __init__(
        self, config: Config, tables: Mapping[str, TableEntry], plugins: Plugins, records: list[StartedFrom]
    ) -> None:
        self._config, self._tables, self._plugins, self._records = config, tables, plugins, records
        self._is_resume = bool(config.resume.from_)
        self._values = copy.deepcopy(config.as_dict())
        self._written: dict[str, Any] = {}
        self._lost: dict[str, Problem] = {}
        self._places = [place for record in records for place in recorded_places(record.manifest, record.folder)]

        outputs = (path for place in self._places if place.sort == PATH for path in place.candidates)
        self._written_to = frozenset(os.path.realpath(path) for path in (*outputs, *(str(r.folder) for r in records)))

    def follow(self) -> tuple[Config, list[Problem]]:
        """Return the configuration with these places; code of the run's folder can be imported from then on.

        The problems are inputs that a resume does not find, otherwise `Config.lost`.
        """
        folder = self._import_folder()
        alike = dict[tuple[Keys, str], list[Place]]()
        for place in self._places:
            alike.setdefault((place.keys, place.written), []).append(place)
        for places in alike.values():
            if self._is_followed(places[0]):
                self._follow(places[0], places)
        problems = self._follow_moved() if self._is_resume else []
        if self._is_resume and LOG_DIR[0] in self._values:
            self._replace(LOG_DIR, str(self._records[0].folder), self._recorded_value(LOG_DIR))
        if self._is_resume:
            problems += self._lost.values()
        return self._result(folder), problems

    def _is_followed(self, place: Place) -> bool:
        """True if the configuration still has this value, and did not get it from the command line."""
        table, name, *below = place.keys
        if place.keys == LOG_DIR or (place.keys == ADAPTER_PATH and not self._is_resume):
            return False
        if self._config.origin(f"{table}.{name}").layer is Layer.COMMAND_LINE and not below:
            return False
        if place.keys[:-1] == COMMAND:
            return place.written in inputs.words_of(str(value_at(self._values, COMMAND) or ""))
        return bool(value_at(self._values, place.keys) == place.written)

    def _follow(self, place: Place, same: Sequence[Place]) -> None:
        if place.sort == PATH:
            self._replace(place.keys, place.of_output, place.written)
            return
        here = os.path.abspath(os.path.expanduser(place.written))
        candidates = list(dict.fromkeys(path for each in same for path in each.existing))
        # The original place as the only candidate needs no hash here: a resume compares its content anyway.
        before = self._recorded_digest(place) if candidates != [place.absolute] else ""
        if before:
            looked = [*candidates, *([here] if here not in candidates and is_there(here) else [])]
            found = next((path for path in looked if self._digest(place, path) == before), None)
            found = found or next((path for path in candidates if path == place.absolute), None)
        else:  # unchanged, or a campaign of which nothing has run
            found = next(iter(candidates), None)
        if found:
            self._replace(place.keys, found, place.written)
        else:
            self._lost[".".join(place.keys)] = self._problem(place, candidates, before)

    def _follow_moved(self) -> list[Problem]:
        """Take other values of a resume for the present places of its inputs, where the content is the same."""
        problems = []
        for each in inputs.named_inputs(self._result(""), self._tables, self._plugins):
            before, place = self._recorded_value(each.keys), inputs.local_place(each, self._plugins)
            file = os.path.abspath(f"{each.value.replace('.', os.sep)}.py")
            if not place and each.sort == CODE and os.path.isfile(file):  # a module that is named by dots
                place = file
            if not isinstance(before, str) or before in ("", each.written) or not place or not is_there(place):
                continue
            if each.sort == PATH:
                known = [path for known in self._places if known.keys == each.keys for path in known.candidates]
                if place in known:
                    self._replace(each.keys, place, before)
                continue
            recorded = Place(keys=each.keys, sort=each.sort, written=before, absolute=place, relative="", base="")
            digest, now = self._recorded_digest(recorded), self._digest(recorded, place)
            if digest and digest == now:
                self._replace(each.keys, place, before)
            elif digest and not self._config.resume.anyway:
                where = self._config.place(".".join(each.keys[:2]))
                what = f"{printable(each.value)} differs from the run's {printable(before)}"
                why = f"recorded {digest}, and there it is {now or 'empty'}"
                fix = "give the same content, or insist with --resume-anyway"
                problems.append(Problem(code="resume.input-differs", where=where, what=what, why=why, fix=fix))
        return problems

    def _recorded_value(self, keys: Keys) -> Any:
        """Return the value of the run, or, of a campaign, the value with a recorded place."""
        for record in self._records:
            config = record.manifest.get("config")
            found = value_at(config, keys) if isinstance(config, Mapping) else None
            known = (each.written for each in recorded_places(record.manifest, record.folder) if each.keys == keys)
            if (found := found if isinstance(found, str) else next(known, None)) is not None:
                return found
        return None

    def _recorded_digest(self, place: Place) -> str:
        others = [f"{each.written.rstrip('/')}/" for each in self._places if each.keys != OWN_MODEL]
        kind = place.sort if place.sort in (DATA, CODE) else "model"
        for identity in _identities(self._records):
            if digest := digest_of(_files_of(place, table_of(identity, kind, "files"), others)):
                return digest
        return ""

    def _digest(self, place: Place, path: str) -> str:
        """Return the digest of the input at `path` now."""
        budget, found = Budget(), list[HashedFile]()
        if place.sort == DATA:
            found += hashing.named_files(path, path, self._written_to, budget)
        elif place.sort == CODE:
            found.append(hash_file(path, path, budget))
        elif place.sort == "adapter":
            with suppress(ConfigError):
                found += weights_below(locate_adapter(path), budget, prefix=f"{path}/")
        else:
            folder = Path(self._plugins.locate_model(path) or path)
            found += weights_below(folder, budget, prefix=f"{path}/")
        head = _head(path)
        return digest_of({"" if file.name == path else file.name.removeprefix(head): file.hash for file in found})

    def _problem(self, place: Place, candidates: Sequence[str], before: str) -> Problem:
        first = self._records[0].folder
        mark = RUN_FILE if is_run(self._records[0].folder) else CAMPAIGN_FILE
        where = f"{first / mark} [{place.keys[0]}] {'.'.join(place.keys[1:])}"
        what = f"{printable(place.written)!r}, an input of the run, is gone"
        why = f"looked for {', '.join(place.candidates)}"
        if candidates:
            why = f"{candidates[0]} is another: {self._digest(place, candidates[0])}, recorded {before}"
        table, name, *below = place.keys
        flag = f"{table}.{name}='...' with the whole table" if len(below) > 1 else f"{'.'.join(place.keys)}=PLACE"
        fix = f"give its current path: --set {flag}"
        return Problem(code="run.input-gone", where=printable(where), what=what, why=printable(why), fix=fix)

    def _import_folder(self) -> str:
        """Return the folder of the run's own modules, first on the import path unless it is the current one."""
        places = [recorded_folder(record.manifest, record.folder) for record in self._records]
        known = [path for place in places if place for path in place.candidates if os.path.isdir(path)]
        runs = [os.path.realpath(record.folder) for record in self._records if is_run(record.folder)]
        # A run starts outside its folder: code that lies in one was put there by whoever made the record.
        known = [path for path in known if not any(Path(path).resolve().is_relative_to(run) for run in runs)]
        here = os.getcwd()
        folders = list(dict.fromkeys((*known, here)))
        code = self._code([place.absolute for place in places if place]) if len(folders) > 1 else {}
        there = [place.absolute for place in places if place and place.absolute in known]
        hashed = (
            (folder, all(hash_file(x, os.path.join(folder, x), Budget()).hash == code[x] for x in code))
            for folder in folders
        )
        chosen = next((folder for folder, is_same in hashed if code and is_same), "")
        chosen = chosen or next(iter([*there, *(known if not code else ()), here]))
        if os.path.realpath(chosen) != os.path.realpath(here):
            # The current folder moves to the end, for names such as a part that only the command line names.
            rest = [path for path in sys.path if path not in ("", here, chosen)]
            sys.path[:] = [*rest, chosen, here] if sys.flags.safe_path else [chosen, *rest, here]
        return chosen

    def _code(self, folders: Sequence[str]) -> dict[str, str]:
        """Return the hashes of the run's modules in the folder where it was started, by name."""
        for identity in _identities(self._records):
            files = table_of(identity, CODE, "files")
            paths = {name: table_of(files, name).get("path") for name in files}
            inside = [name for name in files if paths[name] in [os.path.join(each, name) for each in folders]]
            own = {name: str(table_of(files, name).get("hash", "")) for name in inside}
            if own:
                return own
        return {}

    def _replace(self, keys: Keys, place: str, written: Any) -> None:
        table, name = keys[:2]
        path = f"{table}.{name}"
        # A table may have several paths: its first replacement keeps the user's text of all of them.
        self._written.setdefault(path, copy.deepcopy(self._values[table].get(name)))
        if keys[:-1] == COMMAND:
            command = value_at(self._values, COMMAND)
            words = [place if word == written else word for word in inputs.words_of(command)]
            _set(self._values, COMMAND, shlex.join(words))
            return
        _set(self._values, keys, place)
        if len(keys) == 2 and written is not None:
            self._written[path] = written
        elif written is not None:
            _set(self._written[path], keys[2:], written)

    def _result(self, folder: str) -> Config:
        tables = dict(self._config.tables)
        for path in self._written:
            table, _, name = path.partition(".")
            fields = {info.alias or field: field for field, info in type(tables[table]).model_fields.items()}
            tables[table] = tables[table].model_copy(update={fields[name]: self._values[table][name]})
        return replace(self._config, tables=tables, written=dict(self._written), folder=folder, lost=dict(self._lost))


def digest_of(files: Mapping[str, str]) -> str:
    """Return one digest of files by name; of a single file, its own hash. Empty without files."""
    if not files or not all(files.values()):
        return ""
    if len(files) == 1:
        return next(iter(files.values()))
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return new_digest(text.encode("utf-8", "surrogateescape")).hexdigest()


def _files_of(place: Place, files: Mapping[str, Any], others: Sequence[str]) -> dict[str, str]:
    """Return the hashes of the files of an identity that belong to a place, by their name below it."""
    hashes = {name: str(table_of(files, name).get("hash", "")) for name in files}
    if place.keys == OWN_MODEL:
        return {name: digest for name, digest in hashes.items() if not name.startswith(tuple(others))}
    written = hashing.code_name(place.written) if place.sort == CODE else place.written
    if written in hashes:
        return {"": hashes[written]}
    head, pattern = _head(written), written.replace("**/", "*") if glob.has_magic(written) else "*"
    below = ((name, digest) for name, digest in hashes.items() if name.startswith(head) and fnmatch(name, pattern))
    return {name.removeprefix(head): digest for name, digest in below}


def _head(path: str) -> str:
    """Return the prefix of the names of files below a folder, or of those that a pattern matches."""
    fixed = fixed_part(path).rstrip("/")
    return f"{fixed}/" if fixed or path.startswith("/") else ""


def _set(values: Any, keys: Keys, text: str) -> None:
    *parents, last = keys
    within = value_at(values, tuple(parents))
    if isinstance(within, list):
        within[int(last)] = text
    else:
        within[last] = text
