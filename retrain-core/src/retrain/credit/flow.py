"""One configured flow of credit: the names of `[algorithm]` become specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from retrain.credit.checks import as_advantage, as_algorithm, as_transform, as_uncertainty
from retrain.credit.specs import (
    AdvantageSpec,
    AlgorithmSpec,
    CreditStage,
    Numbers,
    TransformContext,
    TransformOutput,
    TransformSpec,
    UncertaintySpec,
)
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Needs
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.plugins.resolve import Found, problem_with, resolve, validated_params
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

GTPO, HICRA, TOP_RHO = "gtpo", "hicra", "top_rho"
# Stages come with these transforms, so another distribution replaces one by registering that name.
CARRIERS = {GTPO: "gtpo", HICRA: "gtpo_hicra", TOP_RHO: "gtpo"}
Whole = Callable[[TransformContext], TransformOutput | Sequence[Numbers]]
UNCERTAINTY_PARAMS = ("uncertainty_kind", "uncertainty_metric", "token_uncertainty")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditFlow:
    """Everything that turns scores and log-probabilities into token advantages, except the data.

    `stages` holds the functions of the installed stages, by name. `gtpo_beta` and `hicra_alpha` are None when no
    installed distribution provides their stage. `is_custom` says that a plugin's own `Algorithm` assigns credit: then
    only `condition` and `needs_entropy` of the flow are used. `batch_norm` is over each of `norm_tasks` by itself, or
    over the step without them. `reward_weights` is `[reward.weights]`; `recipe` is the
    label of a run with a recipe.
    """

    advantage: AdvantageSpec
    transform: TransformSpec
    uncertainty: UncertaintySpec
    algorithm: AlgorithmSpec | None = None
    stages: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    gtpo_beta: float | None = None
    hicra_alpha: float | None = None
    mask_rho: float = 0.0
    batch_norm: bool = False
    norm_tasks: tuple[str, ...] = ()
    advantage_clip: float = 0.0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    advantage_params: Mapping[str, Any] = field(default_factory=dict)
    transform_params: Mapping[str, Any] = field(default_factory=dict)
    is_custom: bool = False
    recipe: str = ""

    @property
    def condition(self) -> str:
        """Label of the run in records and on the console: recipe, algorithm, or `advantage+transform`."""
        return self.recipe or self.name

    @property
    def name(self) -> str:
        return self.algorithm.name if self.algorithm else f"{self.advantage.name}+{self.transform.name}"

    @property
    def whole(self) -> Whole | None:
        """The function of an algorithm that replaces advantage, transform and stages, if there is one."""
        return self.algorithm.compute_context if self.algorithm else None

    @property
    def needs_planning(self) -> bool:
        return self.transform.needs_planning or bool(self.algorithm and self.algorithm.needs_planning)

    @property
    def needs_entropy(self) -> bool:
        return self.uncertainty.needs_entropy or bool(self.algorithm and self.algorithm.needs_entropy)

    @property
    def needs_text(self) -> bool:
        return self.transform.needs_text or bool(self.algorithm and self.algorithm.needs_text)

    @property
    def needs_token_rewards(self) -> bool:
        if self.algorithm and self.whole:
            return self.algorithm.needs_token_rewards
        return self.transform.needs_token_rewards or self.advantage.needs_token_rewards

    @property
    def needs_verdict(self) -> bool:
        """True if only completions with a verdict are trained."""
        return self.advantage.needs_verdict or self.whole is not None

    @property
    def parts(self) -> frozenset[str]:
        """The parts that keys may name as their readers (`needs` of `key`).

        A whole function is given planning masks and the strengths of all stages, and may read them; of a plugin's own
        `Algorithm` it is unknown, so it counts as reading whatever does not belong to another part.
        """
        is_whole = self.whole is not None
        takes_all = is_whole or self.transform.compute_context is not None
        found = {
            "advantage": not is_whole,
            "transform": not is_whole,
            "top-rho mask": not self.is_custom,
            "stage gtpo": takes_all or self.transform.use_gtpo,
            "stage hicra": takes_all or self.transform.apply_hicra,
            "planning detector": self.is_custom or self.needs_planning,
            f"controller {self.controller}": bool(self.controller),
        }
        return frozenset(name for name, is_used in found.items() if is_used)

    @property
    def controller(self) -> str:
        """Name of the controller that gives lambda; empty when none is used."""
        used = self.transform.uses_sepa_controller or bool(self.algorithm and self.algorithm.uses_sepa_controller)
        return self.transform.controller if used else ""


def build_flow(config: Config, plugins: Plugins) -> CreditFlow:
    """The flow that `[algorithm]` names; every problem with names and parameters in one error."""
    flow = _build(config, plugins)
    if not config.algorithm.recipe:
        return flow
    from retrain.credit.recipes import recipe_label

    return replace(flow, recipe=recipe_label(config, plugins))


def _build(config: Config, plugins: Plugins) -> CreditFlow:
    problems: list[Problem] = []
    modes = {"advantage_mode": config.algorithm.advantage_mode, "transform_mode": config.algorithm.transform_mode}
    places = {name: config.place(f"algorithm.{name}") for name in (*modes, "algorithm_mode")}

    def get(kind: Kind, name: str, where: str) -> Found | None:
        try:
            return resolve(plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
        except RetrainError as error:
            problems.extend(error.problems)
            return None

    algorithm = None
    if config.algorithm.algorithm_mode:
        found = get(Kind.ALGORITHM, config.algorithm.algorithm_mode, places["algorithm_mode"])
        if found and isinstance(found.traits, Needs):
            return _custom_flow(found, found.traits, config)
        algorithm = as_algorithm(found) if found else None
        if algorithm and algorithm.compute_context is None:
            modes = {"advantage_mode": algorithm.advantage_mode, "transform_mode": algorithm.transform_mode}
    kind, kind_place = uncertainty_name(config)
    parts = (
        get(Kind.ADVANTAGE, modes["advantage_mode"], places["advantage_mode"]),
        get(Kind.TRANSFORM, modes["transform_mode"], places["transform_mode"]),
        get(Kind.UNCERTAINTY, kind, kind_place),
    )
    advantage_params = _params(parts[0], config, "advantage_params", problems)
    transform_params = _params(parts[1], config, "transform_params", problems)
    transform = _transform(parts[1], problems)
    is_whole = bool(algorithm and algorithm.compute_context)
    stages = _stages(config, plugins, transform, problems, is_whole=is_whole)
    if parts[0] and transform and transform.compute_context and not is_whole:
        problems += _by_token_problems(parts[0], transform, places["transform_mode"])
    if problems or None in parts or transform is None:
        raise ConfigError(*problems)
    advantage, _, uncertainty = (found for found in parts if found is not None)
    return CreditFlow(
        advantage=as_advantage(advantage),
        transform=transform,
        uncertainty=as_uncertainty(uncertainty),
        algorithm=algorithm,
        stages={name: stage.apply for name, stage in stages.items()},
        gtpo_beta=stages[GTPO].strength(config) if GTPO in stages else None,
        hicra_alpha=stages[HICRA].strength(config) if HICRA in stages else None,
        mask_rho=config.algorithm.surprisal_mask_rho,
        batch_norm=config.algorithm.batch_norm or config.algorithm.normalise_by == "task",
        norm_tasks=config.data.task_names if config.algorithm.normalise_by == "task" else (),
        advantage_clip=config.algorithm.advantage_clip,
        reward_weights=config.reward.weights,
        params=config.algorithm.params,
        advantage_params=advantage_params,
        transform_params=transform_params,
    )


def _transform(found: Found | None, problems: list[Problem]) -> TransformSpec | None:
    """The transform's spec; its fault is reported together with the other problems, if there are any."""
    try:
        return as_transform(found) if found else None
    except RetrainError as error:
        if not problems:
            raise
        problems.extend(error.problems)
        return None


def _by_token_problems(found: Found, transform: TransformSpec, where: str) -> list[Problem]:
    """A whole-group transform takes one advantage per completion, so it cannot follow one per token."""
    if as_advantage(found).compute_tokens is None:
        return []
    what = f"transform {transform.name!r} takes one advantage per completion, and {found.name!r} gives one per token"
    fix = 'use transform_mode = "none", or one made of stages, such as "gtpo"'
    return [Problem(code="credit.transform-by-group", where=where, what=what, fix=fix)]


def _stages(
    config: Config, plugins: Plugins, transform: TransformSpec | None, problems: list[Problem], *, is_whole: bool
) -> dict[str, CreditStage]:
    """The stages that are switched on, and the other installed ones: a whole function may read their strength."""
    wanted: dict[str, tuple[str, str]] = {}  # stage -> key that switched it on, and its user
    if transform is not None and transform.compute_context is None and not is_whole:
        user = f"transform {transform.name!r}"
        wanted |= {GTPO: ("algorithm.transform_mode", user)} if transform.use_gtpo else {}
        wanted |= {HICRA: ("algorithm.transform_mode", user)} if transform.apply_hicra else {}
    if config.algorithm.surprisal_mask_rho > 0.0:
        wanted[TOP_RHO] = ("algorithm.surprisal_mask_rho", "the top-rho mask")
    stages = {}
    for name in CARRIERS:
        path, user = wanted.get(name, ("", ""))
        try:
            stages[name] = find_stage(plugins, name, where=config.place(path), needed_by=user)
        except RetrainError as error:
            # A stage that is not switched on may be missing: nothing calls it.
            problems.extend(error.problems if user else ())
    return stages


def find_stage(plugins: Plugins, name: str, *, where: str, needed_by: str) -> CreditStage:
    """The stage `name`; PluginError names the distribution that provides it when it is missing.

    `where` is the place of the setting that switches it on, `needed_by` the part that uses it: for the message.
    """
    carrier = CARRIERS[name]
    problem = problem_with(plugins, Kind.TRANSFORM, carrier, where=where)
    if problem is not None:
        what = f"{needed_by} needs stage {name!r}, and there is {problem.what}"
        raise PluginError(replace(problem, what=what))
    found = resolve(plugins, Kind.TRANSFORM, carrier, where=where)
    stage = as_transform(found).stages.get(name)
    if stage is None:
        what = f"transform {carrier!r} of {found.owner} carries no stage {name!r}"
        fix = f"give its TransformSpec stages={{{name!r}: CreditStage(...)}}, or leave out {found.owner.distribution}"
        raise PluginError(Problem(code="plugin.no-stage", where=where, what=what, fix=fix))
    return stage


def _custom_flow(found: Found, needs: Needs, config: Config) -> CreditFlow:
    """The flow of a plugin's own `Algorithm`; ConfigError for parameters that its model refuses."""
    _, problems = validated_params(found.params, config.algorithm.params, where=config.place("algorithm.params"))
    if problems:
        raise ConfigError(*problems)

    # The specs only name the algorithm; a caller that forgets `is_custom` must not get zeros.
    def unused(*_: object) -> Any:
        raise NotImplementedError(f"algorithm {found.name!r} assigns credit itself")

    return CreditFlow(
        advantage=AdvantageSpec(name=found.name, compute=unused),
        transform=TransformSpec(name=found.name, compute_context=unused),
        uncertainty=UncertaintySpec(name=found.name, compute=unused),
        algorithm=AlgorithmSpec(
            name=found.name,
            compute_context=unused,
            needs_entropy=needs.entropy,
            needs_token_rewards=needs.token_rewards,
        ),
        params=config.algorithm.params,
        is_custom=True,
    )


def group_problem(config: Config, flow: CreditFlow) -> Problem | None:
    """The problem with groups of one, for an advantage that compares the completions of a group."""
    if config.training.group_size > 1 or flow.whole or not flow.advantage.needs_group:
        return None
    what = f"advantage {flow.advantage.name!r} compares the completions of a group, and group_size is 1"
    why = "every advantage would be 0, so nothing would be trained"
    fix = "set group_size to 2 or more"
    return Problem(code="credit.group-of-one", where=config.place("training.group_size"), what=what, why=why, fix=fix)


def uncertainty_name(config: Config) -> tuple[str, str]:
    """The configured kind of uncertainty and the place that names it; a transform's parameters come first."""
    for name in UNCERTAINTY_PARAMS:
        if name in config.algorithm.transform_params:
            where = f"{config.place('algorithm.transform_params')}.{name}"
            return str(config.algorithm.transform_params[name]), where
    return config.algorithm.uncertainty_kind, config.place("algorithm.uncertainty_kind")


def _params(found: Found | None, config: Config, key: str, problems: list[Problem]) -> Mapping[str, Any]:
    given: dict[str, Any] = dict(config.value(f"algorithm.{key}", {}))
    for name in UNCERTAINTY_PARAMS if key == "transform_params" else ():
        given.pop(name, None)
    if found is None or found.params is None:
        return given
    model, faults = validated_params(found.params, given, where=config.place(f"algorithm.{key}"))
    problems.extend(faults)
    return model.model_dump() if model else given
