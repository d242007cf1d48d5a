"""Controllers, pacers, health monitors, recorders and planning detectors: sound ones, and one for each fault."""

import json
import random

import numpy as np
from variants import variant

from retrain.api import Finding


class Controller:
    """Rises with the correct rate that it has seen."""

    def __init__(self, context):
        self.level = 0.0

    def value(self, step):
        return self.level

    def observe(self, view):
        self.level = max(self.level, view.correct_rate or 0.0)

    def metrics(self):
        return {"level": self.level}

    def state(self):
        return {"level": self.level}

    def restore(self, state):
        self.level = state["level"]


TooHigh = variant(Controller, value=lambda self, step: 1.5)
Rolls = variant(Controller, observe=lambda self, view: setattr(self, "level", random.random()))
Forgets = variant(Controller, restore=lambda self, state: None)
NoJson = variant(Controller, state=lambda self: {"level": np.float32(self.level)})
BadMetric = variant(Controller, metrics=lambda self: {"level": float("inf")})


class RisesWhenAsked(Controller):
    def value(self, step):
        self.level = min(1.0, self.level + 0.01)
        return self.level


class Pacer:
    """Half as many prompts after each failure."""

    def __init__(self, context):
        self.size = context.config.training.batch_size * 8

    def batch_size(self, step):
        return self.size

    def observe(self, view):
        if view.out_of_memory:
            self.size = max(1, view.batch_size // 2)

    def metrics(self):
        return {"bp_action": "hold"}

    def state(self):
        return {"size": self.size}

    def restore(self, state):
        self.size = state["size"]


NoPrompts = variant(Pacer, batch_size=lambda self, step: 0 if step > 5 else self.size)
NeverBacksOff = variant(Pacer, observe=lambda self, view: None)


class GrowsWhenAsked(Pacer):
    def batch_size(self, step):
        self.size += 1
        return self.size


class Divides(Pacer):
    def observe(self, view):
        super().observe(view)
        if not view.out_of_memory:
            self.rate = view.sampled_tokens / view.step_time_s


class StartsAnew(Pacer):
    def observe(self, view):
        self.size = view.batch_size // 2 if view.out_of_memory else self.size + 1

    def restore(self, state):
        pass


class Monitor:
    """Finds a truncation rate of 1 after three steps."""

    def __init__(self, context):
        self.row = 0

    def observe(self, metrics):
        is_cut = (metrics.get("truncation_rate") or 0.0) >= 1.0
        self.row = self.row + 1 if is_cut else 0
        return [Finding(state="cut", message=f"{self.row} steps; raise max_tokens")] if self.row > 2 else []

    def state(self):
        return {"row": self.row}

    def restore(self, state):
        self.row = state["row"]


SaysText = variant(Monitor, observe=lambda self, line: ["all is lost"] if Monitor.observe(self, line) else [])
ShoutsStates = variant(
    Monitor, observe=lambda self, line: [Finding(state="CUT OFF", message="") for _ in Monitor.observe(self, line)]
)
RollsFindings = variant(Monitor, observe=lambda self, line: [Finding(state="luck", message=str(random.random()))])
ForgetsRows = variant(Monitor, restore=lambda self, state: None)


class NeedsFields(Monitor):
    def observe(self, metrics):
        metrics["truncation_rate"] + 0.0
        return super().observe(metrics)


class WritesLines(Monitor):
    def observe(self, metrics):
        metrics["seen"] = True
        return super().observe(metrics)


class Recorder:
    """Appends to a file."""

    def __init__(self, context):
        self.file = None
        self.count = 0

    def start(self, manifest, folder):
        self.file = (folder / "mine.jsonl").open("a")

    def step(self, metrics):
        self.file.write(json.dumps(metrics) + "\n")
        self.count += 1

    def checkpoint(self, folder, name):
        assert (folder / "adapter_config.json").is_file()

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]

    def finish(self, error=None):
        if self.file is not None:
            self.file.close()


NeedsNumbers = variant(Recorder, step=lambda self, metrics: float(metrics.get("loss", 0.0)))
NeedsAStart = variant(Recorder, finish=lambda self, error=None: self.file.close())
PopsTheStep = variant(Recorder, step=lambda self, metrics: metrics.pop("step"))
CannotRestore = variant(Recorder, restore=property())


class NeedsSuccess(Recorder):
    def finish(self, error=None):
        if error is not None:
            raise error


class StartsOnce(Recorder):
    def start(self, manifest, folder):
        super().start(manifest, folder)
        (folder / "mine").mkdir()


class Detector:
    """Every third token plans."""

    def __init__(self, context):
        pass

    def masks(self, completions_G):
        return [np.arange(len(tokens_T)) % 3 == 0 for tokens_T in completions_G]


OneMaskShort = variant(Detector, masks=lambda self, tokens_GT: Detector.masks(self, tokens_GT)[:-1])
MasksOfNumbers = variant(
    Detector, masks=lambda self, tokens_GT: [mask_T.astype(float) for mask_T in Detector.masks(self, tokens_GT)]
)
NeedsTokens = variant(Detector, masks=lambda self, tokens_GT: [each_T == each_T[0] for each_T in tokens_GT])
RollsMarks = variant(
    Detector, masks=lambda self, tokens_GT: [np.random.default_rng().random(len(each_T)) < 0.5 for each_T in tokens_GT]
)


class WritesTokens(Detector):
    def masks(self, completions_G):
        for tokens_T in completions_G:
            tokens_T[:] = 0
        return super().masks(completions_G)
