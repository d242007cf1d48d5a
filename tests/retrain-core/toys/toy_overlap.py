"""A toy backend that samples while it trains; what happens in either half can be watched and disturbed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
from toy_parts import CAPABILITIES, Options, ToyBackend, ToyReward

from retrain.api import EpisodeResult, Example, LoadedData, Observation, PluginSpec, Score, hookimpl


class Disturbed:
    """Called in each half: `train(backend, batch)` before the update, `sample(backend, requests)` before drawing."""

    train = sample = staticmethod(lambda backend, what: None)


class OverlappedBackend(ToyBackend):
    """The policy that is trained, and another that is sampled from."""

    overlaps_training = True

    def __init__(self, context):
        super().__init__(context)
        self.check_stop = context.check_stop
        self.sampler = ToyBackend(context)
        self.drawn = 0
        self.before = self.last = (0, self.logits_V.copy())

    def sample(self, requests, params):
        Disturbed.sample(self, requests)
        self.drawn += len(requests)
        return self.sampler.sample(requests, params)

    def train(self, batch):
        Disturbed.train(self, batch)
        self.check_stop()
        return super().train(batch)

    def metrics(self):
        drawn, self.drawn = self.drawn, 0
        return {"toy_drawn": drawn}

    def publish(self):
        self.before, self.last = self.last, (self.trained, self.logits_V.copy())
        self._draw_from(self.last)
        return self.trained

    def save(self, folder):
        super().save(folder)
        version, logits_V = self.before
        (folder / "before.json").write_text(json.dumps([version, logits_V.tolist()]))

    def load(self, folder):
        super().load(folder)
        version, logits = json.loads((folder / "before.json").read_text())
        self.before = self.last = (version, np.array(logits))
        self._draw_from(self.last)

    def _draw_from(self, published):
        self.sampler.version, self.sampler.logits_V = published


class BufferedBackend(OverlappedBackend):
    """Keeps the last policies that it published, and samples from the one that it is told to."""

    capabilities = replace(CAPABILITIES, max_staleness=8)

    def __init__(self, context):
        super().__init__(context)
        self.most = context.config.value("training.max_staleness", -1)
        self.kept = {0: self.logits_V.copy()}

    def publish(self):
        if self.most < 2:
            return super().publish()
        self.kept[self.trained] = self.logits_V.copy()
        self.kept = dict(list(self.kept.items())[-self.most - 1 :])
        return self.trained

    def use_version(self, version):
        self._draw_from((version, self.kept[version]))

    def save(self, folder):
        super().save(folder)
        (folder / "kept.json").write_text(json.dumps([[v, logits_V.tolist()] for v, logits_V in self.kept.items()]))

    def load(self, folder):
        super().load(folder)
        self.kept = {version: np.array(logits) for version, logits in json.loads((folder / "kept.json").read_text())}


class Wordy(ToyReward):
    """The more words the better, so that every group teaches something."""

    def score(self, example, text):
        return Score.of(sum(map(len, text.split())) / 16)


class NeverRight(ToyReward):
    """No answer is right, so there is nothing to learn."""

    def score(self, example, text):
        return Score.of(0.0)


class TwoTurns:
    """An environment: one question, and one more about the answer."""

    def __init__(self, context):
        self.said = {}

    def load(self):
        examples = (Example(id=f"two-{n}", prompt=f"what is {n} ?", reference="") for n in range(8))
        return LoadedData(examples=tuple(examples))

    def reset(self, examples):
        self.said = {number: [example.prompt] for number, example in enumerate(examples)}
        return self.step({})

    def step(self, actions):
        for number, action in actions.items():
            self.said[number] += [action.text, "ok"]
        return {number: Observation(prompt=" ".join(said)) for number, said in self.said.items() if len(said) < 5}

    def results(self):
        return [EpisodeResult(score=Score.of(len(" ".join(said)) / 64)) for said in self.said.values()]


@hookimpl
def retrain_register_environments(register):
    register(PluginSpec(name="toy_turns", summary="Two turns.", factory=TwoTurns))


@hookimpl
def retrain_register_backends(register):
    register(
        PluginSpec(name="toy_overlap", summary="Two.", factory=OverlappedBackend, params=Options, traits=CAPABILITIES)
    )
    traits = BufferedBackend.capabilities
    register(PluginSpec(name="toy_buffered", summary="Many.", factory=BufferedBackend, params=Options, traits=traits))


@hookimpl
def retrain_register_rewards(register):
    register(PluginSpec(name="toy_wordy", summary="Words.", factory=Wordy))
    register(PluginSpec(name="toy_never", summary="Never right.", factory=NeverRight))
