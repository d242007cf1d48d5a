"""Generated section `metrics`: every field of `metrics.jsonl`, as described by the plugin that writes it."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.cli.manual import markdown
from retrain.kernel.hooks import PROJECT
from retrain.kernel.plugin_spec import MetricSpec
from retrain.kernel.registry import Plugins

HOOK = f"{PROJECT}_describe_metrics"
LOOP = "retrain.observe.metrics.metric_names"


def described(plugins: Plugins) -> dict[str, list[MetricSpec]]:
    """The fields of each plugin, keyed by distribution and module; those of the loop come first."""
    return {owner: specs for owner, specs in _answers(plugins).items() if not isinstance(specs, Exception)}


def metrics(plugins: Plugins) -> str:
    """One table of fields per plugin."""
    sections = []
    for owner, specs in _answers(plugins).items():
        distribution, _, module = owner.partition(":")
        heading = "The loop" if module == LOOP else f"{distribution}, {markdown.code(module)}"
        text = f"Cannot be described: {type(specs).__name__}." if isinstance(specs, Exception) else _table(specs)
        sections += [f"### {heading}", text]
    return "\n\n".join(sections)


def _answers(plugins: Plugins) -> dict[str, list[MetricSpec] | Exception]:
    found: dict[str, list[MetricSpec] | Exception] = {}
    for implementation in getattr(plugins.pluggy.hook, HOOK).get_hookimpls():
        try:
            found[implementation.plugin_name] = list(implementation.function() or ())
        except Exception as error:  # one broken plugin must not break the page
            found[implementation.plugin_name] = error
    return dict(sorted(found.items(), key=lambda item: (not item[0].endswith(f":{LOOP}"), item[0])))


def _table(specs: Sequence[MetricSpec]) -> str:
    rows = [(markdown.code(spec.name), spec.unit, spec.meaning, spec.absent or "never") for spec in specs]
    return markdown.table(("field", "unit", "meaning", "absent"), rows)
