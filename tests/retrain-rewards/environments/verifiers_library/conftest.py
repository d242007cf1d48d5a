"""What the tests of environments need: the packages beside them, and a player in place of a policy."""

import importlib.util
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from retrain.api import Action, EpisodeResult, LoadedData, Observation, StopReason
from retrain_rewards.environments.verifiers_library.environment import VerifiersEnvironment
from retrain_rewards.environments.verifiers_library.settings import Settings

PACKAGES = Path(__file__).parent / "packages"


def pytest_collection_modifyitems(items):
    """Skip what needs a generation of the library that is not there."""
    for item in items:
        if item.get_closest_marker("classic") and not has("verifiers.legacy"):
            item.add_marker(pytest.mark.skip(reason="needs classic verifiers: pip install 'verifiers==0.3.1'"))
        if item.get_closest_marker("tasksets") and not has("verifiers.v1"):
            item.add_marker(pytest.mark.skip(reason="needs verifiers with v1: pip install 'verifiers>=0.3.1'"))


def pytest_configure(config):
    """The two generations of the library."""
    config.addinivalue_line("markers", "classic: needs a version of verifiers that has classic environments")
    config.addinivalue_line("markers", "tasksets: needs a version of verifiers that has v1 tasksets")


def has(module):
    """Whether a module is installed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    """The environments of this folder can be imported here, as those beside a configuration can."""
    monkeypatch.syspath_prepend(str(PACKAGES))
    yield
    for name in [name for name in sys.modules if (PACKAGES / f"{name}.py").exists()]:
        del sys.modules[name]


@dataclass
class Played:
    """All observations, turn by turn, and the results."""

    seen: list[dict[int, Observation]] = field(default_factory=list)
    results: Sequence[EpisodeResult] = ()

    @property
    def values(self):
        return [result.score.value for result in self.results]

    @property
    def details(self):
        return [result.score.detail for result in self.results]


@dataclass
class Table:
    """An environment, sent through pickling as the kernel sends it, with its tasks."""

    environment: VerifiersEnvironment
    data: LoadedData

    def play(self, examples, says, stop=StopReason.EOS):
        """Play to the end; `says` is a function, or a list of replies per episode."""
        speak = says if callable(says) else lambda number, turn, _: says[number][turn]
        played = Played()
        observations = self.environment.reset(examples)
        while observations and len(played.seen) < 50:
            played.seen.append(dict(observations))
            turn = len(played.seen) - 1
            actions = {n: Action(text=speak(n, turn, each), stop_reason=stop) for n, each in observations.items()}
            observations = self.environment.step(dict(reversed(actions.items())))
        played.results = self.environment.results()
        return played


@pytest.fixture
def sit():
    """`sit("guess_number", max_turns=2)`: an environment ready to be played."""

    def made(name, **settings):
        there = VerifiersEnvironment(Settings(id=name, **{"timeout_s": 30.0, **settings}))
        here = pickle.loads(pickle.dumps(there))
        return Table(environment=here, data=here.load())

    return made
