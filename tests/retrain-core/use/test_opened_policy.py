"""A policy that was opened knows what it samples from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.errors import BackendError
from retrain.run.opened import Opened


class Loads:
    """A backend that can only go on from checkpoints, and refuses one of them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def load(self, folder: Path) -> None:
        self.loaded.append(folder.name)
        if folder.name == "broken":
            raise BackendError

    def publish(self) -> int:
        return len(self.loaded)


@pytest.fixture
def policy() -> Any:
    config: Any = SimpleNamespace(place=lambda key: key, backend=SimpleNamespace(backend="loads"))
    given: Any = {"subject": None, "plugins": None, "context": None, "config": config, "backend": Loads()}
    return Opened(**given)


def test_what_is_there_already_is_not_loaded_again(policy: Any) -> None:
    policy.use(None)  # a backend that was just built has the base, whether or not it can return to it
    for name in ("a", "a", "b", "b", "a"):
        policy.use(Path(name))
    assert policy.backend.loaded == ["a", "b", "a"]
    with pytest.raises(BackendError, match="cannot return to the model that training began with"):
        policy.use(None)


def test_after_a_failure_everything_is_loaded_again(policy: Any) -> None:
    policy.use(Path("a"))
    with pytest.raises(BackendError):
        policy.use(Path("broken"))
    policy.use(Path("a"))
    assert policy.backend.loaded == ["a", "broken", "a"]


def test_what_is_made_from_it_shares_what_is_loaded(policy: Any) -> None:
    policy.use(Path("a"))
    replace(policy, subject="another").use(Path("b"))
    policy.use(Path("a"))
    assert policy.backend.loaded == ["a", "b", "a"]
