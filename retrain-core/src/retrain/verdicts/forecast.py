"""`retrain status RUN --forecast`: the last held-out rate of a run, with an interval that finished runs calibrate.

It learns from finished runs of the same model, data, evaluation and number of steps. Forecasts and outcomes are lines
of `forecasts.jsonl` next to the ledger; the first forecast of each run counts. Forecasts of a level are withdrawn by a
test that holds at all times together: if the promise is true, the chance of ever withdrawing them is at most 5 %.

Nothing that trains or runs a campaign reads it, so no planned run is ever stopped by a forecast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Floats
from retrain.records.files import JsonLines
from retrain.records.reading import Record, damaged, read_records, table_of, time_now
from retrain.records.record_names import METRICS
from retrain.records.run import Run, SettingsKey, is_run, settings_key
from retrain.records.runs.campaign_status import scan
from retrain.records.runs.curves import HELD_OUT, shown, shown_difference
from retrain.records.runs.run_status import DONE, status_of_run
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger.chain import ledger_folder, name_in
from retrain.verdicts.ledger.looks import InterimLooks
from retrain.verdicts.stats.conformal import Forecast, forecast, left_out, needed_conditions

SAME_TABLES = ("data", "environment", "reward", "eval")
SAME_KEYS = (("model", "model"), ("training", "max_steps"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """The held-out rates of a run, by the number of finished steps; 0 is before training."""

    folder: Path
    record: Mapping[str, Any]
    state: str
    steps: tuple[int, ...]
    rates_K: Floats

    @property
    def max_steps(self) -> int:
        return int(table_of(self.record, "config", "training").get("max_steps", 0))

    @property
    def is_done(self) -> bool:
        """True if it has ended as planned, with an evaluation after its last step."""
        return self.state == DONE and bool(self.steps) and self.steps[-1] == self.max_steps

    @property
    def condition(self) -> SettingsKey:
        return settings_key(self.record)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """N finished runs at the evaluations of the forecast run, and their last rates; `others` do not match it."""

    curves_NK: Floats
    finals_N: Floats
    conditions: tuple[SettingsKey, ...]
    others: int


def read_curve(run: Path) -> Curve:
    """Return the held-out rates of a run so far; ConfigError when the folder is no run, or damaged."""
    if not is_run(run):
        what, fix = "is not a run (run.json)" if run.is_dir() else "no such folder", "`retrain status` lists runs"
        raise ConfigError(Problem(code="forecast.no-such-run", where=str(run), what=what, fix=fix))
    record = Run(run).manifest
    curves = Run(run).curves({HELD_OUT.field}) if Run(run).has(METRICS) else None
    rates_R = curves.column(HELD_OUT.field) if curves else np.zeros(0)
    is_rate_R = np.isfinite(rates_R)
    steps = tuple(int(step) + 1 for step in curves.steps_R[is_rate_R]) if curves else ()
    return Curve(folder=run, record=record, state=status_of_run(run).state, steps=steps, rates_K=rates_R[is_rate_R])


def find_past(run: Curve, among: Path) -> Past:
    """Return every usable finished run below `among` but the run itself; unreadable ones are skipped."""
    overview = scan(among)
    statuses = [*overview.runs, *(each.status for one in overview.campaigns for each in one.runs if each.status)]
    done = dict.fromkeys(status.path for status in statuses if status.state == DONE)
    folders = [folder for folder in done if folder.resolve() != run.folder.resolve()]
    used: list[Curve] = []
    for folder in folders:
        with suppress(ConfigError):
            each = read_curve(folder)
            is_same = each.is_done and task_of(each.record) == task_of(run.record)
            used += [each] if is_same and each.steps[: len(run.steps)] == run.steps else []
    return Past(
        curves_NK=np.array([each.rates_K[: len(run.steps)] for each in used]).reshape(len(used), len(run.steps)),
        finals_N=np.array([float(each.rates_K[-1]) for each in used]),
        conditions=tuple(each.condition for each in used),
        others=len(folders) - len(used),
    )


def task_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the settings that two runs must share: model, data, reward, evaluation, number of steps."""
    keys = tuple(table_of(record, "config", table).get(key) for table, key in SAME_KEYS)
    return (*keys, *(table_of(record, "config", table) for table in SAME_TABLES))


FILE = "forecasts.jsonl"
SAID, CAME_TRUE = "forecast", "came_true"
WRONGLY_WITHDRAWN = 0.05
ABOUT: Mapping[str, type] = {"run": str, "started": str, "step": int, "level": float}
NEEDED = {SAID: {**ABOUT, "low": float, "high": float}, CAME_TRUE: {**ABOUT, "held": bool}}


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
    # In logarithms, and cut at e^700: the ratio itself overflows a float after a few hundred runs.
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
        with suppress(ConfigError):
            curve = read_curve(home / str(said["run"]))
            if curve.is_done and str(curve.record.get("started")) == str(said["started"]):
                final, kept = float(curve.rates_K[-1]), {name: said[name] for name in ABOUT}
                held = said["low"] <= final <= said["high"]
                new.append({"event": CAME_TRUE, "time": time_now(), **kept, "rate": final, "held": held})
                known.add(_key(said))
    _append(home, new)


def track(home: Path, level: float) -> Track:
    """Return the record of the forecasts of this level: of each run the first one counts."""
    firsts: dict[tuple[str, str], bool] = {}
    ended = [r for r in _read(home) if r.get("event") == CAME_TRUE and r.get("level") == level]
    for record in sorted(ended, key=lambda record: int(record["step"])):
        firsts.setdefault((str(record["run"]), str(record["started"])), bool(record["held"]))
    return Track(level=level, held=sum(firsts.values()), ended=len(firsts))


def note(home: Path, run: Curve, said: Forecast, counts: Mapping[str, int]) -> None:
    # Only the first forecast of a run at a step is noted: repeating one until it looks good must not count.
    about = {"run": name_in(home, run.folder), "started": str(run.record.get("started")), "step": run.steps[-1]}
    record = {"event": SAID, "time": time_now(), **about, **asdict(said), **counts}
    if not any(each.get("event") == SAID and _key(each) == _key(record) for each in _read(home)):
        _append(home, [record])


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(record.get, ABOUT))


def _read(home: Path) -> list[Record]:
    file = home / FILE
    found = []
    for number, record in read_records(file) if file.is_file() else ():
        needed = NEEDED.get(str(record.get("event")), {})
        if not all(isinstance(record.get(name), kind) for name, kind in needed.items()):
            raise damaged(f"{file}:{number}", "the line is neither a forecast nor its outcome")
        found.append(record)
    return found


def _append(home: Path, records: Sequence[Mapping[str, Any]]) -> None:
    if records:
        with closing(JsonLines(home / FILE)) as lines:
            lines.write(list(records))
            lines.sync()


def print_forecast(run: Path, among: Path | None, level: float, *, as_json: bool) -> None:
    """Forecast the last held-out rate of `run` from finished runs of the same model, data and number of steps."""
    curve, home = read_curve(run), ledger_folder(run)
    InterimLooks("status --forecast").at([run])
    settle(home)
    so_far = track(home, level)
    if not curve.steps:
        what = "the run has no evaluation yet"
        fix = "wait for its first evaluation; [eval] examples and every say when that is"
        raise ConfigError(Problem(code="forecast.no-evaluation", where=str(run), what=what, fix=fix))
    data = {"run": str(run), "step": curve.steps[-1], "max_steps": curve.max_steps, "level": level}
    data["track"] = {"held": so_far.held, "ended": so_far.ended}
    if curve.is_done:
        rate = float(curve.rates_K[-1])
        sentences = [f"The run has ended: its held-out rate is {shown(rate, HELD_OUT)}.", *_fared(so_far)]
        _print(data | {"rate": rate}, sentences, as_json=as_json)
        return
    if so_far.is_withdrawn:
        what = f"forecasts of {100 * level:g} % are withdrawn: {so_far.held} of {so_far.ended} intervals held"
        why = f"the chance of so few, if the promise were kept, is {100 * WRONGLY_WITHDRAWN:g} % at most"
        fix = "these runs differ from those before them; forecast from other runs, in a separate folder"
        raise ConfigError(Problem(code="forecast.withdrawn", where=str(home / FILE), what=what, why=why, fix=fix))
    past = find_past(curve, among or home)
    needed, known = needed_conditions(level), len(set(past.conditions))
    if known < max(2, needed):
        what = f"{known} conditions have finished runs of this model, data, evaluation and number of steps"
        why = f"a {100 * level:g} % interval needs {needed}; {past.others} finished runs do not match"
        fix = f"finish runs of {needed - known} more conditions, lower --level, or name other runs: --among FOLDER"
        where = str(among or home)
        raise ConfigError(Problem(code="forecast.too-few-conditions", where=where, what=what, why=why, fix=fix))
    said = within_range(forecast(past.curves_NK, past.finals_N, past.conditions, curve.rates_K, level=level))
    counts = {"conditions": known, "runs": len(past.finals_N)}
    note(home, curve, said, counts)
    check = checked(past, level)
    counts["same_condition"] = past.conditions.count(curve.condition)
    found = {"point": said.point, "interval": [said.low, said.high], "check": check}
    sentences = forecast_sentences(curve, past, said, check, so_far)
    _print({**data, **found, **counts, "rate": None}, sentences, as_json=as_json)


def _print(data: dict[str, Any], sentences: list[str], *, as_json: bool) -> None:
    for line in [json.dumps(data, indent=2, allow_nan=False)] if as_json else map(printable, sentences):
        click.echo(line)


def within_range(said: Forecast) -> Forecast:
    """Cut the forecast of a rate to [0, 1]; that costs no coverage."""
    point, low, high = (min(1.0, max(0.0, value)) for value in (said.point, said.low, said.high))
    return replace(said, point=point, low=low, high=high)


def checked(past: Past, level: float) -> dict[str, float] | None:
    """Forecast every past run from the other conditions; None when those are too few for a finite interval."""
    if len(set(past.conditions)) <= needed_conditions(level):
        return None
    found = [within_range(each) for each in left_out(past.curves_NK, past.finals_N, past.conditions, level=level)]
    held = sum(bool(each.low <= final <= each.high) for each, final in zip(found, past.finals_N, strict=True))
    return {"held": held, "runs": len(found), "mean_width": float(np.mean([each.high - each.low for each in found]))}


def forecast_sentences(
    run: Curve, past: Past, said: Forecast, check: Mapping[str, float] | None, so_far: Track
) -> list[str]:
    percent = f"{100 * said.level:g} %"
    lines = [
        f"Held-out rate after {run.max_steps} steps, forecast after {run.steps[-1]}: {shown(said.point, HELD_OUT)} "
        f"({percent} interval {shown(said.low, HELD_OUT)} to {shown(said.high, HELD_OUT)})",
        f"From {len(past.finals_N)} finished runs of {len(set(past.conditions))} conditions with the same model, data, "
        "evaluation and number of steps; the interval holds for a condition that is like those.",
    ]
    if same := past.conditions.count(run.condition):
        lines.append(f"{same} of them have this run's settings: for another seed of those the interval is too wide.")
    if check:
        held, width = check["held"], shown_difference(check["mean_width"], HELD_OUT, signed=False)
        lines.append(
            f"Had each of those runs been forecast from the other conditions, {held} of {check['runs']} intervals "
            f"would have held, at a mean width of {width}."
        )
    lines += _fared(so_far)
    lines.append("It stops nothing: a planned run continues to its end, since a verdict needs every run.")
    return lines


def _fared(so_far: Track) -> list[str]:
    told = f"Of {so_far.ended} runs forecast here that have ended, the interval held for {so_far.held}."
    return [told] if so_far.ended else []
