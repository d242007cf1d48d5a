"""The program of a completion as a module, inside its sandbox: single calls, and requests of tests that are code."""

from __future__ import annotations

import sys

from retrain_rewards.sandbox import inside
from retrain_rewards.sandbox.values import ITEMS_OF_ITERATOR, Encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def serve(channel: int, link_descriptor: int, source: str, prelude: str) -> None:
    """Load the program and answer calls; `None` as a message hands over to the tests until they are done."""
    inside.prepare()
    module = sys.modules["program"] = type(sys)("program")
    code, before = inside.compiled(source, "program.py"), inside.compiled(prelude, "imports.py")
    fault = code if isinstance(code, str) else inside.executed(before, code, module)
    link: Any = None
    while True:
        message = inside.receive(channel)
        if message is not None:
            inside.send(channel, _call(module, fault, *message))
            continue
        if link is None:
            from retrain_rewards.sandbox.link import Link

            link = Link(link_descriptor, _requests(module, fault), inside.leave, guards=False)
        while (request := link.receive())[0] != "done":
            link.answer(request)


def _call(module: Any, fault: str, name: str, arguments: Any, keywords: Any, as_json: bool) -> bytes:
    """Return `+` and the value as text, or `-` and the text of an exception."""
    try:
        if fault:
            raise ImportError(fault)
        value = _named(module, name)(*arguments, **keywords)
        if as_json and hasattr(type(value), "__next__"):
            value = [each for each, _ in zip(value, range(ITEMS_OF_ITERATOR), strict=False)]
        return b"+" + Encoder().encode(value).encode("ascii")
    except BaseException as error:
        return b"-" + inside.described(error).encode("utf-8", "replace")


def _named(module: Any, name: str) -> Any:
    if name in module.__dict__:
        return module.__dict__[name]
    solution = getattr(module, "Solution", None)
    if solution is None or not hasattr(solution, name):
        raise NameError(f"the program defines no {name}")

    def method(*arguments: Any, **keywords: Any) -> Any:
        return getattr(module.Solution(), name)(*arguments, **keywords)

    return method


def _requests(module: Any, fault: str) -> Any:
    from retrain_rewards.sandbox import link

    events: list[Any] = []  # the event loop of the program's coroutines, one for all of them

    def serve_tests(verb: str, target: Any, *rest: Any) -> Any:
        if verb == "name":
            if fault:
                raise ImportError(fault)
            return _named(module, target)
        if verb == "call":
            return target(*rest[0], **rest[1])
        if verb == "await":
            if not events:
                import asyncio

                events.append(asyncio.new_event_loop())
            return events[0].run_until_complete(target)
        if verb in link.HANDLERS:
            return link.HANDLERS[verb](target, *rest)
        return link.operate(target, *rest)

    return serve_tests
