"""The code of tests, inside a separate sandbox, with proxies for the objects that it takes from the program."""

from __future__ import annotations

import marshal
import os
import sys

from retrain_rewards.sandbox import inside
from retrain_rewards.sandbox.link import HANDLERS, RAISED, Link, handle_of, operate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

UNUSED = "the tests never use the program"


def serve(channel: int, descriptor: int) -> None:
    """Run the code of one test after another; the reply is empty where all of it held, otherwise the reason."""

    def ended() -> None:
        inside.send(channel, b"the program ended early")
        os._exit(0)

    link = Link(descriptor, serve_program, ended, guards=True)
    # a small `pytest`: enough for tests of single functions, without the package
    pytest = sys.modules["pytest"] = type(sys)("pytest")
    pytest.__dict__.update(raises=_raises, approx=Approx, fail=_fail, mark=_Marks())
    sys.set_int_max_str_digits(0)
    while True:
        code, names = inside.receive(channel)
        fault = _run(marshal.loads(code), names, link)
        inside.send(descriptor, b'["done"]')
        inside.send(channel, fault.encode("utf-8", "replace"))


def _run(code: Any, names: list[str], link: Link) -> str:
    module = sys.modules["__main__"] = type(sys)("__main__")
    module.__dict__.update(__expected__=expected, __settle__=link.settle)
    try:
        for name in names:
            value = link.ask("name", name, makes=True)
            module.__dict__[name] = value
            if isinstance(value, type) and name[:1].isupper():
                link.constructors.add(value)
    except BaseException as error:
        return inside.described(error)
    asked = link.asked
    try:
        exec(code, module.__dict__)
    except SystemExit as leaving:  # as `unittest.main()` ends
        return f"the tests exited with code {leaving.code!r}" if leaving.code else ""
    except BaseException as error:
        return inside.described(error) or "an exception"
    has_constants = any(handle_of(module.__dict__.get(name)) is None for name in names)
    return "" if link.asked > asked or has_constants else UNUSED


def expected(kinds: Any) -> Any:
    """Return the exceptions that tests expect, and harmless replacements for those that would steer them."""
    if isinstance(kinds, tuple):
        found = [expected(kind) for kind in kinds]
        return tuple(each for kind in found for each in (kind if isinstance(kind, tuple) else (kind,)))
    return (kinds, RAISED[kinds]) if isinstance(kinds, type) and kinds in RAISED else kinds


def serve_program(verb: str, target: Any, *parts: Any) -> Any:
    """Serve calls of given objects, and uses of the tests' own classes: by attributes it would find the tests."""
    is_class = isinstance(target, type)
    is_own = type(target).__module__ == "__main__" and not is_class
    if is_class and target.__module__ != "__main__":
        raise TypeError("the tests do not offer that class")
    if verb == "call":
        return target(*parts[0], **parts[1])
    if verb == "op" and (is_own or parts[0] in ("__call__", "__iter__", "__next__")):
        return operate(target, *parts)
    if is_own and verb in HANDLERS and not str(parts[0]).startswith("_"):
        return HANDLERS[verb](target, *parts)
    raise TypeError("the tests do not offer that")


def _fail(reason: str = "", **_: Any) -> None:
    raise AssertionError(reason)


def _raises(kinds: Any, *call: Any, match: str | None = None, **keywords: Any) -> Any:
    if not call:
        return Raises(kinds, match)
    with Raises(kinds, match) as raised:
        call[0](*call[1:], **keywords)
    return raised


class Raises:
    """`pytest.raises`: the block raises one of the expected exceptions."""

    def __init__(self, kinds: Any, match: str | None) -> None:
        self.kinds, self.match = kinds, match
        self.value: Any = None

    def __enter__(self) -> Raises:
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> bool:
        if kind is None:
            raise AssertionError(f"did not raise {self.kinds}")
        if not issubclass(kind, self.kinds):
            return False
        self.value, self.type = error, kind
        if self.match is not None:
            import re

            assert re.search(self.match, str(error)), f"{self.match!r} does not match {str(error)!r}"
        return True


class Approx:
    """`pytest.approx` of numbers, and of sequences and dicts of numbers."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:  # noqa: A002
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, other: Any) -> bool:
        if handle_of(other) is not None:
            return False
        return self._near(other, self.expected)

    __hash__ = None  # type: ignore[assignment]

    def _near(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            return value.keys() == expected.keys() and all(self._near(value[key], expected[key]) for key in expected)
        if hasattr(expected, "__len__") and not isinstance(expected, str):
            return len(value) == len(expected) and all(map(self._near, value, expected))
        if value == expected or not isinstance(expected, (int, float, complex)) or isinstance(expected, bool):
            return bool(value == expected)
        relative = (1e-6 if self.rel is None and self.abs is None else self.rel or 0.0) * abs(expected)
        return bool(abs(value - expected) <= max(relative, 1e-12 if self.abs is None else self.abs))


class _Marks:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **_: given[0] if given and callable(given[0]) else lambda function: function

    def parametrize(self, names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
        keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

        def decorate(test: Any) -> Any:
            def run(**outer: Any) -> None:
                for each in values:
                    test(**outer, **dict(zip(keys, each if len(keys) > 1 else (each,), strict=True)))

            return run

        return decorate
