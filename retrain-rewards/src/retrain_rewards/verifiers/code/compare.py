"""Compares a program's reply with the expected value, without building any object that the reply describes.

A reply is hostile. The expected value bounds its size and its items before it is parsed, and it is walked in step with
that value. Nothing from it becomes a key of a table that it could fill with colliding keys: it is only looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from itertools import chain
from typing import Any

from retrain_rewards.sandbox import values

SLACK_BYTES, SLACK_ITEMS = 4096, 64
# A `1` may come as `["Fraction",1,1]`.
BYTES_FACTOR, ITEMS_FACTOR = 16, 4
SHOWN_CHARS = 80
# Longest fraction or Decimal, since their arithmetic is not linear.
EXACT_CHARS = 5000
ARRAYS = ("list", "tuple", "namedtuple", "range", "deque", "array", "ndarray", "dict_keys", "dict_values", "dict_items")
HEADS = {"namedtuple": 2, "deque": 1, "array": 1}  # parts before the items
DICTS = {"dict": 0, "Counter": 0, "OrderedDict": 0, "defaultdict": 1}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
IS_FLOAT = re.compile(r"[.eE]")


class Mismatch(Exception):  # noqa: N818 - the program's doing
    """The reply describes no value that could be the expected one."""


def reply_limit(expected: Any) -> tuple[int, int]:
    text = values.Encoder().encode(expected)
    return BYTES_FACTOR * len(text) + SLACK_BYTES, ITEMS_FACTOR * _items(text) + SLACK_ITEMS


def _items(text: str) -> int:
    return text.count(",") + text.count("[")


def read_reply(text: str, items: int) -> Any:
    if _items(text) > items:
        raise ValueError("too many items")
    return values.parsed(text)


def matches(reply: Any, expected: Any, *, as_json: bool = False, tolerance: float = 0.0) -> bool:
    """True if the value of a parsed reply equals the expected one.

    With `as_json` everything that JSON holds as an array is one, keys are texts, and so are dates. Floats may differ by
    `tolerance`, relative to the larger of 1 and the expected float.
    """
    try:
        return _Comparison(as_json, tolerance).equal(reply, expected)
    except (Mismatch, LookupError, TypeError, ValueError, ArithmeticError):
        return False


class _Comparison:
    def __init__(self, as_json: bool, tolerance: float) -> None:
        self.as_json = as_json
        self.tolerance = tolerance
        self._leaves: dict[int, set[Any]] = {}

    def equal(self, reply: Any, expected: Any) -> bool:
        # The expected value decides the kind, so that no reply chooses the comparison.
        if isinstance(expected, dict):
            return self._equal_dicts(reply, expected)
        if isinstance(expected, set | frozenset):
            tag, *parts = reply
            if len(parts) > ITEMS_FACTOR * len(expected):
                return False
            found = {self._member(part, expected) for part in parts}
            return tag in ("set", "frozenset", "dict_keys") and len(found) == len(expected)
        if isinstance(expected, list | tuple):
            wanted = "tuple" if isinstance(expected, tuple) else "list"
            items = self._array(reply, wanted, len(expected))
            return len(items) == len(expected) and all(map(self.equal, items, expected))
        if self.as_json and isinstance(expected, str) and type(reply) is list:
            if reply[0] not in ("date", "datetime"):
                return False
            return reply[1] == expected or datetime.fromisoformat(reply[1]) == datetime.fromisoformat(expected)
        value = _scalar(reply)
        if self.tolerance and isinstance(expected, float) and isinstance(value, int | float | Fraction | Decimal):
            return value == expected or abs(float(value) - expected) <= self.tolerance * max(1.0, abs(expected))
        return bool(value == expected)

    def _equal_dicts(self, reply: Any, expected: dict[Any, Any]) -> bool:
        tag, *parts = reply
        flat = parts[DICTS[tag] :]
        if len(flat) != 2 * len(expected):
            return False
        seen = set()
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            name = _json_key(_scalar(key)) if self.as_json else self._member(key, expected)
            if name not in expected or not self.equal(value, expected[name]):
                return False
            seen.add(name)
        return len(seen) == len(expected)

    def _array(self, reply: Any, wanted: str, length: int) -> Sequence[Any]:
        tag: str = reply[0]
        parts: list[Any] = reply[1:]
        of_equal = {"list": ("list", "ndarray"), "tuple": ("tuple", "namedtuple")}[wanted]
        if tag not in (ARRAYS if self.as_json else of_equal):
            raise Mismatch(tag)
        if tag == "range":
            start, stop, step = map(_scalar, parts)
            return range(start, stop, step) if max(0, -((start - stop) // step)) == length else ()
        if tag == "ndarray":
            _, shape, rows = parts
            if rows[0] != "list" or len(shape) < 2:  # an array without dimensions
                raise Mismatch("shape")
            parts = rows[1:]
        if tag == "dict_items":
            return parts
        return parts[HEADS.get(tag, 0) :]

    def _member(self, part: Any, expected: Any) -> Any:
        value = self._hashable(part, expected)
        if value not in expected:
            raise Mismatch("no member")
        return value

    def _hashable(self, reply: Any, wanted: Any) -> Any:
        """Return a key or a member. Sets are built only from leaves of `wanted`: the program must not choose hashes."""
        tag, *parts = reply if type(reply) is list else ("",)
        if tag in ("tuple", "namedtuple"):
            return tuple(self._hashable(part, wanted) for part in parts[HEADS.get(tag, 0) :])
        if tag != "frozenset":
            return _scalar(reply)
        known = self._leaves.setdefault(id(wanted), set()) or _leaves(wanted)
        self._leaves[id(wanted)] = known
        members = [self._hashable(part, wanted) for part in parts]
        if any(type(member) is not frozenset and member not in known for member in members):
            raise Mismatch("no member")
        return frozenset(members)


def _leaves(value: Any) -> set[Any]:
    if not isinstance(value, tuple | set | frozenset | dict):
        return {value}
    inner = set(chain.from_iterable(map(_leaves, value)))
    return inner | {value} if isinstance(value, tuple) else inner


def _scalar(reply: Any) -> Any:
    if type(reply) is not list:
        return reply
    tag, *parts = reply
    if tag == "Decimal" and len(parts[0]) <= EXACT_CHARS:
        return Decimal(parts[0])
    if tag == "Fraction" and sum(len(str(part)) for part in parts) <= EXACT_CHARS:  # the text of an array counts too
        return Fraction(*map(_scalar, parts))
    if tag in ("int", "float", "complex", "bytes", "bytearray") and len(parts) in (1, 2):
        return values.decoded(reply)
    raise Mismatch(tag)


def _json_key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)


def json_form(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [json_form(each) for each in value]
    if isinstance(value, Mapping):
        return {_json_key(name): json_form(each) for name, each in value.items()}
    return value


def shown(text: str) -> str:
    if len(text) > 40 * SHOWN_CHARS:
        return f"a value of {len(text):,} characters"
    try:
        return repr(values.decoded(values.parsed(text)))[:SHOWN_CHARS]
    except (ValueError, RecursionError):
        return text[:SHOWN_CHARS]


def printed_as_expected(output: str, expected: str, *, tolerance: float = 0.0) -> bool:
    """True if the lines are the same, except white space at their ends and empty lines at the end.

    The output is read only up to the length of the expected text. With a `tolerance` the words of a line are compared,
    and a number in the place of a decimal number may differ by it.
    """
    start, end = 0, len(output.rstrip())
    for wanted in expected.rstrip().split("\n"):
        if start > end:
            return False
        stop = output.find("\n", start, end)
        stop = end if stop < 0 else stop
        line, wanted = output[start:stop].rstrip(), wanted.rstrip()
        if line != wanted and not (tolerance and _near(line, wanted, tolerance)):
            return False
        start = stop + 1
    return start > end


def _near(line: str, wanted: str, tolerance: float) -> bool:
    words = wanted.split()
    found = line.split(None, len(words))
    for one, other in zip(found, words, strict=False):
        if one != other:
            if not (NUMBER.fullmatch(one) and NUMBER.fullmatch(other) and IS_FLOAT.search(other)):
                return False
            # As decimals: 0.1 in binary would already differ from the text by more than a tolerance of 0.
            value = Decimal(other)
            if abs(Decimal(one) - value) > Decimal(repr(tolerance)) * max(Decimal(1), abs(value)):
                return False
    return len(found) == len(words)
