"""What plugins add to a report (`retrain_report_sections`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.load import load_config
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.check import declared_capabilities, registered_tables
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.types import Capabilities, CheckpointMode, Determinism
from retrain.rooms.insight.report.gather import Material, ReportRun

HOOK = "retrain_report_sections"
UNDECLARED = Capabilities(
    reports_sync_loss=False,
    preserves_token_advantages=False,
    supports_checkpoint_resume=False,
    checkpoint_resume_mode=CheckpointMode.UNSUPPORTED,
    determinism=Determinism.NONE,
    provides_entropy=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSection:
    """A title and a text of a plugin, about one run; `condition` is empty when the report is about that run alone."""

    title: str
    body: str
    condition: str = ""


def plugin_sections(material: Material, plugins: Plugins) -> list[PluginSection]:
    """Sections about the first run of each condition that is shown. A plugin that raises is told in its place."""
    if not getattr(plugins.pluggy.hook, HOOK).get_hookimpls():
        return []
    found: list[PluginSection] = []
    for label in material.shown:
        run = next(iter(material.drawn(label)), None)
        if run is None or run.candidate.folder is None:
            continue
        condition = label if len(material.shown) > 1 else ""
        try:
            answers = plugins.notify(HOOK, run=_view(run, run.candidate.folder, plugins))
        except RetrainError as error:
            found.append(PluginSection(title="A plugin failed", body=str(error), condition=condition))
            continue
        for answer in answers:
            items = answer.items() if isinstance(answer, dict) else ()
            found += [PluginSection(title=str(name), body=str(body), condition=condition) for name, body in items]
    return list(dict.fromkeys(found))


def _view(run: ReportRun, folder: Path, plugins: Plugins) -> RunView:
    """The run as its own `config.toml` describes it; what its backend promises is what it declares."""
    config, problems = load_config(folder / "config.toml", tables=registered_tables(plugins), environ={})
    if problems:
        raise RetrainError(*problems)
    return RunView(
        config=config,
        condition=run.candidate.condition,
        folder=folder,
        seed=run.candidate.seed or 0,
        first_step=0,
        capabilities=declared_capabilities(config, plugins) or UNDECLARED,
    )
