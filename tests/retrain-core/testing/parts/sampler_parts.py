"""Samplers: a sound one, and one for each fault."""

import random
from itertools import count

from variants import variant

from retrain.api import PromptChoice


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
