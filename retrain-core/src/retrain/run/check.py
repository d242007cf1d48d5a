"""Checks the names and parameters of a configuration against the installed plugins, without importing any part."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel

from retrain.credit.configured_loss import KEY as LOSS
from retrain.credit.configured_loss import check_clips, check_loss, selected_loss
from retrain.credit.flow import CreditFlow, build_flow, group_problem
from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config, Layer
from retrain.kernel.declared import Kind
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.plugins.first_party import promised_default, promised_options
from retrain.kernel.plugins.resolve import declared_capabilities, problem_with, validated_params
from retrain.kernel.registry import Plugins
from retrain.records.identity.collect import Identity, collect_identity
from retrain.records.identity.inputs import CODE, PARAMS, declared_sorts
from retrain.run.steps.staleness import staleness_problems
from retrain.run.steps.updates import Course
from retrain.run.tables import about_recipe
from retrain.tasks.child.process import in_copy
from retrain.tasks.scoring.build import PARAMS as REWARD_PARAMS
from retrain.tasks.scoring.build import brings_tasks, reward_params

LOG = logging.getLogger("retrain")
# The trial takes milliseconds, but a part may load a library first.
TRIAL_S = 5.0
# Every run needs these, so their defaults must resolve too; parts of the credit flow are light and resolved completely.
ALWAYS = {"backend.backend": Kind.BACKEND, "data.source": Kind.DATA_SOURCE, "reward.type": Kind.REWARD}
# Kinds whose options are checked as they stand in the configuration.
PLAIN = (Kind.SAMPLER, Kind.INFERENCE_ENGINE, Kind.PLANNING_DETECTOR)
# Other kinds may read options that they do not declare; a part of these has only the options that it declares.
DECLARES_ALL = (Kind.INFERENCE_ENGINE, Kind.PLANNING_DETECTOR, Kind.REWARD)
CHECKED_ELSEWHERE = (Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.ALGORITHM, Kind.LOSS)


def check(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry], *, will_run: bool = True
) -> tuple[CreditFlow | None, list[Problem]]:
    """The credit flow, if it can be built, and every problem found without data, model or heavy imports.

    Unless it `will_run`, libraries that only a run needs may be missing.
    """
    problems = check_names(config, plugins, tables) + check_options(config, plugins) + check_clips(config, plugins)
    if config.algorithm.recipe:
        from retrain.credit.recipes import mode_problems

        problems += mode_problems(config, plugins)
    problems += check_loss(config, plugins)
    problems += check_schedule(config)
    if config.data.tasks:
        problems += task_problems(config, plugins, tables, will_run=will_run)
    problems += staleness_problems(config, declared_capabilities(config, plugins))
    for found in plugins.notify("retrain_check_config", config=config, plugins=plugins, will_run=will_run):
        problems += found or ()
    try:
        flow = build_flow(config, plugins)
    except RetrainError as error:
        problems += [*_beyond_backend(config, plugins, None), *_with_notes(error.problems, config, plugins)]
        return None, about_recipe(problems, config, plugins)
    if selected_loss(config, plugins) or flow.needs_squared_probs:
        from retrain.credit.fit import fit_problems  # the default loss takes any credit

        problems += fit_problems(config, plugins, flow)
    return flow, about_recipe([*problems, *_beyond_backend(config, plugins, flow)], config, plugins)


def task_problems(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry], *, will_run: bool
) -> list[Problem]:
    """Every problem with `[[data.tasks]]`: of the tables, and of each task as of a run that has only this one."""
    from retrain.tasks.task_tables import OF_TASKS, read_tasks  # most runs have one task

    tasks, problems = read_tasks(config)
    for each in tasks:
        own = {name: tables[name] for name in OF_TASKS if name in tables}
        found = check_names(each.config, plugins, own) + check_options(each.config, plugins)
        for more in plugins.notify("retrain_check_config", config=each.config, plugins=plugins, will_run=will_run):
            found += more or ()
        # The others are problems of the run, and are reported with it.
        problems += [problem for problem in found if each.place in problem.where]
    return problems


def check_run(config: Config, plugins: Plugins, flow: CreditFlow) -> list[Problem]:
    """Problems that matter only when training starts: groups too small for the advantage, parts of credit that fail."""
    if flow.is_custom:
        return []
    if problem := group_problem(config, flow):
        return [problem]
    capabilities = declared_capabilities(config, plugins)
    provides_entropy = capabilities is None or capabilities.provides_entropy

    def tried() -> list[dict[str, str]]:
        # Imported only in the copy, so that a part leaves nothing behind in this process.
        from retrain.credit.trial import try_flow

        return [asdict(problem) for problem in try_flow(config, flow, provides_entropy=provides_entropy)]

    found = in_copy(tried, timeout_s=TRIAL_S)
    if found is None:
        LOG.warning("%s could not be tried on synthetic groups: the trial did not end by itself", flow.condition)
    return [Problem(code=fields.pop("code"), **fields) for fields in found or ()]


def _with_notes(problems: Sequence[Problem], config: Config, plugins: Plugins) -> list[Problem]:
    """Add to a name of the public package a note on its replacement."""
    # Only a faulty configuration pays for this import.
    from retrain.run.public_package import missing_name

    kinds = {**CREDIT, "algorithm.algorithm_mode": Kind.ALGORITHM}
    found = (missing_name(plugins, kind, config.value(path, ""), config.place(path)) for path, kind in kinds.items())
    known = {(problem.where, problem.what): problem for problem in found if problem}
    return [known.get((problem.where, problem.what), problem) for problem in problems]


def _beyond_backend(config: Config, plugins: Plugins, flow: CreditFlow | None) -> Iterator[Problem]:
    """Entropies that the sampler cannot provide, and training of all weights where only adapters are trained."""
    capabilities, backend = declared_capabilities(config, plugins), config.backend.backend
    if capabilities is None:
        return
    if flow and flow.needs_entropy and not capabilities.provides_entropy:
        sampler = f"backend {backend!r} with engine {config.value('inference.engine', 'pytorch')!r}"
        what = f"{flow.uncertainty.name!r} needs entropies, and {sampler} cannot provide them"
        fix = 'use uncertainty_kind = "surprisal", or backend = "local" with engine = "pytorch"'
        where = config.place("algorithm.uncertainty_kind")
        yield Problem(code="backend.no-entropies", where=where, what=what, fix=fix)
    if not config.model.lora_rank and not capabilities.all_weights:
        what = f"lora_rank = 0 trains all weights, and backend {backend!r} trains adapters only"
        fix = 'set a rank, such as 32, or use backend = "local"'
        yield Problem(code="backend.adapters-only", where=config.place("model.lora_rank"), what=what, fix=fix)


def wanted_names(config: Config, tables: Mapping[str, TableEntry]) -> dict[str, tuple[Kind, str]]:
    """Kind and name of each part that the configuration selects, by its key, except loss and credit flow."""
    wanted: dict[str, tuple[Kind, str]] = {}
    for path, kind in ALWAYS.items():
        wanted[path] = (kind, chosen_name(config, path, kind))
    for table, entry in tables.items():
        for key in keys_of(table, entry.model, entry.traits.flag_prefix):
            value = config.value(key.path, "")
            # Empty is a choice only where the default is empty too.
            named = value or key.default
            # All names of a list are used, even if the list is the default.
            is_set = isinstance(value, list) or config.origin(key.path) != DEFAULT_ORIGIN
            if key.names and key.names not in CHECKED_ELSEWHERE and named and is_set:
                for name in [value] if isinstance(value, str) else value:  # one name, or names with their weights
                    wanted[key.path if name is value else f"{key.path} {name}"] = (key.names, name)
            if key.selects and value:
                wanted[key.path] = key.selects
    return wanted


def chosen_name(config: Config, path: str, kind: Kind) -> str:
    """The name under a key; the documented default if the distribution that supplies it is not installed."""
    value = config.value(path, "")
    return value or (promised_default(kind) if config.origin(path) == DEFAULT_ORIGIN else "")


def check_names(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> list[Problem]:
    """A problem for every name that no plugin provides, except loss and credit flow, and for a module in two files."""
    wanted = wanted_names(config, tables)
    for table in {path.partition(".")[0] for path in config.origins}:
        # Two plugins may own one table, and no key of it would show that.
        wanted[f"{table}."] = (Kind.CONFIG_TABLE, table)
    found = [name_problem(config, plugins, path, kind, name) for path, (kind, name) in wanted.items()]
    for table, entry in tables.items():
        for path in (f"{table}.{name}" for name, sort in declared_sorts(entry.model).items() if sort == CODE):
            module = str(config.value(path, ""))
            if module and not module.endswith(".py"):
                from retrain.kernel.plugins.dotted_path import ambiguity  # few runs name a module

                found.append(ambiguity(f"module {module!r}", module, where=config.place(path)))
    return [problem for problem in found if problem is not None]


def name_problem(config: Config, plugins: Plugins, path: str, kind: Kind, name: str) -> Problem | None:
    """The problem with the name of a part under a key: no plugin provides it, or several do."""
    # A path may name one entry of a key that holds several: `reward.weights math`.
    key, _, entry = path.partition(" ")
    where = f"{config.place(key)} {entry}".rstrip()
    problem = problem_with(plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
    if problem is None or plugins.find(kind, name):
        return problem
    # Only a faulty configuration needs the table of public names.
    from retrain.run.public_package import missing_name

    return missing_name(plugins, kind, name, where) or problem


def check_options(config: Config, plugins: Plugins) -> list[Problem]:
    """Problems with the options of parts outside the flow of credit, judged by the models that these declare."""
    problems = []
    for name, (backend, default) in sorted(_options_of_others(config, plugins).items()):
        if config.backend.options[name] != default:
            where = f"{config.place('backend.options')}.{name}"
            what = f"belongs to backend {backend!r}, not to {config.backend.backend!r}"
            fix = f"remove it, or keep the default {default!r}"
            problems.append(Problem(code="backend.foreign-option", where=where, what=what, fix=fix))
    weights: Mapping[str, float] = config.reward.weights
    rewards = list(weights) or [config.reward.type]
    given: Mapping[str, Any] = config.value(REWARD_PARAMS, {}) if weights else {}
    for name in (name for name, own in given.items() if name not in weights or not isinstance(own, Mapping)):
        what = "is not a table for a reward in weights"
        fix = "with weights, params holds a table for each reward's name: remove it, or correct the name"
        where = f"{config.place(REWARD_PARAMS)}.{name}"
        problems.append(Problem(code="reward.unknown-params", where=where, what=what, fix=fix))
    for kind, name, path, options in (
        (Kind.BACKEND, config.backend.backend, "backend.options", backend_options(config, plugins)),
        (Kind.DATA_SOURCE, config.data.source, "data.options", config.data.options),
        *((kind, config.value(key, ""), path, config.value(path, {})) for kind, key, path in PARAMS if kind in PLAIN),
        *((Kind.REWARD, name, REWARD_PARAMS, reward_params(config, name)) for name in rewards),
    ):
        entries = plugins.find(kind, name)
        try:
            model = entries[0].spec.load_params() if len(entries) == 1 else None
        except Exception as error:
            # Whatever its model raises is the plugin's own fault, so it is reported with its owner.
            what = f"the parameters of {kind} {name!r} failed to load: {type(error).__name__}: {error}"
            fix = f"repair or reinstall {entries[0].owner.distribution}"
            problems.append(Problem(code="plugin.broken-params", where=config.place(path), what=what, fix=fix))
            continue
        if options and entries and model is None and kind in DECLARES_ALL:
            what, fix = f"{kind} {name!r} takes no parameters", f"remove {', '.join(options)}"
            problems.append(Problem(code="plugin.no-parameters", where=config.place(path), what=what, fix=fix))
        if model and not options.keys() <= model.model_fields.keys():
            former = _former_options(config, path, options.keys() - model.model_fields.keys())
            options = {name: value for name, value in options.items() if name not in former}
            problems += former.values()
        problems += validated_params(model, options, where=config.place(path))[1]
    return problems


def _former_options(config: Config, path: str, unknown: Iterable[str]) -> dict[str, Problem]:
    # Imported late: a correct configuration has no unknown option.
    from retrain.run.public_package import note_on

    where = config.place(path)
    return {
        name: Problem(
            code="config.public-name",
            where=f"{where}.{name}",
            what=f"unknown option {name!r}",
            fix=f"{note}; `retrain migrate-config` lists all such names",
        )
        for name in sorted(unknown)
        if (note := note_on(f"{path}.{name}"))
    }


def check_schedule(config: Config) -> list[Problem]:
    """A problem with `min_lr_ratio` under a constant learning rate."""
    course, path = Course.of(config), "optimizer.min_lr_ratio"
    if not course.min_lr_ratio or not course.is_constant:
        return []
    what = "has no effect: the learning rate is constant, without warm-up"
    fix = 'write schedule = "cosine" as well, or remove it'
    return [Problem(code="config.no-effect", where=config.place(path), what=what, fix=fix)]


def value_rows(config: Config, *, of: Layer | None = None) -> dict[str, dict[str, Any]]:
    """Every non-default value, or the values of one layer, with its origin, by path."""
    values, rows = config.as_dict(), {}
    for path, origin in sorted(config.origins.items()):
        table, _, name = path.partition(".")
        if of in (None, origin.layer):
            rows[path] = {"value": values[table].get(name), "origin": str(origin)}
    return rows


def with_plugin_rows(content: Mapping[str, Any], config: Config, plugins: Plugins) -> dict[str, Any]:
    """Add the rows of plugins to an explanation; a name that is there already keeps its value."""
    found = dict(content)
    for rows in plugins.notify("retrain_explain", config=config, plugins=plugins):
        found |= {name: value for name, value in (rows or {}).items() if name not in found}
    return found


def backend_options(config: Config, plugins: Plugins) -> dict[str, Any]:
    """`[backend.options]` without the options of other backends.

    The documented full configuration holds some at their defaults, whichever backend it selects; other values are
    refused.
    """
    foreign = _options_of_others(config, plugins)
    return {name: value for name, value in config.backend.options.items() if name not in foreign}


def _options_of_others(config: Config, plugins: Plugins) -> dict[str, tuple[str, Any]]:
    """The given options that only another backend declares: that backend and its default."""
    chosen = config.backend.backend
    own = _declared_options(plugins, chosen)
    if not set(config.backend.options) - set(own or ()):
        return {}
    declared: dict[str, Mapping[str, Any]] = dict(promised_options())
    # A backend that declares nothing may take options of any name.
    if own is not None:
        others = [entry.spec.name for entry in plugins.registered(Kind.BACKEND)]
        declared |= {name: found for name in others if (found := _declared_options(plugins, name)) is not None}
    return {
        option: (backend, defaults[option])
        for backend, defaults in declared.items()
        if backend != chosen
        for option in config.backend.options
        if option in defaults and option not in (own or ())
    }


def _declared_options(plugins: Plugins, backend: str) -> Mapping[str, Any] | None:
    """The options that a backend declares, with their defaults; None when it declares no model, or a broken one."""
    entries = plugins.find(Kind.BACKEND, backend)
    try:
        model: type[BaseModel] | None = entries[0].spec.load_params() if len(entries) == 1 else None
    except Exception:
        # It is reported when that backend is selected.
        return None
    return None if model is None else {name: info.default for name, info in model.model_fields.items()}


DOTTED = "dotted path"
SINGLE = ("data.source", "reward.type")  # neither is used where an environment brings tasks and scoring
CREDIT = {
    "algorithm.advantage_mode": Kind.ADVANTAGE,
    "algorithm.transform_mode": Kind.TRANSFORM,
    "algorithm.uncertainty_kind": Kind.UNCERTAINTY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A part by the key that names it.

    `source` is its distribution and version, or `dotted path`; empty when no plugin provides it, as `problem` says.
    """

    key: str
    kind: Kind
    name: str
    source: str
    distribution: str
    problem: Problem | None


def selected_parts(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> list[Selected]:
    """Every part that a run with this configuration builds because a key names it, in the order of the kinds."""
    wanted = wanted_names(config, tables)
    if mode := config.algorithm.algorithm_mode:
        wanted["algorithm.algorithm_mode"] = (Kind.ALGORITHM, mode)
    else:
        wanted |= {path: (kind, chosen_name(config, path, kind)) for path, kind in CREDIT.items()}
    if loss := selected_loss(config, plugins):
        wanted[LOSS] = (Kind.LOSS, loss)
    if engine := config.inference.engine:
        wanted["inference.engine"] = (Kind.INFERENCE_ENGINE, engine)
    if config.data.tasks or brings_tasks(config, plugins):
        wanted = {path: part for path, part in wanted.items() if path not in SINGLE}
    order = list(Kind)
    found = [_selected(config, plugins, path, *part) for path, part in wanted.items()]
    if config.data.tasks:
        from retrain.tasks.task_tables import OF_TASKS, read_tasks

        for task in read_tasks(config)[0]:
            parts = wanted_names(task.config, {name: tables[name] for name in OF_TASKS if name in tables}).items()
            found += [
                _selected(task.config, plugins, key, *part)
                for key, part in parts
                if key.split(".")[0] in OF_TASKS and not (key in SINGLE and brings_tasks(task.config, plugins))
            ]
    return sorted(found, key=lambda part: order.index(part.kind))


def identity_of(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> Identity:
    """Identity of a run with this configuration: code, data, model files, plugins."""
    dotted = [part.name for part in selected_parts(config, plugins, tables) if part.source == DOTTED]
    return collect_identity(config, plugins, tables, dotted)


def _selected(config: Config, plugins: Plugins, path: str, kind: Kind, name: str) -> Selected:
    problem = name_problem(config, plugins, path, kind, name)
    source = distribution = ""
    if entries := plugins.find(kind, name):
        owner = entries[0].owner
        source, distribution = str(owner), owner.distribution
    elif problem is None:
        source = DOTTED
    return Selected(key=path, kind=kind, name=name, source=source, distribution=distribution, problem=problem)
