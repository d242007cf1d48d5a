"""What every registered part must do before it is used: be found once, load, and refuse unknown options."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from retrain.kernel.plugins.build import validated_params
from retrain.kernel.registry import Registered
from retrain.testing.bench import Bench
from retrain.testing.check import expect

HEAVY = ("torch", "transformers", "datasets", "peft", "tinker", "verifiers", "vllm", "sentence_transformers")
UNKNOWN_OPTION = "no_such_option_of_this_part"


def is_found_by_name(bench: Bench) -> None:
    """The name resolves to one part, and its module can be imported."""
    target = bench.found.target
    expect(target is not None, "the name leads to None", why="there is nothing to call", fix="correct the factory")


def says_what_it_is(bench: Bench) -> None:
    """It has a one-line summary for `retrain plugins`."""
    for entry in _registered(bench):
        summary = entry.spec.summary
        expect(
            summary.strip() and "\n" not in summary.strip(),
            f"its summary is {summary!r}",
            why="`retrain plugins`, the manual and the completion of shells show this line",
            fix="give PluginSpec(summary=...) one line of text",
        )


def is_announced_without_heavy_imports(bench: Bench) -> None:
    """Listing its distribution imports neither torch nor another library that takes seconds to load."""
    for entry in _registered(bench):
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


def _registered(bench: Bench) -> list[Registered]:
    """The part's registration; None if it is named by a dotted path."""
    return bench.plugins.find(bench.kind, bench.name)


@cache
def _imported_by_announcing(distribution: str) -> tuple[str, ...]:
    """Heavy modules that a fresh interpreter imports while it lists the plugins of one distribution."""
    code = (
        "import sys; from retrain.api import load_plugins; "
        f"load_plugins({{'RETRAIN_PLUGINS': {distribution!r}}}); "
        f"print(*(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return tuple(done.stdout.split())


ANY_KIND = (is_found_by_name, says_what_it_is, is_announced_without_heavy_imports, refuses_unknown_options)
