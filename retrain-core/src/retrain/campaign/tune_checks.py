"""Checks `[campaign.tune]` before anything heavy is loaded; every problem has its place and its smallest fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from retrain.campaign.conditions import Condition, Names
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import Setting
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.campaign_table import CampaignTable
from retrain.records.reading import number
from retrain.records.runs.curves import EVAL_PREFIX, HELD_OUT, LARGEST, Metric, parse_metric
from retrain.records.tune_table import Range, TuneTable

WORDS = frozenset({"low", "high", "log", "choices"})
Checked = Callable[[Condition], Iterable[Problem]]


def ranges_of(tune: TuneTable, keys: Sequence[Key], place: str) -> tuple[list[Range], list[Problem]]:
    """Return the tuned keys with their values, and the problems of the others."""
    names, found, problems = Names(keys), list[Range](), list[Problem]()
    for name, values in names.flattened(tune.keys):
        where = f"{place} {name}"
        ends = values if isinstance(values, Mapping) else {}
        named = names.find(name, None)
        if isinstance(named, Problem):
            problems.append(replace(named, where=where, what=named.what.replace("condition", "tuning")))
            continue
        key, content = named
        path = f"{key.path}.{next(iter(content))}" if isinstance(content, Mapping) else key.path
        fault = "it measures runs, and trains none" if key.table == "eval" else _fault(ends)
        if any(each.path == path for each in found):
            fault = "it is listed a second time"
        if fault:
            what = f"cannot be searched: {fault}"
            fix = f'write "{name}" = {{ low = 1e-5, high = 1e-3, log = true }}, or {{ choices = [1, 2, 4] }}'
            problems.append(Problem(code="tune.bad-range", where=where, what=what, fix=fix))
            continue
        low, high = ends.get("low", 0), ends.get("high", 0)
        is_whole = type(low) is int and type(high) is int and key.annotation is not float
        choices, is_log = tuple(ends.get("choices", ())), bool(ends.get("log"))
        found.append(Range(path=path, low=low, high=high, is_log=is_log, is_whole=is_whole, choices=choices))
    return found, problems


def _fault(ends: Mapping[str, Any]) -> str:
    """Return the fault of one key's values; empty if there is none."""
    choices = ends.get("choices")
    low: Any = ends.get("low")
    high: Any = ends.get("high")
    if unknown := sorted(ends.keys() - WORDS):
        return f"{', '.join(unknown)}: unknown; low, high, log and choices are known"
    if choices is not None:
        is_list = isinstance(choices, list) and all(isinstance(each, str | int | float | bool) for each in choices)
        if len(ends) > 1:
            return "has choices and a range: keep one of them"
        is_good = is_list and len({repr(each) for each in choices}) == len(choices) > 1
        return "" if is_good else f"choices = {choices!r} are not two different values or more"
    if any(type(each) not in (int, float) or not abs(each) < LARGEST for each in (low, high)):
        return f"low = {low!r} and high = {high!r} are not two numbers"
    if low >= high:
        return f"low = {low!r} is not below high = {high!r}: exchange them"
    if type(ends.get("log", False)) is not bool:
        return f"log = {ends['log']!r} is neither true nor false"
    if ends.get("log") and low <= 0:
        return f"low = {low!r}, and a logarithm needs values above 0: raise low, or remove log = true"
    return ""


def tune_problems(
    config: Config, table: CampaignTable, ranges: Sequence[Range], conditions: Sequence[Condition], checked: Checked
) -> Iterator[Problem]:
    """Yield reasons why this search cannot be run, or could not be believed."""
    tune, place = table.tune, config.place("campaign.tune")
    assert tune is not None, "no [campaign.tune]"

    if find_spec("optuna") is None:
        what, fix = "needs Optuna, which is not installed", "pip install 'retrain-core[tune]'"
        yield Problem(code="tune.no-optuna", where=place, what=what, fix=fix)
    yield from _budget_problems(tune, len(table.seeds), f"{place} runs")
    if shared := sorted({*tune.seeds} & {*table.seeds}):
        fix = f"use others: seeds = [{max((*tune.seeds, *table.seeds)) + 1}]"
        why = "a configuration that was chosen on a seed looks better on it than on others"
        what = f"tuning seed {', '.join(map(str, shared))} is a final seed, too"
        yield Problem(code="tune.final-seed", where=f"{place} seeds", what=what, why=why, fix=fix)
    if not tune.seeds or len({*tune.seeds}) < len(tune.seeds) or min(tune.seeds) < 0:
        what, fix = f"{tune.seeds} are not different seeds, 0 or above", "write seeds = [1, 2]"
        yield Problem(code="tune.bad-seeds", where=f"{place} seeds", what=what, fix=fix)
    if tune.pruner == "halving" and config.optimizer.schedule != "constant":
        what = "halving judges runs in the middle of a learning rate's decay"
        fix = 'remove it, or set [optimizer] schedule = "constant"'
        yield Problem(code="tune.halving-decay", where=f"{place} pruner", what=what, fix=fix)
    try:
        metric = tuning_metric(table)
    except ConfigError as error:
        yield from error.problems
    else:
        sets: dict[str, Any] = config.value("eval.sets", {})
        if any(metric.field.startswith(f"{EVAL_PREFIX}{name}_") for name in sets):
            what, fix = f"{metric} is not measured on the tuning examples", f'write metric = "{HELD_OUT}"'
            yield Problem(code="tune.metric-of-a-set", where=f"{place} metric", what=what, fix=fix)
        if metric.is_eval and not most_held_out(config):
            what, fix = f"{metric} needs held-out examples", "set [eval] examples"
            yield Problem(code="tune.no-examples", where=f"{place} metric", what=what, fix=fix)
    tuned = [each for each in conditions if tuned_ranges(each, ranges)]
    if not tuned and not (tune.keys and not ranges):
        what = "every condition sets the tuned keys itself" if ranges else "names no key"
        fix = 'add one that a condition does not set: "training.lr" = { low = 1e-5, high = 1e-3, log = true }'
        yield Problem(code="tune.no-keys", where=place, what=what, fix=fix)
    for condition in tuned:
        own = tuned_ranges(condition, ranges)
        for index in range(max(len(each.samples) for each in own)):
            settings = [_setting(each, index, place) for each in own]
            yield from checked(replace(condition, settings=(*condition.settings, *settings)))


def _budget_problems(tune: TuneTable, num_seeds: int, where: str) -> Iterator[Problem]:
    choices, size = tune.num_choices(num_seeds), max(1, len(tune.seeds))
    least = 2 * choices * size
    if tune.runs < 0 or tune.tokens < 0 or (tune.runs > 0) == (tune.tokens > 0):
        what = f"runs = {tune.runs} and tokens = {tune.tokens}: exactly one must be above 0"
        why, fix = "each condition has the same budget", f"write runs = {least}"
        yield Problem(code="tune.budget", where=where, what=what, why=why, fix=fix)
    elif tune.runs and (tune.runs < least or tune.runs % (choices * size)):
        share = f"{choices} final seeds x {size} tuning seeds" if choices > 1 else f"{size} tuning seeds"
        what = f"runs = {tune.runs} cannot be dealt evenly to {share}, two configurations or more each"
        more = max(least, math.ceil(tune.runs / (choices * size)) * choices * size)
        fix = f"write runs = {more}" + (', or choice = "best"' if choices > 1 else "")
        yield Problem(code="tune.uneven", where=where, what=what, fix=fix)


def tuning_metric(table: CampaignTable) -> Metric:
    """Return the metric that chooses; ConfigError if it is none."""
    assert table.tune is not None, "no [campaign.tune]"
    planned = table.plan.primary_metric if table.plan else str(HELD_OUT)
    return parse_metric(table.tune.metric or planned, where="[campaign.tune] metric")


def most_held_out(config: Config) -> int:
    return max([config.eval.examples, *(int(number(each.get("held_out")) or 0) for each in config.data.tasks)])


def tuned_ranges(condition: Condition, ranges: Sequence[Range]) -> list[Range]:
    """Return the keys that are tuned for a condition: those that it does not set itself."""
    own = {each.path for each in condition.settings}
    tables: dict[str, Mapping[str, Any]] = {s.path: s.value for s in condition.settings if isinstance(s.value, Mapping)}
    own |= {f"{path}.{name}" for path, entries in tables.items() for name in entries}
    return [] if condition.control else [each for each in ranges if each.path not in own]


def _setting(each: Range, index: int, place: str) -> Setting:
    value, origin = each.samples[index % len(each.samples)], Origin(layer=Layer.FILE, place=place)
    table, name, *entry = each.path.split(".", 2)
    return Setting(path=f"{table}.{name}", value={entry[0]: value} if entry else value, origin=origin)
