"""First-party distributions, plugins that failed to load, and every part that the configuration names."""

from __future__ import annotations

from dataclasses import replace

from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.declared import Kind
from retrain.kernel.plugin_spec import LoadFailure
from retrain.kernel.plugins.first_party import CORE, own_distributions, provider
from retrain.kernel.registry import Plugins
from retrain.records.campaign_table import CampaignTable
from retrain.run.check import registered_tables
from retrain.run.selected import Selected, selected_parts
from retrain.tools.doctor.diagnosis import diagnose_distribution, diagnose_extra


def diagnose_parts(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    """Distributions, extras of retrain-core, plugins that failed to load, and the parts in the configuration."""
    selected = selected_parts(config, plugins, registered_tables(plugins)) if config else []
    needed = {part.distribution or provider(part.kind, part.name) for part in selected}
    found = [_distribution(name, plugins, needed=name in needed) for name in own_distributions()]
    found += _extras(config, selected)
    found += [_failure(failure, needed=config is None) for failure in plugins.failures]
    return found + _clashes(plugins, selected) + [_part(part) for part in selected]


def _distribution(name: str, plugins: Plugins, *, needed: bool) -> Diagnosis:
    found = diagnose_distribution(name, purpose=own_distributions()[name], needed=needed)
    if name in plugins.left_out and found.status == "ok":
        detail = f"{found.detail}, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out"
        fix = f"take {name} out of RETRAIN_BLOCK, or add it to RETRAIN_PLUGINS"
        return replace(found, status="failed" if needed else "warn", detail=detail, fix=fix)
    return found


def _extras(config: Config | None, selected: list[Selected]) -> list[Diagnosis]:
    recorders = {part.name for part in selected if part.kind is Kind.RECORDER}
    launcher = config.table("campaign", CampaignTable).launcher if config and _is_campaign(config) else ""
    return [
        *(
            diagnose_extra(CORE, name, purpose=f"recorder {name!r}", needed=name in recorders)
            for name in ("wandb", "tensorboard", "trackio", "mlflow")
        ),
        diagnose_extra(CORE, "ray", purpose="launcher 'ray'", needed=launcher == "ray"),
    ]


def _is_campaign(config: Config) -> bool:
    return any(path.startswith("campaign.") and found.layer is Layer.FILE for path, found in config.origins.items())


def _failure(failure: LoadFailure, *, needed: bool) -> Diagnosis:
    """A plugin that failed to load; without a configuration this is what makes the exit code 1."""
    return Diagnosis(
        name=f"plugin {failure.owner}",
        status="failed",
        detail=f"{failure.owner.source}: {failure.error}",
        fix=f"repair, upgrade or uninstall {failure.owner.distribution}",
        needed=needed,
    )


def _clashes(plugins: Plugins, selected: list[Selected]) -> list[Diagnosis]:
    needed = {(part.kind, part.name) for part in selected}
    found = []
    for kind in Kind:
        names = dict.fromkeys(entry.spec.name for entry in plugins.registered(kind))
        for name in names:
            owners = [entry.owner for entry in plugins.find(kind, name)]
            if len(owners) > 1 and (kind, name) not in needed:
                detail = f"provided twice: by {' and by '.join(map(str, owners))}; this configuration does not use it"
                fix = f"leave one out with RETRAIN_BLOCK={owners[-1].distribution}"
                found.append(Diagnosis(name=f"{kind} {name}", status="warn", detail=detail, fix=fix))
    return found


def _part(part: Selected) -> Diagnosis:
    name = f"{part.kind} {part.name}"
    if part.problem is None:
        return Diagnosis(name=name, status="ok", detail=part.source, needed=True)
    detail = f"{part.problem.where}: {part.problem.what}"
    return Diagnosis(name=name, status="missing", detail=detail, fix=part.problem.fix, needed=True)
