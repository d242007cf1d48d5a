"""Rewards that work or do not, for the trial before a run."""

from __future__ import annotations

import sys
import time


class Sound:
    """It counts its calls."""

    def __init__(self):
        self.calls = 0

    def score(self, example, text):
        self.calls += 1
        return float(text == example.reference)


class Raising(Sound):
    """A fault on every text."""

    def score(self, example, text):
        return {}["no such key"]


class NotANumber(Sound):
    def score(self, example, text):
        return float("nan")


class OnlyEmpty(Sound):
    """It works on one kind of text alone."""

    def score(self, example, text):
        return 0.0 if not text else 1.0 / 0.0


class Gold(Sound):
    """It reads one format, which its own `gold` knows."""

    def score(self, example, text):
        return float(text.removeprefix("answer:").strip() == example.reference) if ":" in text else None

    def gold(self, example):
        return f"answer: {example.reference}"


class Slow(Sound):
    def score(self, example, text):
        time.sleep(30)


class OnlyInItsProcess(Sound):
    """As a reward on a device that a copy of a process cannot use."""

    def score(self, example, text):
        if "pytest" in sys.modules:
            raise RuntimeError("not here")
        return 1.0


class Heavy(Raising):
    """Its `prepare` may load something large."""

    def prepare(self):
        raise AssertionError("not here")


class Remote(Sound):
    async def score(self, example, text):
        raise AssertionError("a server was asked")
