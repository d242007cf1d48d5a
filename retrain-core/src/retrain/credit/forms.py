"""Converts each form in which a plugin may give a part of the credit flow to its spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from retrain.credit.specs import AdvantageContext, AdvantageSpec, AlgorithmSpec, TransformSpec, UncertaintySpec
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.losses import AGGREGATIONS, LossSpec
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError, raised_at
from retrain.kernel.plugins.build import validated_params
from retrain.kernel.plugins.resolve import Found, resolve
from retrain.kernel.registry import Plugins

COMPUTE = ("compute", "compute_step", "compute_tokens")


def as_advantage(found: Found) -> AdvantageSpec:
    """An `AdvantageSpec`, from a spec, a factory of one, or `f(rewards)`, `f(rewards, params)`, `f(ctx)`, `f(step)`."""
    target = _spec_or_callable(found, AdvantageSpec, "advantage")
    if isinstance(target, AdvantageSpec):
        given = [name for name in COMPUTE if getattr(target, name) is not None]
        if len(given) != 1:
            has = f"has both {' and '.join(given[:2])}" if given else f"has none of {', '.join(COMPUTE)}"
            raise _wrong_shape(found, "advantage", has, "an AdvantageSpec with one of them")
        if not target.needs_verdict and target.compute_tokens is None:
            what = "has needs_verdict=False without compute_tokens"
            raise _wrong_shape(
                found, "advantage", what, "an AdvantageSpec that takes scores, or gives numbers by token"
            )
        return target
    names = _positional(target)
    if names == ["step"]:
        return AdvantageSpec(name=found.name, compute_step=target)
    if names[:1] in (["ctx"], ["context"]):
        return AdvantageSpec(name=found.name, compute=target)
    if len(names) == 1:
        return AdvantageSpec(name=found.name, compute=lambda ctx: target(ctx.rewards_G))
    if len(names) == 2:
        return AdvantageSpec(name=found.name, compute=_with_params(target))
    forms = "(rewards), (rewards, params), (ctx) or (step)"
    raise _wrong_shape(found, "advantage", f"takes {len(names)} arguments", forms)


def as_transform(found: Found) -> TransformSpec:
    """A `TransformSpec`, from a spec, a factory of one, or `f(ctx) -> TransformOutput`.

    A bare function gets planning masks and lambda, since it may use both.
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


def as_loss(found: Found) -> LossSpec:
    """A `LossSpec`, from a spec, a factory of one, or `f(ctx) -> one term per token`."""
    target = _spec_or_callable(found, LossSpec, "loss")
    if isinstance(target, LossSpec):
        if target.aggregation not in AGGREGATIONS:
            what = f"averages by {target.aggregation!r}"
            raise _wrong_shape(found, "loss", what, "one of: " + ", ".join(AGGREGATIONS))
        return target
    if len(_positional(target)) != 1:
        raise _wrong_shape(found, "loss", "is not a function of one context", "f(ctx) -> one term per token")
    return LossSpec(name=found.name, compute=target)


def find_loss(config: Config, plugins: Plugins) -> tuple[LossSpec, Any]:
    """The loss that `[algorithm]` names, imported now, and its parameters: as its model, or as given if it has none."""
    name, given = config.algorithm.loss, dict[str, Any](config.algorithm.loss_params)
    where, paths = config.place("algorithm.loss"), config.plugins.search_paths
    found = resolve(plugins, Kind.LOSS, name, where=where, search_paths=paths)
    params, problems = validated_params(found.params, given, where=config.place("algorithm.loss_params"))
    if problems:
        raise ConfigError(*problems)
    return as_loss(found), given if params is None else params


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
