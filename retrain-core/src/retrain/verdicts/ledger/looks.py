"""Looks at results, by `compare` or any command that shows an unfinished campaign: recorded once, counted, worded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from retrain.kernel.config.toml_file import open_regular
from retrain.records.files import seal_of
from retrain.records.reading import Record, parse_record, read_if_any, table_of
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.records.run import is_run
from retrain.records.runs.campaign_status import CampaignStatus, read_campaign
from retrain.records.runs.run_status import DONE
from retrain.text.secrets import hide
from retrain.verdicts.ledger.chain import NAME, append, ledger_folder, name_in, plain_data
from retrain.verdicts.ledger.history import History

LOOK, VERDICT = "look", "verdict"
UNRECORDED = "this look is not on record: {}"
OF_THE_LINE = frozenset({"time", "kind", "previous", "sha256", "healed"})
CHOICES = ("metric", "direction", "alpha", "baseline", "align", "at", "last", "all_pairs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look: seeds by condition and the hash of its `data`; `by` another command than `compare`, without choices."""

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
    """Distinct looks at the runs of one campaign, or at the same runs, in order; `registered_in` is the plan's file."""

    looks: tuple[Look, ...] = ()
    registered_in: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.metric for each in self.looks if not each.by))

    @property
    def num_choices(self) -> int:
        chosen = [each.choices.items() for each in self.looks if not each.by]
        return len({tuple((name, str(value)) for name, value in each) for each in chosen})


def looks_in(history: History, *, campaigns: Collection[str] = (), runs: Collection[str] = (), data: str = "") -> Looks:
    """Return looks at a campaign, by any name of its folder, at any of these runs, or at records with this hash."""
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
        look = Look(
            metric=str(each.get("metric", "")),
            seeds={label: tuple(_list(seeds)) for label, seeds in table_of(each, "seeds").items()},
            choices={name: each.get(name) for name in CHOICES},
            data=str(each.get("data", "")),
            by=str(each.get("by", "")),
        )
        seen = {"by": look.by, "seeds": look.seeds} if look.by else {"data": look.data}
        distinct.setdefault(seal_of({**look.choices, **seen}), look)
    return Looks(looks=tuple(distinct.values()))


def is_on_record(events: Sequence[Record], fields: Mapping[str, Any]) -> bool:
    """True if an event with just these fields was recorded before."""
    wanted = seal_of(plain_data(hide(fields)))
    return any(seal_of({n: value for n, value in each.items() if n not in OF_THE_LINE}) == wanted for each in events)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# From a file in a checkpoint up to its campaign: FILE, checkpoint, adapter, run, runs.
LEVELS = 5
TO_STDERR = partial(click.echo, err=True)


class InterimLooks:
    """Records unfinished campaigns shown by one command, `by`; `say` gets a line where that cannot be written."""

    def __init__(self, by: str, say: Callable[[str], object] = TO_STDERR) -> None:
        self._by, self._say = by, say
        self._known: list[dict[str, Any]] = []

    def at(self, paths: Iterable[Path]) -> None:
        """Record that the command shows these campaigns, runs or checkpoints."""
        for folder in dict.fromkeys(each for path in paths if (each := campaign_of(path))):
            # A campaign whose manifest says that every run is done need not be read.
            if read_if_any(folder / CAMPAIGN_FILE).get("status") != DONE and (status := read_campaign(folder)):
                self.of(status)

    def of(self, campaign: CampaignStatus) -> None:
        """Record that the command shows this campaign; nothing for one that is done, or has no step."""
        if campaign.state == DONE or not any(run.status and run.status.step for run in campaign.runs):
            return
        ended = [run for run in campaign.runs if run.seed is not None and run.status and run.status.state == DONE]
        done = {label: [run.seed for run in ended if run.condition == label] for label in campaign.conditions}
        folder = ledger_folder(campaign.path)
        look = {"campaign": name_in(folder, campaign.path), "by": self._by, "seeds": done}
        if look in self._known:
            return
        self._known.append(look)
        mark, looks = f'"kind": "{LOOK}"'.encode(), []
        with suppress(OSError, ValueError, RecursionError), open_regular(folder / NAME) as stream:
            looks = [parse_record(line) for line in stream if mark in line and line.endswith(b"\n")]
        if not is_on_record(looks, look) and (reason := append(folder, LOOK, **look)):
            self._say(f"note: {UNRECORDED.format(reason)}")


def campaign_of(path: Path) -> Path | None:
    """Return the campaign that a path is, or lies in; None without one."""
    full = path.expanduser().resolve()
    for folder in (full, *full.parents[:LEVELS]):
        if (folder / CAMPAIGN_FILE).is_file() and not is_run(folder):
            return folder
    return None
