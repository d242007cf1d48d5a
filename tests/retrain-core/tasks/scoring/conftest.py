"""Services that are closed again."""

import pytest

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.types import Example
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService


@pytest.fixture
def service():
    """`service(reward, other=reward, workers=1, ...)`: a service of rewards by name, of weight 1, and its settings."""
    made = []

    def make(*only, weights=None, **given):
        named = {"the_reward": only[0]} if only else {}
        named |= {name: value for name, value in given.items() if hasattr(value, "score")}
        settings = {name: value for name, value in given.items() if not hasattr(value, "score")}
        table = ScoringTable.model_validate({"workers": 1, "memory_gb": 4.0, **settings})
        rewards = [
            NamedReward(name=name, reward=reward, weight=(weights or {}).get(name, 1.0))
            for name, reward in named.items()
        ]
        made.append(ScoringService(rewards, table))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def example():
    """A task whose answer is 7."""
    return Example(id="e", prompt="p", reference="7")
