"""Rewards that do as the completion says, and rewards that work or do not in the trial before a run."""

import asyncio
import contextlib
import os
import sys
import time

from retrain.api import Example, Score
from tests.kit.hostile_acts import ATTACKS, HARMLESS


class Match:
    def score(self, example: Example, text: str):
        return float(text == example.reference)


class Length:
    """Always a verdict, another one for another text."""

    def score(self, example, text):
        if text == "unclear":
            return Score.no_verdict("cannot tell")
        return len(text) / 10


class Nap:
    def score(self, example, text):
        time.sleep(float(text))
        return 1.0


class Flaky:
    def __init__(self, folder):
        self.folder = folder

    def score(self, example, text):
        file = os.path.join(self.folder, text)
        if not os.path.exists(file):
            open(file, "w").close()
            os._exit(1)
        return 1.0


class Counting:
    def __init__(self, file):
        self.file = file

    def score(self, example, text):
        with open(self.file, "a") as stream:
            stream.write("x")
        if text == "bad":
            raise ValueError("bad")
        return 1.0


class Prepared:
    ready = False

    def prepare(self):
        self.ready = True

    def score(self, example, text):
        return float(self.ready)


class Unprepared(Prepared):
    def prepare(self):
        raise ImportError("no module named sympathy")


class Hungry(Prepared):
    def prepare(self):
        ATTACKS["kill"]()


class Locked(Prepared):
    def __init__(self):
        self.stream = open(os.devnull)  # noqa: SIM115


class Hostile:
    """The first word of a text names what happens; any other text scores 1 when it is the reference."""

    def score(self, example, text):
        act = (ATTACKS | HARMLESS).get(text.split(" ", 1)[0])
        return act() if act else float(text == example.reference)


class AsyncActs:
    concurrency = 4

    def __init__(self):
        self.most = self.now = self.calls = 0

    def metrics(self):
        return {"acts_calls": self.calls, "acts_most": self.most}

    async def score(self, example, text):
        self.calls += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self._act(text)
        finally:
            self.now -= 1

    async def _act(self, text):
        if text == "busy":
            raise RuntimeError("429: too many requests")
        if text == "hang":
            await asyncio.sleep(1000)
        if text == "ignore":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1000)
        if text == "block":
            time.sleep(4)
        if text == "exit":
            sys.exit(1)
        if text == "cancel":
            for task in asyncio.all_tasks():
                if task is not asyncio.current_task():
                    task.cancel()
            raise asyncio.CancelledError
        if text == "nan":
            return float("nan")
        await asyncio.sleep(0.01)
        return 0.5


class Sound:
    def __init__(self):
        self.calls = 0

    def score(self, example, text):
        self.calls += 1
        return float(text == example.reference)


class Raising(Sound):
    def score(self, example, text):
        return {}["no such key"]


class NotANumber(Sound):
    def score(self, example, text):
        return float("nan")


class OnlyEmpty(Sound):
    def score(self, example, text):
        return 0.0 if not text else 1.0 / 0.0


class ReadsOneFormat(Sound):
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
