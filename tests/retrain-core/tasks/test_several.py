"""The share of each of `[[data.tasks]]`, by its weight or its size."""

from types import SimpleNamespace

import numpy as np
import pytest

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example
from retrain.tasks import several
from retrain.tasks.prompts import PromptPool
from retrain.tasks.tasks import Tasks

SIZES = {"small": 16, "large": 256}
VERIFIER = SimpleNamespace(names=(), rewards=(), timeout_s=None, close=lambda: None)


@pytest.fixture
def weights(load, plugins, monkeypatch):
    """`weights("schedule = ...", large="weight = 2.0")`: the weight of each task, by its name."""

    def prompts(name, count):
        examples = (Example(id=f"{name}/{n}", prompt=f"{name} {n}", reference="") for n in range(count))
        return tuple(Prompt(example=each, tokens_T=np.array([1])) for each in examples)

    def load_task(context, name):
        pool = PromptPool(train=prompts(name, SIZES[name]), held_out=prompts("held out", 2), seeds=context.seeds)
        return Tasks(pool=pool, verifier=VERIFIER, context_length=None, notes=(), context=context, name=name)

    def call(data, **of_tasks):
        tables = "".join(f'[[data.tasks]]\nname = "{name}"\n{of_tasks.get(name, "")}\n' for name in SIZES)
        config, _ = load(f"[data]\n{data}\n{tables}")
        monkeypatch.setattr(several, "load_task", load_task)
        found = several.load_several(PluginContext(config=config, seeds=Seeds(0), plugins=plugins))
        return {each.name: each.weight for each in found.several}

    return call


@pytest.mark.parametrize(
    ("data", "ratio"),
    [
        ("", 1.0),
        ('schedule = "proportional"', 16.0),
        ('schedule = "temperature"', 4.0),
        ('schedule = "temperature"\nschedule_temperature = 1.0', 16.0),
        ('schedule = "temperature"\nschedule_temperature = 4.0', 2.0),
        ('schedule = "temperature"\nschedule_temperature = 1e9', 1.0),
        ('schedule = "posterior"', 1.0),
    ],
)
def test_shares_follow_the_sizes_by_the_schedule(weights, data, ratio):
    found = weights(data)
    assert found["large"] / found["small"] == pytest.approx(ratio)


def test_a_weight_is_relative_to_the_others(weights):
    assert weights("", large="weight = 2.5") == {"small": 1.0, "large": 2.5}
