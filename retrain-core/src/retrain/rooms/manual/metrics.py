"""Generated section `metrics`: every field of `metrics.jsonl`, as the plugins that write them describe it."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.kernel.hooks import PROJECT
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.spec import MetricSpec
from retrain.rooms.manual import markdown

HOOK = f"{PROJECT}_describe_metrics"
LOOP = "retrain.rooms.metrics.metric_names"


def described(plugins: Plugins) -> dict[str, list[MetricSpec]]:
    """The described fields of each plugin, by the distribution and module that describes them, the loop's first."""
    return {owner: specs for owner, specs in _answers(plugins).items() if not isinstance(specs, Exception)}


def metrics(plugins: Plugins) -> str:
    """One table per plugin that writes fields."""
    sections = []
    for owner, specs in _answers(plugins).items():
        distribution, _, module = owner.partition(":")
        heading = "The loop" if module == LOOP else f"{distribution}, {markdown.code(module)}"
        told = f"Cannot be described: {type(specs).__name__}." if isinstance(specs, Exception) else _table(specs)
        sections += [f"### {heading}", told]
    return "\n\n".join(sections)


def _answers(plugins: Plugins) -> dict[str, list[MetricSpec] | Exception]:
    found: dict[str, list[MetricSpec] | Exception] = {}
    for implementation in getattr(plugins.pluggy.hook, HOOK).get_hookimpls():
        try:
            found[implementation.plugin_name] = list(implementation.function() or ())
        except Exception as error:  # a fault of that plugin, which must not take the page with it
            found[implementation.plugin_name] = error
    return dict(sorted(found.items(), key=lambda item: (not item[0].endswith(f":{LOOP}"), item[0])))


def _table(specs: Sequence[MetricSpec]) -> str:
    rows = [(markdown.code(spec.name), spec.unit, spec.meaning, spec.absent or "never") for spec in specs]
    return markdown.table(("field", "unit", "meaning", "absent"), rows)
