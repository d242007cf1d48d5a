"""The reasoning-gym library: its data sets by name, their options, and its entries as JSON and back without loss.

Some data sets iterate over sets of text, whose order depends on Python's hash seed: entries would differ between runs,
and a resumed run would see other tasks. So entries are made in a process that runs this module with a fixed hash seed;
it reads one JSON object and writes one JSON line per entry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import fields, replace
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from retrain.api import ConfigError, Problem, install_line
from retrain_rewards.faults import refused

LEVEL = "level"  # of difficulty, as the data set's own curriculum grades it; no data set has an option of this name
RESERVED = ("seed", "size", LEVEL)  # options of the source itself


def data_sets(*, where: str) -> Mapping[str, tuple[type, type]]:
    try:
        import reasoning_gym  # noqa: F401  (fills the registry)
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        what = "source 'reasoning_gym' needs the package reasoning-gym, and it cannot be imported"
        fix = f"install it: {install_line('retrain-rewards', 'reasoning-gym')}"
        raise refused(where, code="plugin.missing-package", what=what, why=str(error), fix=fix) from error
    return dict(DATASETS)


def check(name: str, config: Mapping[str, Any], level: int = -1, *, where: str) -> None:
    """ConfigError on an unknown data set, an unknown option, or values that its own validation rejects."""
    known = data_sets(where=where)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        fix = f"use {near[0]!r}" if near else f"use one of: {', '.join(sorted(known))}"
        what = f"reasoning-gym has no data set {name!r}"
        raise refused(f"{where}.name", code="data.unknown-data-set", what=what, fix=fix)
    own = [field.name for field in fields(known[name][1]) if field.name not in RESERVED]
    problems = []
    for option in config:
        place = f"{where}.config.{option}"
        if option in RESERVED:
            what, fix = "is an option of the source", f"set it as {where}.{option}"
            problems.append(Problem(code="data.misplaced-option", where=place, what=what, fix=fix))
        elif option not in own:
            what, why = f"data set {name!r} has no option {option!r}", f"its options: {', '.join(own) or 'none'}"
            near = get_close_matches(option, own, n=1)
            fix = f"use {near[0]!r}" if near else "correct the name"
            problems.append(Problem(code="data.unknown-option", where=place, what=what, why=why, fix=fix))
    if problems:
        raise ConfigError(*problems)
    from reasoning_gym.factory import CURRICULA

    if level >= 0 and name not in CURRICULA:
        what, fix = f"data set {name!r} has no levels of difficulty", "remove it, and set its own options in config"
        raise refused(f"{where}.level", code="data.no-levels", what=what, fix=fix)
    try:
        built = _configuration(name, known[name][1], {**config, LEVEL: level, "seed": 0, "size": 1})
        if hasattr(built, "validate"):
            built.validate()
    # The library validates by assertions, and a wrong type raises anything.
    except Exception as error:
        reason = " ".join(str(error).split())
        what = f"data set {name!r} refuses its configuration: {type(error).__name__}: {reason}"
        fix = f"correct the value; the options of this data set: {', '.join(own)}"
        raise refused(f"{where}.config", code="data.bad-options", what=what, fix=fix) from error


def make_data_set(name: str, config: Mapping[str, Any]) -> Any:
    data_set, configuration = data_sets(where="[data.options]")[name]
    return data_set(config=_configuration(name, configuration, config))


def _configuration(name: str, configuration: type, config: Mapping[str, Any]) -> Any:
    """Make the dataclass, with tuples where lists came from JSON, and with a level on the curriculum's options."""
    values = dict(config)
    level = values.pop(LEVEL, -1)
    for field in fields(configuration):
        value = values.get(field.name)
        if isinstance(field.default, tuple) and isinstance(value, list):
            values[field.name] = tuple(value)
        elif configuration.__name__ == "CompositeConfig" and field.name == "datasets" and isinstance(value, list):
            from reasoning_gym.composite import DatasetSpec

            values[field.name] = [DatasetSpec(**{"weight": 1.0, "config": {}, **table}) for table in value]
    if level < 0:
        return configuration(**values)
    from reasoning_gym.factory import CURRICULA

    curriculum = CURRICULA[name]()
    curriculum.set_global_level(level)
    return replace(curriculum.generate_configuration(), **values)


TUPLE, SET, PAIRS, FRACTION = "__tuple__", "__set__", "__pairs__", "__fraction__"
_MARKS = (TUPLE, SET, PAIRS, FRACTION)


def to_plain(value: Any) -> Any:
    """Return JSON data that `from_plain` turns back into an equal value; TypeError when the value is not plain data.

    A tuple, set or fraction becomes an object with one marked key, and so does a dictionary whose keys are not all
    text. Texts and numbers of other libraries' classes become Python's own.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Fraction):
        return {FRACTION: str(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        # Sorted, so that equal sets give equal bytes and ids.
        return {SET: sorted((to_plain(item) for item in value), key=repr)}
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value) and not any(mark in value for mark in _MARKS):
            return {str(name): to_plain(item) for name, item in value.items()}
        return {PAIRS: [[to_plain(name), to_plain(item)] for name, item in value.items()]}
    if hasattr(value, "item"):  # a number of numpy
        return to_plain(value.item())
    raise TypeError(f"{type(value).__name__} is not plain data")


def from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == TUPLE:
            return tuple(from_plain(item) for item in content)
        if mark == SET:
            return {from_plain(item) for item in content}
        if mark == FRACTION:
            return Fraction(content)
        if mark == PAIRS:
            return {from_plain(name): from_plain(item) for name, item in content}
    return {name: from_plain(item) for name, item in value.items()}


# Some data sets iterate over sets of text, whose order depends on this seed.
HASH_SEED = "0"


def make_entries(name: str, config: Mapping[str, Any], *, where: str) -> Iterator[dict[str, Any]]:
    # -P: a module of the current folder must not shadow one of the library's.
    command = [sys.executable, "-P", "-m", "retrain_rewards.sources.reasoning_gym_library"]
    environ = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONIOENCODING": "utf-8"}
    request = json.dumps({"name": name, "config": dict(config)})
    done = subprocess.run(command, input=request, capture_output=True, encoding="utf-8", env=environ, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1] if lines else f"the process ended with code {done.returncode}"
        what, fix = f"reasoning-gym cannot make data set {name!r}: {why}", "change its options or choose another"
        raise refused(where, code="data.generation-failed", what=what, fix=fix)
    for line in done.stdout.split("\n"):
        if line:
            yield json.loads(line)


def main() -> None:
    request = json.load(sys.stdin)
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # some data sets print while they work
        data_set = make_data_set(request["name"], request["config"])
        for index in range(len(data_set)):
            entry = data_set[index]
            out.write(json.dumps(to_plain({k: entry[k] for k in ("question", "answer", "metadata")})) + "\n")


if __name__ == "__main__":
    main()
