"""Rewards, data sources, environments and samplers: a sound one of each, and one for each way to be broken."""

import random
import time
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from variants import variant

from retrain.api import EpisodeResult, Example, LoadedData, Observation, PromptChoice, Score


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


@dataclass
class Counting:
    """Waits twice, or three times in every other episode."""

    fault: str = ""
    said: dict[int, int] = field(default_factory=dict)

    def load(self):
        return LoadedData(
            examples=tuple(Example(id=f"count-{n}", prompt=f"Count from {n}.", reference=str(n)) for n in range(3))
        )

    def reset(self, examples):
        if self.fault != "keeps what was open":
            self.said = {}
        for _ in examples:
            self.said[len(self.said)] = 0
        return self.step({})

    def step(self, actions):
        for number, action in actions.items():
            self.said[number] += 1
            if self.fault == "breaks on nothing" and not action.text.strip():
                raise RuntimeError("no action")
        if self.fault == "never ends":
            return {number: Observation(prompt="And then?") for number in self.said}
        prompt = {"role": "user", "content": {1}} if self.fault == "asks in sets" else "And then?"
        observations = {n: Observation(prompt=prompt) for n, said in self.said.items() if said < 2 + n % 2}
        return {n: each.prompt for n, each in observations.items()} if self.fault == "asks in text" else observations

    def results(self):
        value = Score.failed("broken") if self.fault == "fails" else Score.of(1.0)
        results = [EpisodeResult(score=value) for _ in self.said]
        return results[1:] if self.fault == "forgets one" else results


def having(fault):
    return lambda context: Counting(fault=fault)


sound, never_ends, forgets_one, fails = map(having, ("", "never ends", "forgets one", "fails"))
keeps_what_was_open, breaks_on_nothing = having("keeps what was open"), having("breaks on nothing")
asks_in_sets, asks_in_text = having("asks in sets"), having("asks in text")


def cannot_travel(context):
    made = Counting()
    made.compare = lambda text: text
    return made


class Sampler:
    """The prompts drawn least often so far; ties by lot."""

    def __init__(self, context, examples):
        self.seeds, self.drawn = context.seeds, {example.id: 0 for example in examples}

    def choose(self, request):
        rng = self.seeds.stream("sampler", request.step, request.cursor)
        lots = {each: rng.random() for each in self.drawn}
        left = sorted((self.drawn[each], lots[each], each) for each in self.drawn if each not in request.taken)
        return [PromptChoice(example_id=each) for _, _, each in left[: request.count]]

    def observe(self, step, outcomes):
        for outcome in outcomes:
            self.drawn[outcome.example_id] += 1

    def state(self):
        return {"drawn": self.drawn}

    def restore(self, state):
        self.drawn = state["drawn"]


def chooses(change):
    """A sampler whose choice is changed; `change` gets the choice, the request and all its examples."""
    return variant(Sampler, choose=lambda self, request: change(Sampler.choose(self, request), request, [*self.drawn]))


LeavesThePool = chooses(lambda chosen, request, known: [PromptChoice(example_id="held out"), *chosen[1:]])
OneShort = chooses(lambda chosen, request, known: chosen[1:])
ForgetsTaken = chooses(lambda chosen, request, known: [PromptChoice(example_id=i) for i in known[: request.count]])
Certain = chooses(lambda chosen, request, known: [PromptChoice(example_id=c.example_id, chance=1.01) for c in chosen])
StartsAnew = variant(Sampler, restore=lambda self, state: None)


class Learns(Sampler):
    def choose(self, request):
        chosen = super().choose(request)
        self.observe(request.step, chosen)
        return chosen


class Rolls(Sampler):
    lots = count(1)

    def __init__(self, context, examples):
        super().__init__(context, examples)
        self.order = random.Random(next(self.lots)).sample(list(self.drawn), len(self.drawn))

    def choose(self, request):
        return [PromptChoice(example_id=each) for each in self.order if each not in request.taken][: request.count]


class Divides(Sampler):
    def observe(self, step, outcomes):
        super().observe(step, outcomes)
        self.rate = sum(each.correct for each in outcomes) / sum(each.judged for each in outcomes)
