"""Reads a ledger: its lines, breaks of their chain, and the campaigns, runs, looks and verdicts on record."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import Record, parse_record, table_of
from retrain.records.record_names import RUN_FILE, RUNS, TUNING
from retrain.verdicts.ledger.chain import FIRST, NAME, SUFFIX, SUFFIX_BYTES, hash_of_line

Cell = tuple[str, str]  # a run by its folder and the time at which it began; a resume keeps it
Identity = tuple[str, str, str]  # start time, condition and seed: a copied, moved or renamed folder keeps them
Setup = tuple[str, str, str]  # condition, seed and a hash of the settings that decide the learning


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the ledger; `fault` says how it breaks the chain, empty if it does not. A torn one has no record."""

    line: int
    record: Record
    sha256: str
    fault: str = ""
    is_torn: bool = False


def read_chain(file: Path) -> Iterator[Entry]:
    """Yield every line with its fault, once: after it the chain continues from the hash that the line states."""
    previous, number = FIRST, 0
    try:
        with open_regular(file) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.endswith(b"\n"):
                    yield Entry(line=number, record={}, sha256=previous, is_torn=True)
                    return
                record: Record = {}
                with suppress(ValueError, RecursionError):
                    record = parse_record(line)
                stated, fault = hash_of_line(line), ""
                if not SUFFIX.fullmatch(line[-SUFFIX_BYTES:]) or not record:
                    fault = "is not a line that retrain writes"
                elif hashlib.sha256(line[:-SUFFIX_BYTES] + b"}").hexdigest() != stated:
                    fault = "was edited: its hash does not match its text"
                elif record.get("previous") != previous:
                    fault = "does not follow the line before: lines were removed, added, repeated or moved"
                yield Entry(line=number, record=record, sha256=stated, fault=fault)
                # The stated hash, not the true one: an edited line is one fault, and not one in each line after it.
                previous = stated
    except FileNotFoundError:
        return
    except OSError as error:
        what, fix = f"cannot be read: {error.strerror or error}", "make it readable, or restore it from a backup"
        raise ConfigError(Problem(code="ledger.unreadable", where=str(file), what=what, fix=fix)) from error


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """The record of a run: its first event and line, its end, and how many campaigns had begun in its folder."""

    name: str
    started: str
    first: Record
    opening: int = 0
    line: int = 0
    ended: Record | None = None

    @property
    def identity(self) -> Identity:
        return self.started, str(self.first.get("condition")), str(self.first.get("seed"))

    @property
    def setup(self) -> Setup:
        """Two runs with the same setup are the same experiment."""
        return *self.identity[1:], str(self.first.get("learns", ""))

    @property
    def campaign(self) -> str:
        """The campaign in whose folder it began; empty for a single run."""
        return self.name.rpartition(f"/{RUNS}/")[0]

    @property
    def state(self) -> str:
        """`done`, `stopped`, `failed`, or `running` when no end is on record since it last began."""
        return str(self.ended.get("state")) if self.ended else "running"

    @property
    def hashes(self) -> Mapping[str, str]:
        return table_of(self.ended or {}, "hashes")


@dataclass(slots=True, kw_only=True)
class History:
    """A ledger: campaign openings with their `line`, every run that began, looks and verdicts.

    `faults` are breaks of the chain, `is_torn`: a kill cut the last line; `has_known_head`: a line has the expected
    hash.
    """

    folder: Path
    since: str = ""
    head: str = FIRST
    num_lines: int = 0
    is_torn: bool = False
    has_known_head: bool = False
    faults: list[str] = field(default_factory=list)
    campaigns: dict[str, list[Record]] = field(default_factory=dict)
    runs: dict[Cell, RunHistory] = field(default_factory=dict)
    looks: list[Record] = field(default_factory=list)
    verdicts: list[Record] = field(default_factory=list)
    tunings: dict[str, Record] = field(default_factory=dict)  # the last one of a campaign, with its `line`
    _same: dict[Identity, list[RunHistory]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.folder / NAME

    def openings(self, campaign: str) -> list[Record]:
        """Return the events with which the campaigns in this folder began, in order."""
        return [each for each in self.campaigns.get(campaign, ()) if not each.get("continued")]

    def known(self, name: str, identity: Identity, hashes: Mapping[str, str]) -> RunHistory | None:
        """Return the run with this start time, condition and seed, of several by its name or hashes."""
        same = self._same.get(identity, ())
        named = (each for each in same if each.name == name)
        alike = (each for each in same if each.hashes == hashes)
        return next(named, None) or next(alike, None) or next(iter(same), None)

    def take(self, record: Record) -> None:
        """Add the next event; one of another version, or damaged, is skipped."""
        match record.get("kind"):
            case "campaign_opened":
                opening = {**record, "line": self.num_lines}
                self.campaigns.setdefault(str(record.get("campaign")), []).append(opening)
            case "run_started" | "run_ended":
                name, started = str(record.get("run")), str(record.get("started"))
                known = self.runs.get((name, started))
                if known is None:
                    run = RunHistory(name=name, started=started, first=record, line=self.num_lines)
                    same = self._same.setdefault(run.identity, [])
                    if same and (record.get("resumed") or record["kind"] == "run_ended"):
                        known = same[-1]  # it continues in a folder that was renamed
                    else:
                        run.opening = len(self.openings(run.campaign))
                        same.append(run)
                        known = self.runs[name, started] = run
                known.ended = record if record["kind"] == "run_ended" else None
            case "tuned":
                self.tunings[str(record.get("campaign"))] = {**record, "line": self.num_lines}
            case "look":
                self.looks.append(record)
            case "verdict":
                self.verdicts.append(record)


def read_history(folder: Path, *, known_head: str = "") -> History:
    """Return the ledger in `folder`, empty if it does not exist. ConfigError when it cannot be read."""
    found = History(folder=folder)
    for entry in read_chain(folder / NAME):
        if entry.is_torn:
            found.is_torn = True
            break
        found.num_lines, found.head = entry.line, entry.sha256
        found.since = found.since or str(entry.record.get("time", ""))
        found.has_known_head |= entry.sha256 == known_head
        if entry.fault:
            found.faults.append(f"line {entry.line} {entry.fault}")
        found.take(entry.record)
    return found


def folders_below(folder: Path) -> Iterator[Path]:
    """Yield the runs that the ledger in `folder` covers: `RUN`, `CAMPAIGN/runs/RUN` and those of its tuning."""
    for pattern in (f"*/{RUN_FILE}", f"*/{RUNS}/*/{RUN_FILE}", f"*/{TUNING}/{RUNS}/*/{RUN_FILE}"):
        yield from (file.parent for file in sorted(folder.glob(pattern)))
