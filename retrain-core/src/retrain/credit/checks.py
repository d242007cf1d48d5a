"""Checks on the parts that plugins give credit: their form, and the numbers that enter and leave them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformSpec, UncertaintySpec
from retrain.kernel.errors import CreditError, PluginError, Problem, RetrainError, raised_at
from retrain.kernel.plugins.resolve import Found
from retrain.kernel.types import Floats

COMPUTE = ("compute", "compute_step", "compute_tokens")


def as_advantage(found: Found) -> AdvantageSpec:
    """Convert a spec, a factory of one, or `f(rewards)`, `f(rewards, params)`, `f(ctx)`, `f(step)`."""
    target = spec_or_callable(found, AdvantageSpec)
    if isinstance(target, AdvantageSpec):
        given = [name for name in COMPUTE if getattr(target, name) is not None]
        if len(given) != 1:
            has = f"has both {' and '.join(given[:2])}" if given else f"lacks all of {', '.join(COMPUTE)}"
            raise wrong_shape(found, AdvantageSpec, has, "an AdvantageSpec with one of them")
        if not target.needs_verdict and target.compute_tokens is None:
            what = "has needs_verdict=False without compute_tokens"
            raise wrong_shape(found, AdvantageSpec, what, "one that takes scores, or gives numbers by token")
        for need, function in (("needs_greedy", "compute_step"), ("needs_squared_probs", "compute_tokens")):
            if getattr(target, need) and given != [function]:
                what = f"has {need} without {function}"
                raise wrong_shape(found, AdvantageSpec, what, f"an AdvantageSpec with {function}")
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
    """Convert a spec, a factory of one, or `f(ctx) -> TransformOutput`.

    A bare function gets planning masks and lambda, since it may use both.
    """
    target = spec_or_callable(found, TransformSpec, "f(ctx) -> TransformOutput")
    if isinstance(target, TransformSpec):
        return target
    return TransformSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def as_uncertainty(found: Found) -> UncertaintySpec:
    target = spec_or_callable(found, UncertaintySpec, "f(ctx) -> one number per token")
    return target if isinstance(target, UncertaintySpec) else UncertaintySpec(name=found.name, compute=target)


def as_algorithm(found: Found) -> AlgorithmSpec:
    target = spec_or_callable(found, AlgorithmSpec, "f(ctx) -> TransformOutput")
    if isinstance(target, AlgorithmSpec):
        return target
    return AlgorithmSpec(name=found.name, compute_context=target, needs_planning=True, uses_sepa_controller=True)


def spec_or_callable(found: Found, spec: type, of_context: str = "") -> Any:
    """A part as its spec or as a function; PluginError for anything else.

    `of_context` is the only signature that its kind of function may have: one context.
    """
    target = found.target
    # Without required arguments it cannot take a context, so it is a factory of the part.
    if not isinstance(target, spec) and callable(target) and not _positional(target):
        try:
            target = found.target()
        except RetrainError:
            raise
        except Exception as error:
            what = f"{_kind(spec)} {found.name!r} of {found.owner} raised {type(error).__name__}: {error}"
            what += raised_at(error)
            raise PluginError(Problem(code="plugin.raised", what=what, fix="correct that line")) from error
    if isinstance(target, spec):
        return target
    if not callable(target):
        raise wrong_shape(found, spec, f"is {type(target).__name__}", f"a {spec.__name__} or a function")
    if of_context and len(_positional(target)) != 1:
        raise wrong_shape(found, spec, "is not a function of one context", of_context)
    return target


def wrong_shape(found: Found, spec: type, what: str, wanted: str) -> PluginError:
    what, fix = f"{_kind(spec)} {found.name!r} of {found.owner} {what}", f"make it {wanted}"
    return PluginError(Problem(code="plugin.wrong-shape", what=what, fix=fix))


def _kind(spec: type) -> str:
    return spec.__name__.removesuffix("Spec").lower()


def _positional(target: Callable[..., Any]) -> list[str]:
    # Arguments with a default are left out: only the required ones distinguish the forms of a part.
    parameters = inspect.signature(target).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]


def refusal(what: str, fix: str, *, code: str) -> CreditError:
    return CreditError(Problem(code=code, what=what, fix=fix))


def as_numbers(values: Any, length: int, *, what: str) -> Floats:
    """`values` as a float64 array of `length` finite numbers; CreditError names `what` and the first bad position."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise refusal(
            f"{what} is not a list of numbers: {error}", "return a flat list", code="credit.not-numbers"
        ) from error
    # NumPy would convert text such as "1.5" later, but a part that returns text is at fault.
    if array.dtype.kind not in "biuf":
        text = f"{what} is not a list of numbers: it holds {array.dtype}"
        raise refusal(text, "return floats or integers", code="credit.not-numbers")
    array = array.astype(np.float64, copy=False)
    if array.shape != (length,):
        shapes = ("is one number", f"has length {array.size}")
        got = shapes[array.ndim] if array.ndim < len(shapes) else f"has shape {array.shape}"
        raise refusal(f"{what} {got}, expected {length}", "return one number for each", code="credit.wrong-length")
    with np.errstate(over="ignore", invalid="ignore"):
        # Finite only if every entry is, so valid arrays need one pass; an overflow is looked at again below.
        total = array.sum()
    if not np.isfinite(total) and not (finite := np.isfinite(array)).all():
        position = int(np.argmin(finite))
        found = f"{what} is {array[position]} at position {position}"
        raise refusal(f"{found}: it must be finite", "look for a division by zero, or log(0)", code="credit.not-finite")
    return array


def check_count(values: Sequence[Any], count: int, *, what: str, each: str = "completion") -> None:
    got = f"has {len(values)} entries" if hasattr(values, "__len__") else f"is {type(values).__name__}"
    if not hasattr(values, "__len__") or len(values) != count:
        fix = "return a list with an entry for each, including empty ones"
        raise refusal(f"{what} {got}, expected {count}, one per {each}", fix, code="credit.wrong-count")


def as_arrays(values: Any, lengths: Sequence[int], *, what: str) -> list[Floats]:
    check_count(values, len(lengths), what=f"{what} output")
    pairs = zip(values, lengths, strict=True)
    return [as_numbers(each, length, what=f"{what} completion {i}") for i, (each, length) in enumerate(pairs)]


def call_part(what: str, function: Any, *arguments: Any) -> Any:
    """Call a plugin's function; an error in it becomes a CreditError that names the plugin."""
    try:
        return function(*arguments)
    except RetrainError:
        raise
    except Exception as error:
        raised = f"{what} raised {type(error).__name__}: {error}{raised_at(error)}"
        raise refusal(raised, "correct that line", code="credit.part-raised") from error


def numbers_from(what: str, length: int, function: Any, *arguments: Any) -> Floats:
    return as_numbers(call_part(what, function, *arguments), length, what=what)
