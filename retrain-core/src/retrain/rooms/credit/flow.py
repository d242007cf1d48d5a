"""One configured flow of credit: names become specs, whatever form a plugin chose to give them in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError, raised_at
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.params import validated_params
from retrain.kernel.plugins.resolve import Found, resolve
from retrain.kernel.types import Kind
from retrain.rooms.credit.specs import AdvantageContext, AdvantageSpec, AlgorithmSpec, TransformSpec, UncertaintySpec

UNCERTAINTY_PARAMS = ("uncertainty_kind", "uncertainty_metric", "token_uncertainty")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditFlow:
    """Everything that turns scores and log-probabilities into token advantages, except the data."""

    advantage: AdvantageSpec
    transform: TransformSpec
    uncertainty: UncertaintySpec
    algorithm: AlgorithmSpec | None = None
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    mask_rho: float = 0.0
    params: Mapping[str, Any] = field(default_factory=dict)
    advantage_params: Mapping[str, Any] = field(default_factory=dict)
    transform_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def condition(self) -> str:
        """Label of the run in records and on the console: `advantage+transform`, or the algorithm's name."""
        return self.algorithm.name if self.algorithm else f"{self.advantage.name}+{self.transform.name}"

    @property
    def needs_planning(self) -> bool:
        """Whether planning masks must be made."""
        return self.transform.needs_planning or bool(self.algorithm and self.algorithm.needs_planning)

    @property
    def needs_entropy(self) -> bool:
        """Whether the sampler must return entropies."""
        return self.uncertainty.needs_entropy or bool(self.algorithm and self.algorithm.needs_entropy)

    @property
    def controller(self) -> str:
        """Name of the controller that gives lambda; empty when none is used."""
        used = self.transform.uses_sepa_controller or bool(self.algorithm and self.algorithm.uses_sepa_controller)
        return self.transform.controller if used else ""


def build_flow(config: Config, plugins: Plugins) -> CreditFlow:
    """The flow that `[algorithm]` names; every problem with names and parameters in one error."""
    problems: list[Problem] = []
    modes = {"advantage_mode": config.algorithm.advantage_mode, "transform_mode": config.algorithm.transform_mode}
    places = {name: config.place(f"algorithm.{name}") for name in (*modes, "algorithm_mode", "uncertainty_kind")}

    def get(kind: Kind, name: str, where: str) -> Found | None:
        try:
            return resolve(plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
        except RetrainError as error:
            problems.extend(error.problems)
            return None

    algorithm = None
    if config.algorithm.algorithm_mode:
        found = get(Kind.ALGORITHM, config.algorithm.algorithm_mode, places["algorithm_mode"])
        algorithm = as_algorithm(found) if found else None
        if algorithm and algorithm.compute_context is None:
            modes = {"advantage_mode": algorithm.advantage_mode, "transform_mode": algorithm.transform_mode}
    kind, kind_place = _uncertainty_name(config, places["uncertainty_kind"])
    parts = (
        get(Kind.ADVANTAGE, modes["advantage_mode"], places["advantage_mode"]),
        get(Kind.TRANSFORM, modes["transform_mode"], places["transform_mode"]),
        get(Kind.UNCERTAINTY, kind, kind_place),
    )
    advantage_params = _params(parts[0], config, "advantage_params", problems)
    transform_params = _params(parts[1], config, "transform_params", problems)
    if problems or None in parts:
        raise ConfigError(*problems)
    advantage, transform, uncertainty = (found for found in parts if found is not None)
    return CreditFlow(
        advantage=as_advantage(advantage),
        transform=as_transform(transform),
        uncertainty=as_uncertainty(uncertainty),
        algorithm=algorithm,
        gtpo_beta=config.value("gtpo.beta", 0.1),
        hicra_alpha=config.value("hicra.alpha", 0.2),
        mask_rho=config.algorithm.surprisal_mask_rho,
        params=config.algorithm.params,
        advantage_params=advantage_params,
        transform_params=transform_params,
    )


def as_advantage(found: Found) -> AdvantageSpec:
    """An `AdvantageSpec`, from a spec, a factory of one, or `f(rewards)`, `f(rewards, params)`, `f(ctx)`."""
    target = _spec_or_callable(found, AdvantageSpec, "advantage")
    if isinstance(target, AdvantageSpec):
        return target
    names = _positional(target)
    if names[:1] in (["ctx"], ["context"]):
        return AdvantageSpec(name=found.name, compute=target)
    if len(names) == 1:
        return AdvantageSpec(name=found.name, compute=lambda ctx: target(ctx.rewards_G))
    if len(names) == 2:
        return AdvantageSpec(name=found.name, compute=_with_params(target))
    raise _wrong_shape(found, "advantage", f"takes {len(names)} arguments", "(rewards), (rewards, params) or (ctx)")


def as_transform(found: Found) -> TransformSpec:
    """A `TransformSpec`, from a spec, a factory of one, or `f(ctx) -> TransformOutput`.

    A bare function gets planning masks and lambda: it may use both.
    """
    target = _spec_or_callable(found, TransformSpec, "transform")
    if isinstance(target, TransformSpec):
        return target
    if len(_positional(target)) != 1:
        raise _wrong_shape(found, "transform", "is not a function of one context", "f(ctx) -> TransformOutput")
    return TransformSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def as_uncertainty(found: Found) -> UncertaintySpec:
    """An `UncertaintySpec`, from a spec, a factory of one, or `f(ctx)`."""
    target = _spec_or_callable(found, UncertaintySpec, "uncertainty")
    if isinstance(target, UncertaintySpec):
        return target
    if len(_positional(target)) != 1:
        raise _wrong_shape(found, "uncertainty", "is not a function of one context", "f(ctx) -> one number per token")
    return UncertaintySpec(name=found.name, compute=target)


def as_algorithm(found: Found) -> AlgorithmSpec:
    """An `AlgorithmSpec`, from a spec, a factory of one, or `f(ctx) -> TransformOutput`."""
    target = _spec_or_callable(found, AlgorithmSpec, "algorithm")
    if isinstance(target, AlgorithmSpec):
        return target
    if len(_positional(target)) != 1:
        raise _wrong_shape(found, "algorithm", "is not a function of one context", "f(ctx) -> TransformOutput")
    return AlgorithmSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def _spec_or_callable(found: Found, spec: type, kind: str) -> Any:
    target = found.target
    if not isinstance(target, spec) and callable(target) and not _positional(target):
        target = _made(found, kind)
    if isinstance(target, spec) or callable(target):
        return target
    raise _wrong_shape(found, kind, f"is {type(target).__name__}", f"a {spec.__name__} or a function")


def _made(found: Found, kind: str) -> Any:
    """What a zero-argument factory returns; PluginError when it raises."""
    try:
        return found.target()
    except RetrainError:
        raise
    except Exception as error:
        what = f"{kind} {found.name!r} of {found.owner} raised {type(error).__name__}: {error}{raised_at(error)}"
        raise PluginError(Problem(what=what, fix="correct that line")) from error


def _positional(target: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(target).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def _with_params(target: Callable[..., Any]) -> Callable[[AdvantageContext], Any]:
    return lambda ctx: target(ctx.rewards_G, ctx.params)


def _wrong_shape(found: Found, kind: str, what: str, wanted: str) -> PluginError:
    return PluginError(Problem(what=f"{kind} {found.name!r} of {found.owner} {what}", fix=f"make it {wanted}"))


def _uncertainty_name(config: Config, place: str) -> tuple[str, str]:
    for name in UNCERTAINTY_PARAMS:
        if name in config.algorithm.transform_params:
            where = f"{config.place('algorithm.transform_params')}.{name}"
            return str(config.algorithm.transform_params[name]), where
    return config.algorithm.uncertainty_kind, place


def _params(found: Found | None, config: Config, key: str, problems: list[Problem]) -> Mapping[str, Any]:
    given: dict[str, Any] = dict(config.value(f"algorithm.{key}", {}))
    for name in UNCERTAINTY_PARAMS if key == "transform_params" else ():
        given.pop(name, None)
    if found is None or found.params is None:
        return given
    model, faults = validated_params(found.params, given, where=config.place(f"algorithm.{key}"))
    problems.extend(faults)
    return model.model_dump() if model else given
