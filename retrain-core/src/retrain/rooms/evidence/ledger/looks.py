"""Looks at results: what was compared, with which choices, recorded once each and counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.rooms.evidence.ledger.chain import as_recorded
from retrain.rooms.evidence.ledger.history import History
from retrain.rooms.session.records.reading import Record
from retrain.rooms.session.records.seal import seal_of

LOOK, VERDICT = "look", "verdict"
OF_THE_LINE = frozenset({"time", "kind", "previous", "sha256", "healed"})
CHOICES = ("metric", "direction", "alpha", "baseline", "align", "at", "last", "all_pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look: `seeds` are those compared, by condition; `data` is the hash of the records that were read."""

    time: str
    metric: str
    seeds: Mapping[str, tuple[int, ...]]
    choices: Mapping[str, Any]
    data: str

    @property
    def num_seeds(self) -> int:
        """Seeds of the condition with the fewest; what a test over seeds could use at most."""
        return min((len(seeds) for seeds in self.seeds.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Looks at the runs of one campaign, or at the same runs, in the order in which they were taken."""

    looks: tuple[Look, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics looked at, in order."""
        return tuple(dict.fromkeys(each.metric for each in self.looks))

    @property
    def num_choices(self) -> int:
        """Distinct choices of metric, side, alpha, baseline, budget and smoothing."""
        return len({tuple(sorted((name, str(value)) for name, value in each.choices.items())) for each in self.looks})


def looks_in(history: History, *, campaign: str = "", runs: Sequence[str] = (), data: str = "") -> Looks:
    """Looks on record at a campaign, at any of these runs, as the ledger names them, or at records with this hash.

    The last finds looks at a folder that was renamed since. The same choices on the same records are one look.
    """
    wanted = set(runs)
    found = [
        each
        for each in history.looks
        if (campaign and each.get("campaign") == campaign)
        or (data and each.get("data") == data)
        or not wanted.isdisjoint(_list(each.get("runs")))
    ]
    distinct: dict[str, Look] = {}
    for look in map(_look, found):
        distinct.setdefault(seal_of({**look.choices, "data": look.data}), look)
    return Looks(looks=tuple(distinct.values()))


def is_on_record(events: Sequence[Record], fields: Mapping[str, Any]) -> bool:
    """Whether an event with just these fields was recorded before."""
    wanted = seal_of(as_recorded(fields))
    return any(seal_of({n: value for n, value in each.items() if n not in OF_THE_LINE}) == wanted for each in events)


def _look(record: Record) -> Look:
    seeds = record.get("seeds")
    return Look(
        time=str(record.get("time", "")),
        metric=str(record.get("metric", "")),
        seeds={name: tuple(_list(each)) for name, each in (seeds if isinstance(seeds, dict) else {}).items()},
        choices={name: record.get(name) for name in CHOICES},
        data=str(record.get("data", "")),
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
