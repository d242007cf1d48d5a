"""Several ranks: as processes through the backend, and as threads around trainers, which start at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from retrain.api import Config, PluginContext, Seeds, load_plugins
from retrain.run.tables import read_config, registered_tables
from retrain_local.devices.group import PeerFailedError
from retrain_local.factory import create_backend
from retrain_local.options import LocalOptions

T = TypeVar("T")


class ThreadGroup:
    """A `Group` whose ranks are threads of this process."""

    shards = is_broken = False

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def gathered(self, work: Callable[[], T]) -> list[T]:
        try:
            own: Any = work()
        except BaseException as error:
            self._exchanged(error)
            raise
        found = self._exchanged(own)
        for rank, each in enumerate(found):
            if isinstance(each, BaseException):
                raise PeerFailedError(rank, str(each))
        return found

    def add(self, gradients: Sequence[Tensor]) -> None:
        mine = [each.clone() for each in gradients]
        for at, total in enumerate(zip(*self._exchanged(mine), strict=True)):
            gradients[at].copy_(torch.stack(total).sum(0))

    def _exchanged(self, own: Any) -> list[Any]:
        self._shared["found"][self.rank] = own
        self._shared["barrier"].wait(60)
        found = list(self._shared["found"])
        self._shared["barrier"].wait(60)
        return found


@pytest.fixture
def on_threads() -> Callable[..., list[Any]]:
    """What `work(group)` returns on each of so many ranks; the first error is raised."""

    def run(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
        shared = {"found": [None] * size, "barrier": threading.Barrier(size)}
        found: list[Any] = [None] * size
        errors: list[BaseException] = []

        def on(rank: int) -> None:
            try:
                found[rank] = work(ThreadGroup(rank, size, shared))
            except BaseException as error:  # raised below, where the test can see it
                errors.append(error)

        threads = [threading.Thread(target=on, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerFailedError))
        return found

    return run


@pytest.fixture
def make_config(model_folder: Path) -> Callable[..., Config]:
    """The configuration of a run, as its file would give it."""

    def make(folder: Path | str = model_folder, /, **tables: dict[str, Any]) -> Config:
        given: dict[str, Any] = {
            "model": {"model": str(folder), "lora_rank": 4} | tables.pop("model", {}),
            "backend": {"backend": "local", "devices": "cpu"} | tables.pop("backend", {}),
            "training": {"lr": 1e-2} | tables.pop("training", {}),
            "optimizer": {"grad_clip_norm": 0.0} | tables.pop("optimizer", {}),
            **tables,
        }
        plugins = load_plugins()
        config, problems = read_config(given, plugins, registered_tables(plugins))
        assert not problems
        return config

    return make


@pytest.fixture
def make_ranked(make_config: Callable[..., Config]) -> Iterator[Callable[..., Any]]:
    """A backend, of `ranks` processes if there are several."""
    made: list[Any] = []

    def make(ranks: int = 1, parallel: str = "replicate", check_stop: Callable[[], None] = int, **tables: Any) -> Any:
        options = {"parallel": parallel} | tables.pop("options", {})
        tables["backend"] = {"devices": ",".join(["cpu"] * ranks), "options": options}
        config, params = make_config(**tables), LocalOptions(**options)
        given = {"plugins": load_plugins(), "params": params, "check_stop": check_stop}
        made.append(create_backend(PluginContext(config=config, seeds=Seeds(1), **given)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
