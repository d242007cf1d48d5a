"""Data sources: a sound one, and one for each way to be broken."""

import random
from dataclasses import replace

import numpy as np
from reward_parts import DisagreesWithItsGold, Sound

from retrain.api import Example, LoadedData


class Source:
    """Five sums."""

    def __init__(self, context):
        self.examples = [Example(id=f"sum-{n}", prompt=f"{n} + {n} = ?", reference=str(2 * n)) for n in range(5)]

    def load(self):
        return LoadedData(examples=tuple(self.examples), notes=("five sums",), reward=Sound(None))


class Empty(Source):
    def load(self):
        return LoadedData(examples=())


class AList(Source):
    def load(self):
        return self.examples


class SharedIds(Source):
    def load(self):
        return LoadedData(examples=tuple(replace(example, id="sum") for example in self.examples))


class Shuffled(Source):
    def load(self):
        return LoadedData(examples=tuple(random.sample(self.examples, 5)))


class HoldsArrays(Source):
    def load(self):
        return LoadedData(examples=tuple(replace(example, info={"n": np.int64(1)}) for example in self.examples))


class EmptyChat(Source):
    def load(self):
        return LoadedData(examples=tuple(replace(example, prompt=({"role": "user"},)) for example in self.examples))


class HalfACharacter(Source):
    def load(self):
        return LoadedData(examples=tuple(replace(example, prompt="\ud800") for example in self.examples))


class BadVerifier(Source):
    def load(self):
        return replace(super().load(), reward=DisagreesWithItsGold(None))
