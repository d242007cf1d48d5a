"""The inference server of the quick tests, and PRIME-RL's own trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.prime_rl.their_trainer import TheirTrainer
from tests.prime_rl_stack.stack import Server, start_server


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("server"))
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., TheirTrainer]]:
    """Makes trainers whose processes end with the test."""
    opened: list[TheirTrainer] = []

    def make(**options: object) -> TheirTrainer:
        opened.append(TheirTrainer(folder=tmp_path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
