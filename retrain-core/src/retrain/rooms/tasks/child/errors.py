"""The ends that a call in a child process can have besides a value."""

from __future__ import annotations


class ChildFailure(Exception):  # noqa: N818 - base of an end that is not always an error of ours
    """Base of the three; the text says what happened, in words fit for a record."""


class ChildTimeout(ChildFailure):
    """The method, or the start, took longer than it may; the process was killed."""


class ChildDied(ChildFailure):
    """The process ended by itself, or was killed from outside.

    `has_started` says whether the method had begun: if not, the call is not to blame. `output` is the end of what the
    process printed.
    """

    def __init__(self, text: str, *, has_started: bool = False, output: str = "") -> None:
        super().__init__(text)
        self.has_started = has_started
        self.output = output


class ChildError(ChildFailure):
    """The method raised: class name and text of its exception, the user's line, and its traceback as text."""

    def __init__(self, name: str, text: str, traceback: str = "", place: str = "") -> None:
        super().__init__((f"{name}: {text}" if text else name) + place)
        self.name = name
        self.traceback = traceback
