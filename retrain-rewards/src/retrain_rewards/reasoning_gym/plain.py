"""Python values as JSON and back without loss, since verifiers of reasoning-gym distinguish tuples from lists."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

TUPLE, SET, PAIRS, FRACTION = "__tuple__", "__set__", "__pairs__", "__fraction__"
_MARKS = (TUPLE, SET, PAIRS, FRACTION)


def to_plain(value: Any) -> Any:
    """JSON data that `from_plain` turns back into an equal value; TypeError when the value is not plain data.

    A tuple, set or fraction becomes an object with one marked key, and so does a dictionary whose keys are not all
    text. Texts and numbers of other libraries' classes become Python's own.
    """
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Fraction):
        return {FRACTION: str(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return {TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {SET: sorted((to_plain(item) for item in value), key=repr)}
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value) and not any(mark in value for mark in _MARKS):
            return {str(name): to_plain(item) for name, item in value.items()}
        return {PAIRS: [[to_plain(name), to_plain(item)] for name, item in value.items()]}
    if hasattr(value, "item"):  # a number of numpy
        return to_plain(value.item())
    raise TypeError(f"{type(value).__name__} is not plain data")


def from_plain(value: Any) -> Any:
    """The value that `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((mark, content),) = value.items()
        if mark == TUPLE:
            return tuple(from_plain(item) for item in content)
        if mark == SET:
            return {from_plain(item) for item in content}
        if mark == FRACTION:
            return Fraction(content)
        if mark == PAIRS:
            return {from_plain(name): from_plain(item) for name, item in content}
    return {name: from_plain(item) for name, item in value.items()}
