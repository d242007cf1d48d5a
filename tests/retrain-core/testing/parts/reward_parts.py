"""Rewards: sound ones, and one for each way to be broken."""

import random
import time

from retrain.api import Score


class Sound:
    """1 if the text contains the reference."""

    def __init__(self, context):
        pass

    def score(self, example, text):
        return Score.of(float(example.reference in text))

    def gold(self, example):
        return f"It is {example.reference}."


class SoundAsync(Sound):
    concurrency = 4

    async def score(self, example, text):
        return float(example.reference in text)

    def metrics(self):
        return {"calls": 3}


class WrongArguments(Sound):
    def score(self, text):
        return 1.0


class NoScore:
    def __init__(self, context):
        pass


class Unpicklable(Sound):
    def __init__(self, context):
        self.compare = lambda text: text


class BreaksOnNothing(Sound):
    def score(self, example, text):
        return float(text[0] == example.reference)


class NotANumber(Sound):
    def score(self, example, text):
        return float("nan") if len(text) > 1000 else 0.0


class Hangs(Sound):
    def score(self, example, text):
        if len(text) > 100_000:
            time.sleep(600)
        return 0.0


class DisagreesWithItsGold(Sound):
    def gold(self, example):
        return "something else"


class Noisy(Sound):
    def score(self, example, text):
        return random.random()


class WritesInfo(SoundAsync):
    async def score(self, example, text):
        example.info["seen"] = True
        return 0.0


class BadMetrics(SoundAsync):
    def metrics(self):
        return {"calls": float("nan")}
