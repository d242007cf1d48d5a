"""Rewards that do what the completion tells them to."""

import asyncio
import contextlib
import os
import sys
import time

from retrain.api import Example, Score
from tests.kit.hostile_acts import ATTACKS, HARMLESS


class Match:
    """1 when the text is the reference."""

    def score(self, example: Example, text: str):
        return float(text == example.reference)


class Length:
    """Always a verdict, another one for another text."""

    def score(self, example, text):
        if text == "unclear":
            return Score.no_verdict("cannot tell")
        return len(text) / 10


class Nap:
    """Takes as long as the text says."""

    def score(self, example, text):
        time.sleep(float(text))
        return 1.0


class Flaky:
    """Fails when it sees a text for the first time."""

    def __init__(self, folder):
        self.folder = folder

    def score(self, example, text):
        file = os.path.join(self.folder, text)
        if not os.path.exists(file):
            open(file, "w").close()
            os._exit(1)
        return 1.0


class Counting:
    """Counts its calls in a file."""

    def __init__(self, file):
        self.file = file

    def score(self, example, text):
        with open(self.file, "a") as stream:
            stream.write("x")
        if text == "bad":
            raise ValueError("bad")
        return 1.0


class Prepared:
    """Needs `prepare`, and cannot without it."""

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
    """As the text says, in the event loop."""

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
