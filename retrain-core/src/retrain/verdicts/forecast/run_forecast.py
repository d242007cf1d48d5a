"""`retrain status RUN --forecast`: the last held-out rate of a run, with an interval that finished runs calibrate.

Nothing that trains or runs a campaign reads it, so no planned run is ever stopped by a forecast.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.runs.metric import HELD_OUT, shown, shown_difference
from retrain.text.terminal_text import printable
from retrain.verdicts.forecast.log import WRONGLY_WITHDRAWN, Track, note, settle, track
from retrain.verdicts.forecast.past import Curve, Past, find_past, read_curve
from retrain.verdicts.ledger.interim import InterimLooks
from retrain.verdicts.ledger.place import ledger_folder
from retrain.verdicts.stats.conformal import Forecast, forecast, left_out, needed_conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Forecasts of the past runs themselves, each from the runs of all other conditions."""

    held: int
    runs: int
    mean_width: float


def print_forecast(run: Path, among: Path | None, level: float, *, as_json: bool) -> None:
    """Forecast the last held-out rate of `run` from finished runs of the same model, data and number of steps."""
    curve, home = read_curve(run), ledger_folder(run)
    InterimLooks("status --forecast", partial(click.echo, err=True)).at([run])
    settle(home)
    so_far = track(home, level)
    if not curve.steps:
        fix = "wait for its first evaluation; [eval] examples and every say when that is"
        raise ConfigError(Problem(where=str(run), what="the run has no evaluation yet", fix=fix))
    data = {"run": str(run), "step": curve.steps[-1], "max_steps": curve.max_steps, "level": level}
    data["track"] = {"held": so_far.held, "ended": so_far.ended}
    if curve.is_done:
        rate = float(curve.rates_K[-1])
        sentences = [f"The run has ended: its held-out rate is {shown(rate, HELD_OUT)}.", *_fared(so_far)]
        _print(data | {"rate": rate}, sentences, as_json=as_json)
        return
    if so_far.is_withdrawn:
        raise _withdrawn(so_far, home)
    past = find_past(curve, among or home)
    _refuse_few(past, level, among or home)
    said = within_range(forecast(past.curves_NK, past.finals_N, past.conditions, curve.rates_K, level=level))
    note(home, curve, said, conditions=len(set(past.conditions)), runs=len(past.finals_N))
    check = checked(past, level)
    counts = {"runs": len(past.finals_N), "conditions": len(set(past.conditions))}
    counts["same_condition"] = past.conditions.count(curve.condition)
    found = {"point": said.point, "interval": [said.low, said.high], "check": asdict(check) if check else None}
    sentences = forecast_sentences(curve, past, said, check, so_far)
    _print({**data, **found, **counts, "rate": None}, sentences, as_json=as_json)


def _print(data: dict[str, Any], sentences: list[str], *, as_json: bool) -> None:
    for line in [json.dumps(data, indent=2, allow_nan=False)] if as_json else map(printable, sentences):
        click.echo(line)


def within_range(said: Forecast) -> Forecast:
    """Cut the forecast of a rate to [0, 1]; that costs no coverage."""
    point, low, high = (min(1.0, max(0.0, value)) for value in (said.point, said.low, said.high))
    return replace(said, point=point, low=low, high=high)


def checked(past: Past, level: float) -> Check | None:
    """Forecast every past run from the other conditions; None when those are too few for a finite interval."""
    if len(set(past.conditions)) <= needed_conditions(level):
        return None
    found = [within_range(each) for each in left_out(past.curves_NK, past.finals_N, past.conditions, level=level)]
    held = sum(bool(each.low <= final <= each.high) for each, final in zip(found, past.finals_N, strict=True))
    return Check(held=held, runs=len(found), mean_width=float(np.mean([each.high - each.low for each in found])))


def forecast_sentences(run: Curve, past: Past, said: Forecast, check: Check | None, so_far: Track) -> list[str]:
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
        width = shown_difference(check.mean_width, HELD_OUT, signed=False)
        lines.append(
            f"Had each of those runs been forecast from the other conditions, {check.held} of {check.runs} intervals "
            f"would have held, at a mean width of {width}."
        )
    lines += _fared(so_far)
    lines.append("It stops nothing: a planned run goes on to its end, since a verdict needs every run.")
    return lines


def _fared(so_far: Track) -> list[str]:
    told = f"Of {so_far.ended} runs forecast here that have ended, the interval held for {so_far.held}."
    return [told] if so_far.ended else []


def _refuse_few(past: Past, level: float, among: Path) -> None:
    needed, there = needed_conditions(level), len(set(past.conditions))
    if there >= max(2, needed):
        return
    more = f"; {past.others} finished runs are of another task, or were evaluated after other steps"
    what = f"{there} conditions have finished runs of this model, data, evaluation and number of steps"
    what += more if past.others else ""
    why = f"a {100 * level:g} % interval needs {needed}: with fewer it would be everything"
    fix = f"finish runs of {needed - there} more conditions, lower --level, or look elsewhere: --among FOLDER"
    raise ConfigError(Problem(where=str(among), what=what, why=why, fix=fix))


def _withdrawn(so_far: Track, home: Path) -> ConfigError:
    what = f"forecasts of {100 * so_far.level:g} % are withdrawn: {so_far.held} of {so_far.ended} intervals held"
    why = f"if the promise were kept, the chance of ever seeing so few would be {100 * WRONGLY_WITHDRAWN:g} % at most"
    fix = "these runs are not like those before them; forecast from other runs, in a folder of their own"
    return ConfigError(Problem(where=str(home / "forecasts.jsonl"), what=what, why=why, fix=fix))
