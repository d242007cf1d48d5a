"""Loads a campaign from a command line, checks every condition before the first run starts, and explains it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from retrain.campaign.conditions import (
    Condition,
    ConditionLines,
    at_rates,
    control_conditions,
    crossed,
    read_conditions,
)
from retrain.credit.configured_loss import capability_fields
from retrain.credit.flow import build_flow
from retrain.credit.recipes import configured_recipe, departures
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.plugins.resolve import declared_capabilities, resolve, validated_params
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.records.campaign_table import OVERRIDING, CampaignTable, PlanTable, steps_per_run
from retrain.records.files import SEAL, seal_of
from retrain.records.manifest import public_values
from retrain.records.tune_table import Range
from retrain.run.check import check, check_run, value_rows, with_plugin_rows
from retrain.run.configure import split_arguments
from retrain.run.notices import unclipped
from retrain.run.steps.controls import KEY as CONTROL
from retrain.run.tables import read_config, registered_tables

SET_BY_CONDITIONS = ("algorithm.advantage_mode", "algorithm.transform_mode")
RECIPE = "algorithm.recipe"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCondition:
    """A condition and the configuration of its runs, apart from the differences between seeds.

    `beaten` are values of the campaign that its recipe has otherwise, by flat name.
    """

    condition: Condition
    config: Config
    beaten: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.condition.label


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A checked campaign. `file_tables` names the tables that the file sets."""

    config: Config
    table: CampaignTable
    conditions: tuple[CheckedCondition, ...]
    max_steps: int
    file_tables: frozenset[str]
    keys: tuple[Key, ...]
    ranges: tuple[Range, ...] = ()

    @property
    def labels(self) -> list[str]:
        return [condition.label for condition in self.conditions]

    @property
    def num_runs(self) -> int:
        return len(self.conditions) * len(self.table.seeds)

    @property
    def workers(self) -> int:
        """The number of runs that are active at a time."""
        return min(self.table.max_workers or self.num_runs, self.num_runs) if self.table.parallel else 1

    def steps_of(self, condition: CheckedCondition) -> int:
        """Steps of each run of a condition: its own `max_steps`, or the campaign's."""
        is_own = condition.condition.sets("training.max_steps")
        return condition.config.training.max_steps if is_own else self.max_steps

    def content(self) -> dict[str, Any]:
        """Everything that identifies the campaign, as plain data without secrets."""
        conditions = {}
        for each in self.conditions:
            tables = public_values(each.config)
            kept = [k for k in self.keys if k.table in tables and not k.free_on_resume and k.path != "training.seed"]
            values = {key.path: tables[key.table].get(key.name) for key in kept}
            conditions[each.label] = values | {"training.max_steps": self.steps_of(each)}
        return {
            "seeds": self.table.seeds,
            "devices_per_run": self.table.devices_per_run,
            "plan": self.table.plan.content() if self.table.plan else None,
            "conditions": conditions,
            **({"factors": self.levels} if self.table.factors else {}),
            # Left out, so that the identity of other campaigns does not depend on this key.
            **({"tune": self.table.tune.model_dump(mode="json")} if self.table.tune else {}),
        }

    @property
    def levels(self) -> dict[str, dict[str, Any]]:
        """The level of each condition, by factor."""
        cells = list(zip(product(*self.table.factors.values()), self.labels, strict=False))  # controls come last
        return {name: {label: levels[at] for levels, label in cells} for at, name in enumerate(self.table.factors)}

    def effects(self) -> list[str]:
        """The labels of a factorial's effects; empty for any other campaign."""
        if not self.table.factors:
            return []
        from retrain.verdicts.study.factorial import factorial_of  # only a factorial loads it

        baseline = (self.table.plan.baseline if self.table.plan else "") or self.labels[0]
        return [each.condition for each in factorial_of(self.levels, baseline).effects]


def load_campaign(arguments: Sequence[str], plugins: Plugins) -> Campaign:
    """Resolve `FILE [overrides]`. ConfigError lists every problem of the file and of every condition."""
    tables = registered_tables(plugins)
    keys = all_keys(tables)
    file, overrides = split_arguments(arguments)

    def load(condition: Condition | None = None) -> tuple[Config, list[Problem]]:
        settings = condition.settings if condition else ()
        return read_config(file, plugins, tables, arguments=overrides, environ=os.environ, settings=settings)

    config, problems = load()
    tables_of_file: Mapping[str, Any] = {}
    # The loader reports a file that cannot be read.
    with suppress(ConfigError):
        tables_of_file = read_toml(file)[0] if file else {}
    table = config.table("campaign", CampaignTable)
    given = crossed(table.factors, config.algorithm) if table.factors else table.conditions
    place = config.place("campaign.factors") if table.factors else ""
    conditions, found = read_conditions(given, keys, ConditionLines(file, len(given), place))
    if table.lr_factors and not found:
        origin = config.origin("campaign.lr_factors")
        conditions = at_rates(conditions, table.lr_factors, [load(each)[0].training.lr for each in conditions], origin)
    problems += found + _base_problems(config, table, plugins, conditions)
    ranges: list[Range] = []
    if table.tune:
        # Only a tuned campaign needs them.
        from retrain.campaign.tune_checks import ranges_of, tune_problems

        def ends(condition: Condition) -> list[Problem]:
            own, found = load(condition)
            return found or check(own, plugins, tables)[1]

        ranges, found = ranges_of(table.tune, keys, config.place("campaign.tune"))
        problems += [*found, *tune_problems(config, table, ranges, conditions, ends)]
    baseline = table.plan.baseline if table.plan else ""
    conditions += control_conditions(conditions, table.controls, baseline, config.place("campaign.controls"))
    checked = []
    for condition in conditions:
        own, found = load(condition)
        recipe = configured_recipe(own, plugins) if condition.sets(RECIPE) else None
        found_values = departures(own, recipe, plugins) if recipe else {}
        beaten = {name: value for name, value in found_values.items() if name not in condition.overrides}
        checked.append(CheckedCondition(condition=condition, config=own, beaten=beaten))
        flow, wrong = check(own, plugins, tables)
        problems += found + wrong + (check_run(own, plugins, flow) if flow else [])
        what, fix = f"beats recipe {own.algorithm.recipe!r} of a condition", "remove it, or move it to a condition"
        fixed = [path for path in SET_BY_CONDITIONS if path.partition(".")[2] in beaten]
        problems += [Problem(code="campaign.beats-recipe", where=own.place(path), what=what, fix=fix) for path in fixed]
    campaign = Campaign(
        config=config,
        table=table,
        conditions=tuple(checked),
        max_steps=steps_per_run(config),
        file_tables=frozenset(tables_of_file),
        keys=tuple(keys),
        ranges=tuple(ranges),
    )
    try:
        sealed_plan(campaign, written="")
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    return campaign


def _base_problems(
    config: Config, table: CampaignTable, plugins: Plugins, conditions: Sequence[Condition]
) -> list[Problem]:
    problems = device_problems(config, table)
    if (origin := config.origin("training.seed")).layer in OVERRIDING:
        what, fix = "seeds belong to the campaign", f"remove {origin}, or give the seeds: --campaign-seeds 1,2,3"
        problems.append(Problem(code="campaign.seed-of-runs", where=str(origin), what=what, fix=fix))
    varied = (*SET_BY_CONDITIONS, RECIPE) if any(each.sets(RECIPE) for each in conditions) else SET_BY_CONDITIONS
    for path in varied:
        if (origin := config.origin(path)).layer in OVERRIDING:
            what = f"every condition sets its own {path.partition('.')[2]}"
            fix = f"remove {origin}, or change [campaign] conditions"
            problems.append(Problem(code="campaign.mode-of-conditions", where=str(origin), what=what, fix=fix))
    if config.algorithm.algorithm_mode:
        what, where = "algorithm_mode replaces the modes that conditions vary", config.place("algorithm.algorithm_mode")
        problems.append(Problem(code="campaign.algorithm-mode", where=where, what=what, fix="remove algorithm_mode"))
    if config.value(CONTROL, ""):
        what, fix = "would make every condition a control", "remove it, or use [campaign] controls"
        problems.append(Problem(code="campaign.all-controls", where=config.place(CONTROL), what=what, fix=fix))
    if table.controls and len(conditions) < 2:
        what, fix = "a control is of a condition that is compared with a baseline", "add a condition, or remove it"
        where = config.place("campaign.controls")
        problems.append(Problem(code="campaign.control-of-baseline", where=where, what=what, fix=fix))
    return problems + _launcher_problems(config, table, plugins)


def _launcher_problems(config: Config, table: CampaignTable, plugins: Plugins) -> list[Problem]:
    entries = plugins.find(Kind.LAUNCHER, table.launcher)
    if len(entries) != 1:  # reported with the names
        return []
    try:
        model = resolve(plugins, Kind.LAUNCHER, table.launcher, where=config.place("campaign.launcher")).params
    except Exception as error:  # a bug in that plugin, or an extra that is not installed
        if isinstance(error, RetrainError):
            return list(error.problems)
        what, where = f"launcher {table.launcher!r} failed to load: {error}", config.place("campaign.launcher")
        fix = "repair that plugin, or choose another launcher"
        return [Problem(code="plugin.broken-params", where=where, what=what, fix=fix)]
    return validated_params(model, table.launcher_options, where=config.place("campaign.launcher_options"))[1]


def sealed_plan(campaign: Campaign, *, written: str) -> dict[str, Any] | None:
    """`[campaign.plan]` as the manifest stores it; None if there is no plan."""
    plan, seeds = campaign.table.plan, campaign.table.seeds
    if plan is None:
        return None
    return seal_plan(plan, conditions=campaign.labels, seeds=seeds, max_steps=campaign.max_steps, written=written)


def seal_plan(
    plan: PlanTable, *, conditions: Sequence[str], seeds: Sequence[int], max_steps: int, written: str
) -> dict[str, Any]:
    """The plan as `manifest.json` stores it before the first step, with its `sha256`.

    `conditions` are the labels in order, `written` the time in UTC (ISO 8601). ConfigError if the baseline is not one
    of the conditions, or the last look is not at the last seed. The hash reveals a plan that was edited later, unless
    its hash was replaced as well.
    """
    baseline = plan.baseline or next(iter(conditions), "")
    if baseline not in conditions:
        what, fix = f"{baseline!r} is not a condition of this campaign", f"use one of: {', '.join(conditions)}"
        where = "[campaign.plan] baseline"
        raise ConfigError(Problem(code="plan.unknown-baseline", where=where, what=what, fix=fix))
    if plan.looks and plan.looks[-1] != len(seeds):
        last = plan.looks[-1]
        what = f"the last look is after {last} seeds, and [campaign] seeds has {len(seeds)}"
        fix = f"end looks with {len(seeds)}, or list {last} seeds"
        raise ConfigError(Problem(code="plan.last-look", where="[campaign.plan] looks", what=what, fix=fix))
    content = plan.content() | {
        "baseline": baseline,
        "conditions": list(conditions),
        "seeds": list(seeds),
        "max_steps": max_steps,
        "written": written,
    }
    return content | {SEAL: seal_of(content)}


def listed_devices(devices: str) -> list[str]:
    return [name.strip() for name in devices.split(",") if name.strip()]


def device_problems(config: Config, table: CampaignTable) -> list[Problem]:
    """Reasons why the devices cannot be assigned to runs."""
    names = listed_devices(config.backend.devices)
    where = config.place("backend.devices")
    is_dealt_out = len(names) > max(1, table.devices_per_run)
    if is_dealt_out and not all(name.startswith("gpu:") and name[4:].isdigit() for name in names):
        what = f"{config.backend.devices!r}: several devices can be assigned to runs only if all of them are GPUs"
        fix = 'write "cpu", or for example "gpu:0,gpu:1"'
        return [Problem(code="device.not-gpus", where=where, what=what, fix=fix)]
    if 1 < len(names) < table.devices_per_run:
        what = f"{len(names)} devices are fewer than devices_per_run = {table.devices_per_run}"
        fix = "list more, or lower [campaign] devices_per_run"
        return [Problem(code="device.too-few", where=where, what=what, fix=fix)]
    return []


def devices_of_a_run(devices: str, table: CampaignTable) -> str:
    """`[backend] devices` as a run sees them: the GPUs assigned to it are visible to it as gpu:0, gpu:1, ...

    A single device is shared by all runs.
    """
    names = listed_devices(devices)
    if len(names) < 2:
        return devices
    return ",".join("cpu" if name == "cpu" else f"gpu:{n}" for n, name in enumerate(names[: table.devices_per_run]))


def gpus_per_run(config: Config, table: CampaignTable) -> int:
    """Number of the listed GPUs that each run takes; 0 on the CPU."""
    return sum(name.startswith("gpu:") for name in listed_devices(config.backend.devices)[: table.devices_per_run])


FLAGS = ("--new", "--beyond-plan")  # of the command; not overrides of keys


def warnings_of(campaign: Campaign) -> list[str]:
    """Settings that are legal but may surprise."""
    table, found = campaign.table, []
    workers, cores = campaign.workers, os.cpu_count() or 1
    if table.launcher == "subprocess" and workers > cores:
        found.append(f"{workers} runs at a time on {cores} cores; [campaign] max_workers limits them")
    num_devices = len(listed_devices(campaign.config.backend.devices))
    if 1 < num_devices < workers * table.devices_per_run:
        found.append(f"{workers} runs at a time share {num_devices} devices")
    if campaign.config.origin("training.seed").layer is Layer.FILE:
        found.append("[training] seed is not used: seeds come from [campaign] seeds")
    found += verdict_warnings(campaign)
    return found + [
        f"{each.label}: the campaign sets {', '.join(sorted(each.beaten))}, against its recipe"
        for each in campaign.conditions
        if each.beaten
    ]


def verdict_warnings(campaign: Campaign) -> list[str]:
    """A plan, or a number of seeds, with which no result could be a verdict; empty for a single condition."""
    from retrain.records.runs.registered import Spend
    from retrain.verdicts.study.comparison import Design
    from retrain.verdicts.study.looks import reach_of, reach_sentences

    table, plan = campaign.table, campaign.table.plan
    comparisons = len(campaign.effects()) or sum(each.condition.control is None for each in campaign.conditions) - 1
    if comparisons < 1:
        return []
    if plan is None:
        return reach_sentences(reach_of(Design.FIXED, num_seeds=len(table.seeds), comparisons=comparisons, alpha=0.05))
    design = Design.UNPAIRED if plan.test == "unpaired" else Design.PLANNED if plan.looks else Design.FIXED
    looks: dict[str, Any] = {"looks": plan.looks, "spend": Spend(plan.spend)}
    seeds = len(table.seeds)
    return reach_sentences(reach_of(design, num_seeds=seeds, comparisons=comparisons, alpha=plan.alpha, **looks))


def controls_of(campaign: Campaign) -> dict[str, int]:
    """The number of runs that each control costs."""
    found = Counter(each.condition.control for each in campaign.conditions if each.condition.control)
    return {str(control): count * len(campaign.table.seeds) for control, count in found.items()}


def explain(arguments: Sequence[str], plugins: Plugins) -> Mapping[str, Any]:
    campaign = load_campaign([argument for argument in arguments if argument not in FLAGS], plugins)
    config, table = campaign.config, campaign.table
    capabilities = declared_capabilities(config, plugins)
    origins = {path: row for path, row in value_rows(config).items() if path != "campaign.conditions"}
    recipes = {c.label: value_rows(c.config, of=Layer.RECIPE) for c in campaign.conditions}
    clipping = {c.label: unclipped(c.config, plugins, build_flow(c.config, plugins)) for c in campaign.conditions}
    clipping = {label: line for label, line in clipping.items() if line}
    content = {
        "mode": "campaign",
        "config": config.source,
        "backend": config.backend.backend,
        "backend_capabilities": capability_fields(capabilities, config.backend.backend, plugins),
        "conditions": campaign.labels,
        **({"clipping": clipping} if clipping else {}),
        "controls": controls_of(campaign),
        "recipes": {label: rows for label, rows in recipes.items() if rows},
        "seeds": table.seeds,
        "max_steps": campaign.max_steps,
        "total_runs": campaign.num_runs,
        "total_steps": sum(campaign.steps_of(c) for c in campaign.conditions) * len(table.seeds),
        "parallel": table.parallel,
        "max_workers": table.max_workers,
        "launcher": table.launcher,
        "retries": table.retries,
        "warnings": warnings_of(campaign),
        "plan": table.plan.content() if table.plan else None,
        "origins": origins,
    }
    return with_plugin_rows(content, config, plugins)
