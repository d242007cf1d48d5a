"""Looks at results: each comparison and its choices, recorded once, counted, and put in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.records.files import seal_of
from retrain.records.reading import Record
from retrain.text.amounts import counted
from retrain.text.secrets import hide
from retrain.verdicts.ledger.chain import as_recorded
from retrain.verdicts.ledger.history import History

LOOK, VERDICT = "look", "verdict"
UNRECORDED = "this look is not on record: {}"
OF_THE_LINE = frozenset({"time", "kind", "previous", "sha256", "healed"})
CHOICES = ("metric", "direction", "alpha", "baseline", "align", "at", "last", "all_pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look: `seeds` are those compared, by condition; `data` is the hash of the records that were read.

    A look at a campaign that had not ended, by another command than `compare`, has its name in `by`, and no choices.
    """

    metric: str
    seeds: Mapping[str, tuple[int, ...]]
    choices: Mapping[str, Any]
    data: str
    by: str = ""

    @property
    def num_seeds(self) -> int:
        """Seeds of the condition with the fewest: the most that a test over seeds could use."""
        return min((len(seeds) for seeds in self.seeds.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Looks at the runs of one campaign, or at the same runs, in the order in which they were taken.

    The same choices on the same records are one look. `registered_in` is the file of the plan, empty without one.
    """

    looks: tuple[Look, ...] = ()
    registered_in: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.metric for each in self.looks if not each.by))

    @property
    def num_choices(self) -> int:
        chosen = [each.choices.items() for each in self.looks if not each.by]
        return len({tuple(sorted((name, str(value)) for name, value in each)) for each in chosen})


def looks_in(history: History, *, campaigns: Collection[str] = (), runs: Collection[str] = (), data: str = "") -> Looks:
    """Return looks at a campaign, by any name of its folder, at any of these runs, or at records with this hash.

    The last finds looks at a folder that was renamed since.
    """
    wanted = set(runs)
    found = [
        each
        for each in history.looks
        if each.get("campaign", "") in campaigns
        or (data and each.get("data") == data)
        or not wanted.isdisjoint(_list(each.get("runs")))
    ]
    distinct: dict[str, Look] = {}
    for each in found:
        given = each.get("seeds")
        look = Look(
            metric=str(each.get("metric", "")),
            seeds={label: tuple(_list(seeds)) for label, seeds in (given if isinstance(given, dict) else {}).items()},
            choices={name: each.get(name) for name in CHOICES},
            data=str(each.get("data", "")),
            by=str(each.get("by", "")),
        )
        seen = {"by": look.by, "seeds": look.seeds} if look.by else {"data": look.data}
        distinct.setdefault(seal_of({**look.choices, **seen}), look)
    return Looks(looks=tuple(distinct.values()))


def is_on_record(events: Sequence[Record], fields: Mapping[str, Any]) -> bool:
    """True if an event with just these fields was recorded before."""
    wanted = seal_of(as_recorded(hide(fields)))
    return any(seal_of({n: value for n, value in each.items() if n not in OF_THE_LINE}) == wanted for each in events)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def looks_sentence(looks: Looks | None) -> str:
    """Return `3 looks, at 2 metrics, with 3 choices of ...`; empty without a ledger."""
    if looks is None:
        return ""
    metrics, choices = len(looks.metrics), looks.num_choices
    parts = [counted(len(looks.looks), "look")]
    parts += [f"at {metrics} metrics"] if metrics > 1 else []
    parts += [f"with {choices} choices of metric, side, alpha, baseline and budget"] if choices > metrics else []
    plan = f"; plan registered in {looks.registered_in}" if looks.registered_in else ""
    return ", ".join(parts) + plan
