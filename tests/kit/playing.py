"""An environment for the tests: count up from a start, in one word per turn. Plain data, so that it travels."""

import os
import time
from dataclasses import dataclass, field

from retrain.kernel.contracts.tasks import Action, EpisodeResult, LoadedData, Observation
from retrain.kernel.types import Example, Score


@dataclass
class Counting:
    """Waits `turns` times; the score is the share of actions that say the number asked for. `fault` breaks it."""

    turns: int = 2
    fault: str = ""
    rewrites: bool = False
    pays_turns: bool = False  # each right word by itself, and names its states
    said: dict[int, list[str]] = field(default_factory=dict)
    stops: dict[int, list[str]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)

    def load(self) -> LoadedData:
        examples = tuple(
            Example(id=f"count-{n}", prompt=({"role": "user", "content": f"Count from {n}."},), reference=str(n))
            for n in range(3)
        )
        return LoadedData(examples=examples, notes=("counting: 3 tasks",))

    def reset(self, examples: list[Example]) -> dict[int, Observation]:
        self.examples = list(examples)
        self.said = {number: [] for number in range(len(examples))}
        self.stops = {number: [] for number in range(len(examples))}
        return self._observations()

    def step(self, actions: dict[int, Action]) -> dict[int, Observation]:
        for number, action in actions.items():
            self.said[number].append(action.text)
            self.stops[number].append(action.stop_reason.value)
        if self.fault == "dies":
            os._exit(3)
        if self.fault == "hangs":
            time.sleep(1e6)
        if self.fault == "raises":
            raise RuntimeError("the game broke")
        return self._observations()

    def results(self) -> list[EpisodeResult]:
        results = []
        for number, example in enumerate(self.examples):
            wanted = [str(int(example.reference) + i) for i in range(len(self.said[number]))]
            right = sum(said.strip() == word for said, word in zip(self.said[number], wanted, strict=True))
            score = Score.of(right / max(len(wanted), 1))
            pairs = zip(self.said[number], wanted, strict=True)
            paid = tuple((said.strip() == word) / len(wanted) for said, word in pairs) if self.pays_turns else ()
            results.append(EpisodeResult(score=score, hit_turn_limit=number == 0, turn_rewards=paid))
        return results[:-1] if self.fault == "forgets one" else results

    def _observations(self) -> dict[int, Observation]:
        open_ones = [n for n, said in self.said.items() if len(said) < self.turns + n % 2]
        return {
            n: Observation(
                prompt=self._messages(n),
                info={"state_key": f"word {len(self.said[n]) + 1}"} if self.pays_turns else {},
            )
            for n in open_ones
        }

    def _messages(self, number: int) -> list[dict[str, str]]:
        messages = [dict(message) for message in self.examples[number].prompt]
        for said in self.said[number]:
            shown = "..." if self.rewrites else said
            messages += [{"role": "assistant", "content": shown}, {"role": "user", "content": "And then?"}]
        return messages
