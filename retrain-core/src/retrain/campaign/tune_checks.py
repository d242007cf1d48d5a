"""Checks `[campaign.tune]` before anything heavy is loaded; every problem has its place and its smallest fix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from typing import Any

from retrain.campaign.conditions import Condition, Names
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import Setting
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.errors import ConfigError, Problem
from retrain.records.campaign_table import CampaignTable
from retrain.records.runs.curves import EVAL_PREFIX, HELD_OUT, Metric, parse_metric
from retrain.records.tune_table import Range, TuneTable

WORDS = frozenset({"low", "high", "log", "choices"})
Checked = Callable[[Condition], Iterable[Problem]]


def ranges_of(tune: TuneTable, keys: Sequence[Key], place: str) -> tuple[list[Range], list[Problem]]:
    """Return the tuned keys with their values, and the problems of the others."""
    names, found, problems = Names(keys), list[Range](), list[Problem]()
    for name, values in names.flattened(tune.keys):
        where = f"{place} {name}"
        ends = values if isinstance(values, Mapping) else {}
        named = names.find(name, next(iter(ends.get("choices") or ()), ends.get("low")))
        if isinstance(named, Problem):
            problems.append(replace(named, where=where, what=named.what.replace("condition", "tuning")))
            continue
        key, content = named
        path = f"{key.path}.{next(iter(content))}" if isinstance(content, Mapping) else key.path
        fault = _fault(name, ends, is_twice=any(each.path == path for each in found))
        if fault:
            what, fix = fault
            problems.append(Problem(code="tune.bad-range", where=where, what=what, fix=fix))
            continue
        low, high = ends.get("low", 0), ends.get("high", 0)
        is_whole = type(low) is int and type(high) is int and key.annotation is not float
        choices, is_log = tuple(ends.get("choices", ())), bool(ends.get("log"))
        found.append(Range(path=path, low=low, high=high, is_log=is_log, is_whole=is_whole, choices=choices))
    return found, problems


def _fault(name: str, ends: Mapping[str, Any], *, is_twice: bool) -> tuple[str, str] | None:
    """Return the fault of one key's values and its fix."""
    example = f'write "{name}" = {{ low = 1e-5, high = 1e-3, log = true }}, or {{ choices = [1, 2, 4] }}'
    low, high, choices = (ends.get(each) for each in ("low", "high", "choices"))
    if is_twice:
        return "tunes a key a second time", "remove one of the two entries"
    if unknown := sorted(ends.keys() - WORDS):
        return f"{', '.join(unknown)}: unknown; low, high, log and choices are known", example
    if choices is not None:
        is_list = isinstance(choices, list) and all(isinstance(each, str | int | float | bool) for each in choices)
        if len(ends) > 1:
            return "has choices and a range", "keep either choices, or low and high"
        if not is_list or len({repr(each) for each in choices}) < max(2, len(choices)):
            return f"choices = {choices!r} are not two different values or more", example
        return None
    if not all(type(each) in (int, float) and math.isfinite(each) for each in (low, high)):
        return f"low = {low!r} and high = {high!r} are not two numbers", example
    if low >= high:  # type: ignore[operator]  # both are numbers
        return f"low = {low!r} is not below high = {high!r}", f"exchange them: low = {high!r}, high = {low!r}"
    if ends.get("log") and low <= 0:  # type: ignore[operator]
        return f"low = {low!r}: a logarithm needs values above 0", "raise low above 0, or remove log = true"
    return None


def tune_problems(
    config: Config, table: CampaignTable, ranges: Sequence[Range], conditions: Sequence[Condition], checked: Checked
) -> Iterator[Problem]:
    """Yield reasons why this search cannot be run, or could not be believed."""
    tune, place = table.tune, config.place("campaign.tune")
    assert tune is not None, "no [campaign.tune]"

    def problem(code: str, name: str, what: str, fix: str, why: str = "") -> Problem:
        return Problem(code=f"tune.{code}", where=f"{place} {name}".strip(), what=what, why=why, fix=fix)

    if find_spec("optuna") is None:
        yield problem("no-optuna", "", "needs Optuna, which is not installed", "pip install 'retrain-core[tune]'")
    if not tune.keys:
        yield problem("no-keys", "", "names no key to tune", 'add one: "training.lr" = { low = 1e-5, high = 1e-3 }')
    yield from _budget_problems(tune, len(table.seeds), problem)
    if shared := sorted({*tune.seeds} & {*table.seeds}):
        free = max((*tune.seeds, *table.seeds)) + 1
        why = "a configuration that was chosen on a seed looks better on it than on others"
        what = f"tuning seed {', '.join(map(str, shared))} is a final seed, too"
        yield problem("final-seed", "seeds", what, f"use others: seeds = [{free}]", why)
    if not tune.seeds or len({*tune.seeds}) < len(tune.seeds) or min(tune.seeds) < 0:
        yield problem("bad-seeds", "seeds", f"{tune.seeds} are not different seeds, 0 or above", "write seeds = [1, 2]")
    if tune.pruner == "halving" and config.optimizer.schedule != "constant":
        what = "halving judges runs in the middle of a learning rate's decay"
        yield problem("halving-decay", "pruner", what, 'remove it, or set [optimizer] schedule = "constant"')
    try:
        metric = tuning_metric(table)
    except ConfigError as error:
        yield from error.problems
    else:
        if any(metric.field.startswith(f"{EVAL_PREFIX}{name}_") for name in config.value("eval.sets", {})):
            what = f"{metric} is not measured on the tuning examples"
            yield problem("metric-of-a-set", "metric", what, f'write metric = "{HELD_OUT}"')
        if metric.is_eval and not config.eval.examples:
            yield problem("no-examples", "metric", f"{metric} needs held-out examples", "set [eval] examples")
    tuned = [each for each in conditions if tuned_ranges(each, ranges)]
    if ranges and not tuned:
        what = "every condition sets the tuned keys itself, so none is tuned"
        yield problem("all-fixed", "", what, "remove the keys from a condition")
    for condition in tuned:
        own = tuned_ranges(condition, ranges)
        for index in range(max(len(each.samples) for each in own)):
            settings = [_setting(each, index, place) for each in own]
            yield from checked(replace(condition, settings=(*condition.settings, *settings)))


def _budget_problems(tune: TuneTable, num_seeds: int, problem: Callable[..., Problem]) -> Iterator[Problem]:
    choices, size = tune.num_choices(num_seeds), max(1, len(tune.seeds))
    least = 2 * choices * size
    if tune.runs < 0 or tune.tokens < 0 or (tune.runs > 0) == (tune.tokens > 0):
        what = f"runs = {tune.runs} and tokens = {tune.tokens}: exactly one must be above 0"
        yield problem("budget", "runs", what, f"write runs = {least}", "without a budget no comparison is fair")
        return
    if tune.runs and (tune.runs < least or tune.runs % (choices * size)):
        share = f"{choices} final seeds x {size} tuning seeds" if choices > 1 else f"{size} tuning seeds"
        what = f"runs = {tune.runs} cannot be dealt evenly to {share}, two configurations or more each"
        more = max(least, math.ceil(tune.runs / (choices * size)) * choices * size)
        yield problem("uneven", "runs", what, f"write runs = {more}" + (', or choice = "best"' if choices > 1 else ""))


def tuning_metric(table: CampaignTable) -> Metric:
    """Return the metric that chooses; ConfigError if it is none."""
    assert table.tune is not None, "no [campaign.tune]"
    planned = table.plan.primary_metric if table.plan else str(HELD_OUT)
    return parse_metric(table.tune.metric or planned, where="[campaign.tune] metric")


def tuned_ranges(condition: Condition, ranges: Sequence[Range]) -> list[Range]:
    """Return the keys that are tuned for a condition: those that it does not set itself."""
    entries = ({each.path} | {f"{each.path}.{name}" for name in _names(each.value)} for each in condition.settings)
    own = set(chain.from_iterable(entries))
    return [] if condition.control else [each for each in ranges if each.path not in own]


def _names(value: Any) -> Iterable[str]:
    return value if isinstance(value, Mapping) else ()


def _setting(each: Range, index: int, place: str) -> Setting:
    value, origin = each.samples[index % len(each.samples)], Origin(layer=Layer.FILE, place=place)
    table, name, *entry = each.path.split(".", 2)
    return Setting(path=f"{table}.{name}", value={entry[0]: value} if entry else value, origin=origin)
