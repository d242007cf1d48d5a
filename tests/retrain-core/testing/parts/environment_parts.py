"""Environments: a sound one, and one for each way to be broken."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrain.api import EpisodeResult, Example, LoadedData, Observation, Score


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
