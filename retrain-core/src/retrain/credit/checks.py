"""Checks on what enters and leaves the parts of credit: count, length, finite numbers; every fault names its part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.errors import CreditError, Problem, RetrainError, raised_at
from retrain.kernel.types import Floats


def refusal(what: str) -> CreditError:
    """The error for a wrong input or output of a part of credit."""
    return CreditError(Problem(what=what, fix="correct the plugin or the data that this came from"))


def as_numbers(values: Any, length: int, *, what: str) -> Floats:
    """`values` as a float64 array of `length` finite numbers; CreditError names `what` and the first bad position."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise refusal(f"{what} is not a list of numbers: {error}") from error
    if array.dtype.kind not in "biuf":  # text such as "1.5" is refused too
        raise refusal(f"{what} is not a list of numbers: it holds {array.dtype}")
    array = array.astype(np.float64, copy=False)
    if array.shape != (length,):
        shapes = ("is one number", f"has length {array.size}")
        got = shapes[array.ndim] if array.ndim < len(shapes) else f"has shape {array.shape}"
        raise refusal(f"{what} {got}, expected {length}")
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()  # finite only if every entry is: one pass suffices for valid arrays
    if not np.isfinite(total) and not (finite := np.isfinite(array)).all():
        position = int(np.argmin(finite))
        raise refusal(f"{what} is {array[position]} at position {position}: it must be finite")
    return array


def check_count(values: Sequence[Any], count: int, *, what: str, each: str = "completion") -> None:
    """CreditError unless there is one entry per completion, or per group."""
    got = f"has {len(values)} entries" if hasattr(values, "__len__") else f"is {type(values).__name__}"
    if not hasattr(values, "__len__") or len(values) != count:
        raise refusal(f"{what} {got}, expected {count}, one per {each}")


def as_arrays(values: Any, lengths: Sequence[int], *, what: str) -> list[Floats]:
    """One checked array per completion, of these lengths."""
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
        raise refusal(f"{what} raised {type(error).__name__}: {error}{raised_at(error)}") from error


def numbers_from(what: str, length: int, function: Any, *arguments: Any) -> Floats:
    """The `length` finite numbers that a plugin's function returns."""
    return as_numbers(call_part(what, function, *arguments), length, what=what)
