"""Converts each form in which a plugin may give a part of the credit flow to its spec."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformSpec, UncertaintySpec
from retrain.kernel.errors import PluginError, Problem, RetrainError, raised_at
from retrain.kernel.plugins.resolve import Found

COMPUTE = ("compute", "compute_step", "compute_tokens")


def as_advantage(found: Found) -> AdvantageSpec:
    """An `AdvantageSpec`, from a spec, a factory of one, or `f(rewards)`, `f(rewards, params)`, `f(ctx)`, `f(step)`."""
    target = spec_or_callable(found, AdvantageSpec)
    if isinstance(target, AdvantageSpec):
        given = [name for name in COMPUTE if getattr(target, name) is not None]
        if len(given) != 1:
            has = f"has both {' and '.join(given[:2])}" if given else f"has none of {', '.join(COMPUTE)}"
            raise wrong_shape(found, AdvantageSpec, has, "an AdvantageSpec with one of them")
        if not target.needs_verdict and target.compute_tokens is None:
            what = "has needs_verdict=False without compute_tokens"
            raise wrong_shape(found, AdvantageSpec, what, "one that takes scores, or gives numbers by token")
        return target
    names = _positional(target)
    if names == ["step"]:
        return AdvantageSpec(name=found.name, compute_step=target)
    if names[:1] in (["ctx"], ["context"]):
        return AdvantageSpec(name=found.name, compute=target)
    if len(names) == 1:
        return AdvantageSpec(name=found.name, compute=lambda ctx: target(ctx.rewards_G))
    if len(names) == 2:
        return AdvantageSpec(name=found.name, compute=lambda ctx: target(ctx.rewards_G, ctx.params))
    what = f"takes {len(names)} arguments"
    raise wrong_shape(found, AdvantageSpec, what, "(rewards), (rewards, params), (ctx) or (step)")


def as_transform(found: Found) -> TransformSpec:
    """A `TransformSpec`, from a spec, a factory of one, or `f(ctx) -> TransformOutput`.

    A bare function gets planning masks and lambda, since it may use both.
    """
    target = spec_or_callable(found, TransformSpec, "f(ctx) -> TransformOutput")
    if isinstance(target, TransformSpec):
        return target
    return TransformSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def as_uncertainty(found: Found) -> UncertaintySpec:
    """An `UncertaintySpec`, from a spec, a factory of one, or `f(ctx)`."""
    target = spec_or_callable(found, UncertaintySpec, "f(ctx) -> one number per token")
    return target if isinstance(target, UncertaintySpec) else UncertaintySpec(name=found.name, compute=target)


def as_algorithm(found: Found) -> AlgorithmSpec:
    """An `AlgorithmSpec`, from a spec, a factory of one, or `f(ctx) -> TransformOutput`."""
    target = spec_or_callable(found, AlgorithmSpec, "f(ctx) -> TransformOutput")
    if isinstance(target, AlgorithmSpec):
        return target
    return AlgorithmSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def spec_or_callable(found: Found, spec: type, of_context: str = "") -> Any:
    """A part as its spec or as a function; PluginError for anything else.

    `of_context` is the only signature that its kind of function may have: one context.
    """
    target = found.target
    if not isinstance(target, spec) and callable(target) and not _positional(target):
        target = _made(found, spec)
    if isinstance(target, spec):
        return target
    if not callable(target):
        raise wrong_shape(found, spec, f"is {type(target).__name__}", f"a {spec.__name__} or a function")
    if of_context and len(_positional(target)) != 1:
        raise wrong_shape(found, spec, "is not a function of one context", of_context)
    return target


def wrong_shape(found: Found, spec: type, what: str, wanted: str) -> PluginError:
    """The error for a part that is not what its kind asks for."""
    return PluginError(Problem(what=f"{_kind(spec)} {found.name!r} of {found.owner} {what}", fix=f"make it {wanted}"))


def _made(found: Found, spec: type) -> Any:
    """What a zero-argument factory returns; PluginError when it raises."""
    try:
        return found.target()
    except RetrainError:
        raise
    except Exception as error:
        what = f"{_kind(spec)} {found.name!r} of {found.owner} raised {type(error).__name__}: {error}{raised_at(error)}"
        raise PluginError(Problem(what=what, fix="correct that line")) from error


def _kind(spec: type) -> str:
    return spec.__name__.removesuffix("Spec").lower()


def _positional(target: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(target).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
