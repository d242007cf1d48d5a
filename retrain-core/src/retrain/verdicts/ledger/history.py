"""What a ledger says: campaigns, runs, looks and verdicts, gathered in one pass over its lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from retrain.records.reading import Record
from retrain.verdicts.ledger.chain import FIRST, NAME, read_chain
from retrain.verdicts.ledger.place import RUNS

Cell = tuple[str, str]  # a run by its folder and the time at which it began; going on from a checkpoint keeps it
Identity = tuple[str, str, str]  # start time, condition and seed: a copied, moved or renamed folder keeps them
Setup = tuple[str, str, str]  # condition, seed and a hash of the settings that decide what is learned


@dataclass(slots=True, kw_only=True)
class RunHistory:
    """What is on record about a run from its first step on: by its first event, and its end unless it goes on.

    `opening` counts the campaigns that had begun in its folder by then: another one may have begun there since. `line`
    is the line of its first event.
    """

    name: str
    started: str
    first: Record
    opening: int = 0
    line: int = 0
    ended: Record | None = None

    @property
    def identity(self) -> Identity:
        """Its start time, condition and seed."""
        return self.started, str(self.first.get("condition")), str(self.first.get("seed"))

    @property
    def setup(self) -> Setup:
        """Its condition, seed and settings: two runs that share them are the same experiment."""
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
    def settings(self) -> str:
        """Hash of its settings when it began."""
        hashes = self.first.get("hashes")
        return str(hashes.get("settings", "")) if isinstance(hashes, dict) else ""

    @property
    def hashes(self) -> Mapping[str, str]:
        """Those of its final records; empty while it goes on."""
        found = self.ended.get("hashes") if self.ended else None
        return found if isinstance(found, dict) else {}


@dataclass(slots=True, kw_only=True)
class History:
    """A ledger. `campaigns` has the openings of each campaign's folder, `runs` every run that began, in order.

    An opening has its number in `line`, so that it can be ordered against the runs.

    `faults` are breaks of the chain with their lines, `is_torn` says that a kill cut its last line, `head` is the hash
    of its last line; `has_known_head` says whether the hash that was asked about is that of any line.
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
    _same: dict[Identity, list[RunHistory]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The file that was read."""
        return self.folder / NAME

    def opening(self, campaign: str) -> Record | None:
        """The event with which what is in a campaign's folder now began; None if none is on record."""
        return next((each for each in reversed(self.campaigns.get(campaign, ())) if not each.get("continued")), None)

    def num_openings(self, campaign: str) -> int:
        """How many campaigns began in this folder, one after another."""
        return sum(not each.get("continued") for each in self.campaigns.get(campaign, ()))

    def known(self, name: str, identity: Identity, hashes: Mapping[str, str]) -> RunHistory | None:
        """The run with this start time, condition and seed, whatever its folder is called now; None if there is none.

        Parallel campaigns may begin such runs in one second: then the folder's name decides, or the records' hashes.
        """
        same = self._same.get(identity, ())
        named = (each for each in same if each.name == name)
        alike = (each for each in same if each.hashes == hashes)
        return next(named, None) or next(alike, None) or next(iter(same), None)

    def take(self, record: Record) -> None:
        """Add the next event; one of another version, or damaged, is passed over."""
        match record.get("kind"):
            case "campaign_opened":
                opening = {**record, "line": self.num_lines}
                self.campaigns.setdefault(str(record.get("campaign")), []).append(opening)
            case "run_started" | "run_ended":
                self._take_run(record)
            case "look":
                self.looks.append(record)
            case "verdict":
                self.verdicts.append(record)

    def _take_run(self, record: Record) -> None:
        name, started = str(record.get("run")), str(record.get("started"))
        known = self.runs.get((name, started))
        if known is None:
            run = RunHistory(name=name, started=started, first=record, line=self.num_lines)
            same = self._same.setdefault(run.identity, [])
            if same and (record.get("resumed") or record["kind"] == "run_ended"):
                known = same[-1]  # it continues in a folder that was renamed
            else:
                run.opening = self.num_openings(run.campaign)
                same.append(run)
                known = self.runs[name, started] = run
        known.ended = record if record["kind"] == "run_ended" else None


def read_history(folder: Path, *, known_head: str = "") -> History:
    """The ledger in `folder`, streamed; empty where there is none. ConfigError when it cannot be read."""
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
