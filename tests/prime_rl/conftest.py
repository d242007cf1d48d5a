"""The inference server of the quick tests, and PRIME-RL's own trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.prime_rl.their_trainer import TheirTrainer
from tests.prime_rl_stack.stack import Server, making, serving


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., TheirTrainer]]:
    with making(TheirTrainer, tmp_path) as make:
        yield make
