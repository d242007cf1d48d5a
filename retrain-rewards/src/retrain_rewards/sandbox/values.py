"""Plain values as text and back: they pass between a program, the code of tests and the process that scores.

It runs inside the sandbox too, so it imports next to nothing. A number, text, truth value or None is itself in JSON;
everything else is an array `[tag, ...]`. Lists and other values that can change are numbered in the order in which they
begin, so that a second occurrence is `["&", number]`: identity survives, and so do values that hold themselves.
"""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii as quoted
from _json import make_scanner

TYPE_CHECKING = False  # importing `typing` would double the time to start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

# Longer integers are hexadecimal, since decimal digits take quadratic time and have a limit.
LONG_BITS = 8192
ITEMS_OF_ITERATOR = 1_000_000  # read from a generator in place of a list
VIEWS = {type({}.keys()): "dict_keys", type({}.values()): "dict_values", type({}.items()): "dict_items"}
KEPT_DICTS = ("Counter", "OrderedDict")
FACTORIES = {"int": int, "list": list, "set": set, "dict": dict, "str": str, "float": float, "bool": bool}
ARRAY_KINDS = "biufcSU"


PARTS: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # by the class that is encoded
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.isoformat(),),
    "datetime.datetime": lambda value: (value.isoformat(),),
    "datetime.time": lambda value: (value.isoformat(),),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "array.array": lambda value: (value.typecode, *value),
}


class Encoder:
    """Encodes the values of one message; `export` encodes an object that is no plain value, or raises TypeError."""

    def __init__(self, export: Callable[[Any], str] | None = None, known: Sequence[Any] = ()) -> None:
        self._export = export
        # Also keeps the ids of `_numbers` in use.
        self.known = list(known)
        self._numbers = {id(value): number for number, value in enumerate(self.known)}

    def encode(self, value: Any) -> str:
        """Encode a value by its real type, whatever its `__class__` says; subclasses as their base."""
        if value is None or value is True or value is False:
            return "null" if value is None else "true" if value else "false"
        kind = type(value)
        if kind is str or issubclass(kind, str):
            return str(quoted(str.__str__(value)))
        if issubclass(kind, int):
            if int.bit_length(value) <= LONG_BITS:
                return int.__repr__(value)
            return f'["int","{int.__format__(value, "x")}"]'
        if issubclass(kind, float):
            text = float.__repr__(value)
            return text if text[-1].isdigit() else f'["float","{text}"]'
        if issubclass(kind, bytes):
            return f'["bytes",{quoted(bytes.decode(value, "latin-1"))}]'
        if issubclass(kind, tuple):
            return self._tuple(kind, value)
        for base in (list, dict, set, bytearray):
            if issubclass(kind, base):
                return self._changeable(base, kind, value)
        if issubclass(kind, frozenset):
            return self.tagged("frozenset", frozenset.__iter__(value))
        if issubclass(kind, complex):
            return self.tagged("complex", (value.real, value.imag))
        return self._of_library(kind, value)

    def tagged(self, tag: str, parts: Iterable[Any]) -> str:
        return ",".join([f'["{tag}"', *map(self.encode, parts)]) + "]"

    def _tuple(self, kind: type, value: Any) -> str:
        fields = getattr(kind, "_fields", None)
        if type(fields) is tuple and len(fields) == tuple.__len__(value) and all(type(name) is str for name in fields):
            return self.tagged("namedtuple", (kind.__name__, fields, *tuple.__iter__(value)))
        return self.tagged("tuple", tuple.__iter__(value))

    def _changeable(self, base: type, kind: type, value: Any) -> str:
        number = self._numbers.setdefault(id(value), len(self.known))
        if number < len(self.known):
            return f'["&",{number}]'
        if base is not bytearray and self._export and kind.__module__ in ("program", "__main__"):
            try:
                return self._export(value)  # of a class that the tests may call methods of, if it is known already
            except TypeError:
                pass
        self.known.append(value)
        if base is bytearray:
            return f'["bytearray",{quoted(value.decode("latin-1"))}]'
        if base.__name__ == "deque":
            return self.tagged("deque", (value.maxlen, *value))
        if base is not dict:
            return self.tagged(base.__name__, vars(base)["__iter__"](value))
        flat = (each for pair in list(dict.items(value)) for each in pair)
        if kind.__module__ == "collections" and kind.__name__ in KEPT_DICTS:
            return self.tagged(kind.__name__, flat)
        if kind.__module__ == "collections" and kind.__name__ == "defaultdict":
            name = getattr(value.default_factory, "__name__", "")
            return self.tagged("defaultdict", (name if FACTORIES.get(name) is value.default_factory else "", *flat))
        return self.tagged("dict", flat)

    def _of_library(self, kind: type, value: Any) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in PARTS:
            return self.tagged(kind.__name__, PARTS[name](value))
        if kind in VIEWS:
            return self.tagged(VIEWS[kind], value if VIEWS[kind] != "dict_items" else map(tuple, value))
        if name == "collections.deque":
            return self._changeable(kind, kind, value)
        numpy = sys.modules.get("numpy")
        if numpy and issubclass(kind, numpy.generic) and value.dtype.kind in ARRAY_KINDS:
            return self.encode(value.item())
        if numpy and issubclass(kind, numpy.ndarray) and value.dtype.kind in ARRAY_KINDS:
            return self.tagged("ndarray", (value.dtype.str, value.shape, value.tolist()))
        if self._export:
            return self._export(value)
        raise TypeError(f"{kind.__name__} is no plain value")


class Decoder:
    """Decodes the values of one message; `take` decodes the tags of objects that are no plain values."""

    def __init__(self, take: Callable[[str, list[Any], Decoder], Any] | None = None, known: Sequence[Any] = ()) -> None:
        self._take = take
        self.known = list(known)

    def decode(self, node: Any) -> Any:
        """Decode a parsed text; ValueError for anything that is no plain value."""
        if type(node) is not list:
            return node
        try:
            tag, parts = node[0], node[1:]
            if tag in ("list", "set", "dict", "bytearray", "deque", "Counter", "OrderedDict", "defaultdict"):
                return self._changeable(tag, parts)
            if tag == "tuple":
                return tuple(map(self.decode, parts))
            if tag == "&":
                return self.known[parts[0]]
            if tag in PLAIN:
                return PLAIN[tag]([self.decode(part) for part in parts])
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, ValueError) as error:
            raise ValueError(f"no plain value: {type(error).__name__}") from None
        if self._take and type(tag) is str:
            return self._take(tag, parts, self)
        raise ValueError("no plain value: unknown tag")

    def _changeable(self, tag: str, parts: list[Any]) -> Any:
        if tag == "bytearray":
            self.known.append(bytearray(parts[0].encode("latin-1")))
            return self.known[-1]
        made: Any
        if tag in ("list", "set", "dict"):
            made = FACTORIES[tag]()
        else:
            import collections

            if tag == "deque":
                made, parts = collections.deque(maxlen=parts[0]), parts[1:]
            elif tag == "defaultdict":
                made, parts = collections.defaultdict(FACTORIES.get(parts[0])), parts[1:]
            else:
                made = getattr(collections, tag)()
        self.known.append(made)
        values = list(map(self.decode, parts))
        replace_content(made, values)
        return made


def content(value: Any) -> list[Any]:
    if issubclass(type(value), dict):
        return [each for pair in list(dict.items(value)) for each in pair]
    return list(value)


def replace_content(value: Any, parts: list[Any]) -> None:
    if isinstance(value, dict):
        dict.clear(value)
        for key, each in zip(parts[::2], parts[1::2], strict=True):
            dict.__setitem__(value, key, each)
    elif isinstance(value, list | bytearray):
        value[:] = parts
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(parts)


def parsed(text: str) -> Any:
    try:
        value, end = SCAN(text, 0)
    except (StopIteration, RecursionError, SystemError) as error:  # SystemError: of text that ends early
        raise ValueError(f"nothing that can be read: {type(error).__name__}") from None
    if end != len(text):
        raise ValueError("more than one value")
    return value


def decoded(node: Any) -> Any:
    return Decoder().decode(node)


def _ndarray(parts: list[Any]) -> Any:
    import numpy

    kind, shape, values = parts
    if numpy.dtype(kind).kind not in ARRAY_KINDS:
        raise ValueError("an array of objects")
    return numpy.array(values, dtype=kind).reshape(shape)


PLAIN: dict[str, Callable[[list[Any]], Any]] = {
    "frozenset": frozenset,
    "bytes": lambda parts: parts[0].encode("latin-1"),
    "complex": lambda parts: complex(*parts),
    "float": lambda parts: float(parts[0]),
    "int": lambda parts: int(parts[0], 16),
    "range": lambda parts: range(*parts),
    "dict_keys": lambda parts: dict.fromkeys(parts).keys(),
    "dict_values": lambda parts: dict(enumerate(parts)).values(),
    "dict_items": lambda parts: dict(parts).items(),
    "namedtuple": lambda parts: __import__("collections").namedtuple(parts[0], parts[1])(*parts[2:]),
    "Fraction": lambda parts: __import__("fractions").Fraction(*parts),
    "Decimal": lambda parts: __import__("decimal").Decimal(*parts),
    "date": lambda parts: __import__("datetime").date.fromisoformat(parts[0]),
    "datetime": lambda parts: __import__("datetime").datetime.fromisoformat(parts[0]),
    "time": lambda parts: __import__("datetime").time.fromisoformat(parts[0]),
    "timedelta": lambda parts: __import__("datetime").timedelta(*parts),
    "array": lambda parts: __import__("array").array(parts[0], parts[1:]),
    "ndarray": _ndarray,
}


class _Scanning:
    """The settings of a scanner, as the package `json` would set them."""

    strict, memo = True, dict[str, str]()
    object_hook: Any = None
    parse_float, parse_int = float, int

    @staticmethod
    def object_pairs_hook(_: Any) -> Any:
        raise ValueError("an object")

    @staticmethod
    def parse_constant(name: str) -> Any:
        raise ValueError(name)


SCAN = make_scanner(_Scanning())  # type: ignore[arg-type]
