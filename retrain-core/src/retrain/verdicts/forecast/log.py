"""Forecasts and outcomes, in `forecasts.jsonl` next to the ledger, and the withdrawal of forecasts that fail.

Every forecast is a line. Once its run has ended, another records the rate and whether the interval held. The first
forecast of each run counts. Forecasts of a level are withdrawn by a test that holds at all times together: if the
promise is true, the chance that they are ever withdrawn is at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import JsonLines
from retrain.records.reading import Record, damaged, read_records
from retrain.verdicts.forecast.past import Curve, read_curve
from retrain.verdicts.ledger.place import name_in
from retrain.verdicts.stats.conformal import Forecast

FILE = "forecasts.jsonl"
SAID, CAME_TRUE = "forecast", "came_true"
WRONGLY_WITHDRAWN = 0.05
_ABOUT = (("run", str), ("started", str), ("step", int), ("level", float))
NEEDED: Mapping[str, tuple[tuple[str, type], ...]] = {
    SAID: (*_ABOUT, ("low", float), ("high", float)),
    CAME_TRUE: (*_ABOUT, ("held", bool)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The record of the forecasts of one level: the intervals that held, of those whose run has ended."""

    level: float
    held: int
    ended: int

    @property
    def is_withdrawn(self) -> bool:
        """True if so few held that forecasts of this level are no longer given."""
        return evidence_against(self.held, self.ended, self.level) >= 1.0 / WRONGLY_WITHDRAWN


def evidence_against(held: int, ended: int, level: float) -> float:
    """Return the likelihood of `held` of `ended` under chances spread evenly below `level`, over that at `level`.

    A nonnegative martingale if each holds with chance `level`: the chance that it ever reaches 20 is at most 1 / 20
    (Ville). A one-sided binomial test after every run would withdraw true forecasts twice as often as it says.
    """
    from scipy.special import betainc, betaln

    missed = ended - held
    spread = betaln(held + 1, missed + 1) + math.log(float(betainc(held + 1, missed + 1, level)) / level)
    return math.exp(min(700.0, spread - held * math.log(level) - missed * math.log1p(-level)))


def settle(home: Path) -> None:
    """Append the outcome of every forecast run that has ended since; a run that is gone stays open."""
    records = _read(home)
    known = {_key(record) for record in records if record.get("event") == CAME_TRUE}
    new = []
    for said in records:
        if said.get("event") != SAID or _key(said) in known:
            continue
        final = _final(home / str(said["run"]), str(said["started"]))
        if final is not None:
            held = said["low"] <= final <= said["high"]
            kept = {name: said[name] for name in ("run", "started", "step", "level")}
            new.append({"event": CAME_TRUE, "time": _now(), **kept, "rate": final, "held": held})
            known.add(_key(said))
    _append(home, new)


def track(home: Path, level: float) -> Track:
    """Return the record of the forecasts of this level: of each run the first one counts."""
    firsts: dict[tuple[str, str], bool] = {}
    ended = [r for r in _read(home) if r.get("event") == CAME_TRUE and r.get("level") == level]
    for record in sorted(ended, key=lambda record: int(record["step"])):
        firsts.setdefault((str(record["run"]), str(record["started"])), bool(record["held"]))
    return Track(level=level, held=sum(firsts.values()), ended=len(firsts))


def note(home: Path, run: Curve, said: Forecast, *, conditions: int, runs: int) -> None:
    record = {
        "event": SAID,
        "time": _now(),
        "run": name_in(home, run.folder),
        "started": str(run.record.get("started")),
        "step": run.steps[-1],
        **asdict(said),
        "conditions": conditions,
        "runs": runs,
    }
    if not any(each.get("event") == SAID and _key(each) == _key(record) for each in _read(home)):
        _append(home, [record])


def _final(run: Path, started: str) -> float | None:
    with suppress(ConfigError):
        curve = read_curve(run)
        if curve.is_done and str(curve.record.get("started")) == started:
            return float(curve.rates_K[-1])
    return None


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("run", "started", "step", "level"))


def _read(home: Path) -> list[Record]:
    file = home / FILE
    found = []
    for number, record in read_records(file) if file.is_file() else ():
        needed = NEEDED.get(str(record.get("event")), ())
        if not all(isinstance(record.get(name), kind) for name, kind in needed):
            raise damaged(f"{file}:{number}", "the line is no forecast, nor what came true")
        found.append(record)
    return found


def _append(home: Path, records: Sequence[Mapping[str, Any]]) -> None:
    if records:
        with closing(JsonLines(home / FILE)) as lines:
            lines.write(list(records))
            lines.sync()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
