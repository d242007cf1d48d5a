"""The suite of every kind, and the checks that every registered part must pass: found, described, light, strict."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import validated_params
from retrain.kernel.types import Kind
from retrain.testing.bench import Bench
from retrain.testing.check import Check, Run, expect

# The modules whose public functions of a bench are the checks of a kind; of several kinds, a tuple in the module. They
# are imported when a suite is listed: some need libraries that others do not.
SUITES: Mapping[Kind, str] = {
    Kind.ADVANTAGE: "credit:ADVANTAGE",
    Kind.TRANSFORM: "credit:TRANSFORM",
    Kind.UNCERTAINTY: "credit:UNCERTAINTY",
    Kind.ALGORITHM: "credit:ALGORITHM",
    Kind.PLANNING_DETECTOR: "credit:PLANNING_DETECTOR",
    Kind.RECIPE: "configuration:RECIPE",
    Kind.LOSS: "losses",
    Kind.REWARD: "rewards",
    Kind.DATA_SOURCE: "data_sources",
    Kind.ENVIRONMENT: "environments",
    Kind.CONTROLLER: "controllers",
    Kind.BACKEND: "sampling backend_training backends",
    Kind.INFERENCE_ENGINE: "sampling",
    Kind.RECORDER: "recorders",
    Kind.HEALTH_MONITOR: "monitors",
    Kind.PACER: "pacers",
    Kind.SAMPLER: "samplers",
    Kind.LAUNCHER: "launchers",
    Kind.CONFIG_TABLE: "configuration:CONFIG_TABLE",
    Kind.COMMAND: "configuration:COMMAND",
    Kind.TEMPLATE: "configuration:TEMPLATE",
}
HEAVY = ("torch", "transformers", "datasets", "peft", "tinker", "verifiers", "vllm", "sentence_transformers")
UNKNOWN_OPTION = "no_such_option_of_this_part"


def conformance(
    kind: Kind | str, name: str, *, config: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Check, ...]:
    """Return the checks of a kind, bound to a registered name or a dotted path; the part is loaded by their call.

    `config` is merged over the toy configuration, table by table as in TOML: `{"backend": {"options": {...}}}`.
    ConfigError for a kind that does not exist.
    """
    # `Kind.HEALTH_MONITOR`, "health-monitor" and "health monitor" name one kind.
    text = str(kind).replace("-", " ").replace("_", " ").lower()
    known = [member.value for member in Kind]
    if text not in known:
        near = get_close_matches(text, known, n=1)
        fix = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(known)}"
        what = f"no kind of plugin is called {str(kind)!r}"
        raise ConfigError(Problem(code="conformance.unknown-kind", where="conformance()", what=what, fix=fix))
    return tuple(
        Check(
            kind=Kind(text),
            name=run.__name__,
            purpose=(inspect.getdoc(run) or "").partition("\n")[0],
            subject=name,
            run=run,
            config=config or {},
        )
        for suite in ("suites", *SUITES[Kind(text)].split())
        for run in _checks(suite)
    )


def _checks(suite: str) -> Iterable[Run]:
    name, _, attribute = suite.partition(":")
    module = importlib.import_module(f"retrain.testing.{name}")
    if attribute:
        checks: tuple[Run, ...] = getattr(module, attribute)
        return checks
    return [
        function
        for function in vars(module).values()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not function.__name__.startswith("_")
        and [*inspect.signature(function).parameters] == ["bench"]
    ]


def is_found_by_name(bench: Bench) -> None:
    """The name resolves to one part, and its module can be imported."""
    target = bench.found.target
    expect(target is not None, "the name leads to None", why="there is nothing to call", fix="correct the factory")


def says_what_it_is(bench: Bench) -> None:
    """It has a one-line summary for `retrain plugins`."""
    for entry in bench.plugins.find(bench.kind, bench.name):
        summary = entry.spec.summary
        why = "`retrain plugins`, the manual and the completion of shells show this line"
        fix = "give PluginSpec(summary=...) one line of text"
        expect(summary.strip() and "\n" not in summary.strip(), f"its summary is {summary!r}", why=why, fix=fix)


def is_announced_without_heavy_imports(bench: Bench) -> None:
    """Listing its distribution imports neither torch nor another library that takes seconds to load."""
    for entry in bench.plugins.find(bench.kind, bench.name):
        heavy = _imported_by_announcing(entry.owner.distribution)
        expect(
            not heavy,
            f"announcing the plugins of {entry.owner.distribution} imports {', '.join(heavy)}",
            why="every command of retrain, even --help, loads the announcements of all plugins",
            fix='name factories as text, "module:attribute", and import nothing heavy in the plugin module',
        )


def refuses_unknown_options(bench: Bench) -> None:
    """A misspelt option is an error and never ignored."""
    model = bench.found.params
    if model is None:
        return
    _, problems = validated_params(model, {UNKNOWN_OPTION: 1}, where="options")
    expect(
        any(UNKNOWN_OPTION in problem.what for problem in problems),
        f"{model.__name__} accepts the unknown option {UNKNOWN_OPTION!r}",
        why="a researcher who misspells an option would compare two runs that are the same",
        fix='use retrain.api.Table as the base of the model, or model_config = ConfigDict(extra="forbid")',
    )


@cache
def _imported_by_announcing(distribution: str) -> tuple[str, ...]:
    """Return the heavy modules that a fresh interpreter imports while it lists the plugins of one distribution."""
    code = (
        "import sys; from retrain.api import load_plugins; "
        f"load_plugins({{'RETRAIN_PLUGINS': {distribution!r}}}); "
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    # In a fresh interpreter: this one may have imported torch for an earlier check.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tuple(done.stdout.split())
