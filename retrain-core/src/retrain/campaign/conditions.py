"""A condition of a campaign: the keys that it sets and its label."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from retrain.credit.recipes import label_with
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import Setting
from retrain.kernel.config.resolved import Layer, Origin
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.errors import Problem
from retrain.records.run import Control, control_label
from retrain.run.public_package import note_on_entry
from retrain.run.steps.controls import KEY

MODES, RECIPE = ("advantage_mode", "transform_mode"), "recipe"
LR = "training.lr"
FOREIGN_TABLES = ("campaign", "resume")
FOREIGN_KEYS = {
    "training.seed": "seeds belong to [campaign] seeds",
    KEY: "controls belong to [campaign] controls",
    "logging.log_dir": "a campaign gives each run a separate folder",
    "backend.throttle_dir": "all runs of a campaign share one throttle",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The settings of a condition: `settings` by path, `overrides` by flat name without the keys that `base` names.

    `base` is `advantage+transform`, or the name of a recipe. A `control` belongs to the condition of the same number.
    """

    number: int
    base: str
    overrides: Mapping[str, Any]
    settings: tuple[Setting, ...]
    control: Control | None = None

    @property
    def label(self) -> str:
        """`base`, `~k=v,...` for the other keys, `+control`; secrets are hidden, since folders are named after it."""
        label = label_with(self.base, self.overrides)
        return control_label(label, self.control) if self.control else label

    def sets(self, path: str) -> bool:
        return any(setting.path == path for setting in self.settings)


def read_conditions(
    given: Sequence[Mapping[str, Any]], keys: Sequence[Key], lines: ConditionLines
) -> tuple[list[Condition], list[Problem]]:
    """Every condition of `[campaign]`, and the problems with their keys.

    A key is named as on the command line, with underscores (`lr`, `gtpo_beta`, `sepa_steps`), or by its table:
    `"training.lr" = 1e-4`, or `lr = 1e-4` under `[campaign.conditions.training]`. Entries of a free table are added to
    the entries of the base configuration.
    """
    names = Names(keys)
    conditions: list[Condition] = []
    problems: list[Problem] = []
    first_of: dict[str, int] = {}  # by label
    for number, entries in enumerate(given, start=1):
        condition, found = _read(number, entries, names, lines)
        problems += found
        if (twin := first_of.setdefault(condition.label, number)) != number:
            what, fix = f"is the same as condition {twin}: {condition.label}", "remove one, or change one of its keys"
            problems.append(Problem(code="campaign.same-condition", where=lines.of(number), what=what, fix=fix))
        conditions.append(condition)
    return conditions, problems


def crossed(factors: Mapping[str, Sequence[Any]], algorithm: AlgorithmTable) -> list[dict[str, Any]]:
    """Every combination of the levels, the last factor fastest; a mode that is no factor is the base's."""
    named = (RECIPE,) if RECIPE in factors or algorithm.recipe else MODES
    common = {name: getattr(algorithm, name) for name in named if name not in factors}
    return [common | dict(zip(factors, levels, strict=True)) for levels in product(*factors.values())]


def at_rates(
    conditions: Sequence[Condition], factors: Sequence[float], rates: Sequence[float], origin: Origin
) -> list[Condition]:
    """Each condition at multiples of its learning rate; unchanged ones come first, so that one is the baseline."""
    found = []
    for factor in sorted(factors, key=lambda factor: factor != 1.0):
        for each, rate in zip(conditions, rates, strict=True):
            value = float(f"{factor * rate:.6g}")
            kept = (setting for setting in each.settings if setting.path != LR)
            settings = (*kept, Setting(path=LR, value=value, origin=origin))
            changed = replace(each, overrides={**each.overrides, "lr": value}, settings=settings)
            found.append(each if factor == 1.0 else changed)
    return [replace(each, number=number) for number, each in enumerate(found, start=1)]


def control_conditions(
    conditions: Sequence[Condition], controls: Sequence[str], baseline: str, place: str
) -> list[Condition]:
    """The controls of every condition but the baseline, whose label is `baseline` (empty: the first condition).

    Each control uses its condition's algorithm, since that decides what random rewards teach: `controls` x (conditions
    - 1) further runs per seed. The baseline needs none, as no verdict says that it is better.
    """
    reference = baseline or next((each.label for each in conditions), "")
    origin = Origin(layer=Layer.FILE, place=place)
    settings = {name: Setting(path=KEY, value=name, origin=origin) for name in controls}
    return [
        replace(each, control=Control(name), settings=(*each.settings, setting))
        for each in conditions
        if each.label != reference
        for name, setting in settings.items()
    ]


def _read(
    number: int, entries: Mapping[str, Any], names: Names, lines: ConditionLines
) -> tuple[Condition, list[Problem]]:
    named = (RECIPE,) if RECIPE in entries else MODES
    overrides: dict[str, Any] = {}
    settings: dict[str, Setting] = {}
    problems = []
    for name, value in names.flattened(entries):
        origin = Origin(layer=Layer.FILE, place=lines.of(number, name))
        found = names.find(name, value)
        if isinstance(found, Problem):
            problems.append(replace(found, where=f"{origin} {name}"))
            continue
        key, content = found
        if key.path in settings and not isinstance(content, Mapping):
            where, what = f"{origin} {name}", f"sets {key.path} a second time"
            problems.append(
                Problem(code="campaign.key-set-twice", where=where, what=what, fix="remove one of the two values")
            )
            continue
        if key.path in settings:
            content = {**settings[key.path].value, **content}
        settings[key.path] = Setting(path=key.path, value=content, origin=origin)
        if name not in named:
            flat = _flat_name(key)
            is_free = isinstance(content, Mapping)
            overrides |= {f"{flat}.{entry}": each for entry, each in content.items()} if is_free else {flat: content}
    condition = Condition(
        number=number,
        base="+".join(str(entries[name]) for name in named),
        overrides=overrides,
        settings=tuple(settings.values()),
    )
    return condition, problems


class Names:
    def __init__(self, keys: Sequence[Key]) -> None:
        self._by_path = {key.path: key for key in keys}
        self._by_path |= {f"{key.table}.{alias}": key for key in keys for alias in key.aliases}
        self._flat = {_flat_name(key): key for key in keys}
        self._flat |= {alias: key for key in keys for alias in key.aliases if alias not in self._flat}
        self._tables = {key.table for key in keys}

    def flattened(self, entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, value in entries.items():
            if isinstance(value, Mapping) and name in self._tables:
                yield from ((f"{name}.{inner}", content) for inner, content in value.items())
            else:
                yield name, value

    def find(self, name: str, value: Any) -> tuple[Key, Any] | Problem:
        """The key named `name`, and its value; a Problem without a location for an unknown key."""
        parent, _, entry = name.rpartition(".")
        key = self._by_path.get(name) or self._flat.get(name)
        if key is None and parent in self._by_path and isinstance(self._by_path[parent].default, dict):
            key, value = self._by_path[parent], {entry: value}
        if key is None:
            fix = note_on_entry(name) or self._fix(name)
            return Problem(code="config.unknown-key", what="unknown key of a condition", fix=fix)
        foreign = f"[{key.table}] is of the campaign" if key.table in FOREIGN_TABLES else FOREIGN_KEYS.get(key.path)
        if foreign:
            what = f"a condition cannot set {key.path}: {foreign}"
            return Problem(code="campaign.foreign-key", what=what, fix="remove it from the condition")
        return key, value

    def _fix(self, name: str) -> str:
        same = [flat for flat, key in self._flat.items() if key.name == name.rpartition(".")[2]]
        near = same or get_close_matches(name, [*self._flat, *self._by_path], n=1)
        return f"did you mean {' or '.join(map(repr, near))}?" if near else "`retrain explain --keys` lists every key"


def _flat_name(key: Key) -> str:
    return key.flag.replace("-", "_")


_HEADER = re.compile(r"^\s*\[\[\s*campaign\s*\.\s*conditions\s*\]\]")


class ConditionLines:
    """`campaign.toml:12 condition 2`, for messages; without the line if headers and conditions do not match.

    With a `place`, all conditions are defined there.
    """

    def __init__(self, file: Path | None, count: int, place: str = "") -> None:
        self._file, self._lines, self._place = file, list[str](), place
        # The loader reports a file that cannot be read.
        with suppress(OSError, ValueError):
            self._lines = file.read_text(encoding="utf-8-sig").split("\n") if file else []
        starts = [number for number, line in enumerate(self._lines, start=1) if _HEADER.match(line)]
        self._starts = starts if len(starts) == count else []

    def of(self, number: int, name: str = "") -> str:
        """File and line of condition `number` (from 1), or of one of its keys."""
        if self._place:
            return self._place
        line = f":{self._line(number, name.rpartition('.')[2])}" if self._starts else ""
        return f"{self._file or '[campaign]'}{line} condition {number}"

    def _line(self, number: int, key: str) -> int:
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self._lines) + 1
        is_set = re.compile(rf"""^\s*["']?([\w.-]+\.)?{re.escape(key)}["']?\s*=""")
        found = (line for line in range(start + 1, end) if key and is_set.match(self._lines[line - 1]))
        return next(found, start)
