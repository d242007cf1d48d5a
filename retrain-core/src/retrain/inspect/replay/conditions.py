"""Other credit and losses for a stored step: the user's words become a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.credit.algorithm import build_algorithm
from retrain.credit.recipes import PART_OF
from retrain.inspect.replay.position import Position
from retrain.kernel.contracts.algorithm import Algorithm
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem, ResumeError
from retrain.kernel.registry import Plugins
from retrain.records.run import Run
from retrain.run.configure import Checked, load_file

SHORT = {
    "advantage": "advantage_mode",
    "transform": "transform_mode",
    "uncertainty": "uncertainty_kind",
    "algorithm": "algorithm_mode",
}
TABLES = ("algorithm", "entropy", "gtpo", "hicra", "planning", "sepa")  # what credit and loss are configured in
MODES = ("algorithm.advantage_mode", "algorithm.transform_mode")
RECIPE, MODE = "algorithm.recipe", "algorithm.algorithm_mode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Condition:
    name: str
    checked: Checked
    algorithm: Algorithm


def parse_settings(text: str) -> dict[str, str]:
    """Parse `loss=gspo, advantage_mode=rloo` by key, `algorithm.` before bare names; ConfigError for anything else."""
    found: dict[str, str] = {}
    for part in _parts(text):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        path = key if "." in key else f"algorithm.{SHORT.get(key, key)}"
        where = f"--try {text!r}"
        if not (key and equals):
            raise ConfigError(Problem(where=where, what=f"{part.strip()!r} is no KEY=VALUE", fix='write "loss=gspo"'))
        if path.partition(".")[0] not in TABLES:
            what = f"{path} changes neither the credit of stored completions nor their loss"
            fix = f"give keys of {', '.join(f'[{table}]' for table in TABLES)}"
            raise ConfigError(Problem(where=where, what=what, fix=fix))
        found[path] = value
    if not found:
        raise ConfigError(Problem(where="--try", what="names no key", fix='write --try "loss=gspo,advantage=rloo"'))
    return found


def build_condition(text: str, position: Position, plugins: Plugins) -> Condition:
    """Return the condition that `text` describes, in the state of the run's algorithm where it has the same parts.

    A controller that the run did not have begins as in a new run.
    """
    settings = parse_settings(text)
    tables = changed_tables(Run(position.run).settings, settings, position.manifest.get("origins") or {})
    checked = load_file(tables, [f"--set={path}={value}" for path, value in settings.items()], plugins, will_run=False)
    context = PluginContext(
        config=checked.config, seeds=position.context.seeds, plugins=plugins, tokenizer=position.context.tokenizer
    )
    algorithm = build_algorithm(checked.flow, context)
    is_same = checked.flow.controller == position.checked.flow.controller and not checked.flow.is_custom
    if is_same and (saved := position.algorithm.state()):
        try:
            algorithm.restore(saved)
        except ResumeError as error:
            raise ConfigError(*error.problems) from error
    return Condition(name=text, checked=checked, algorithm=algorithm)


def changed_tables(
    tables: Mapping[str, Any], settings: Mapping[str, str], origins: Mapping[str, str]
) -> dict[str, Any]:
    """Return the run's tables without the values that do not belong to the condition.

    Values of the run's recipe go, and come again with it; so do parameters of a part that the condition replaces (the
    clip of another loss). A condition with a recipe has none of the run's `[algorithm]`.
    """
    kept = {name: dict(table) for name, table in tables.items() if isinstance(table, Mapping)}
    own = kept.get("algorithm", {})
    if RECIPE in settings:
        kept["algorithm"] = {}
        return kept
    replaced = {part for part, now in settings.items() if _value(kept, part) != now}
    dropped = [path for path, origin in origins.items() if str(origin).startswith("recipe ")]
    dropped += [path for path, part in PART_OF.items() if part in replaced]
    if MODE not in settings and set(MODES) & settings.keys():
        dropped.append(MODE)  # a whole algorithm would override them
    for path in dropped:
        table, _, name = path.partition(".")
        if path not in settings:
            kept.get(table, own).pop(name, None)
    return kept


def _value(tables: Mapping[str, Mapping[str, Any]], path: str) -> Any:
    table, _, name = path.partition(".")
    return tables.get(table, {}).get(name)


def _parts(text: str) -> Sequence[str]:
    """Cut `text` at its commas, but not within brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        depth += (letter in "[{") - (letter in "]}") if not quote else 0
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]
