"""A backend on the tests' small Tinker service, through the real SDK and real HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from retrain.api import Config, PluginContext, Seeds, load_plugins
from retrain.run.tables import registered_tables
from retrain_tinker.backend import TinkerBackend, create_backend
from retrain_tinker.options import TinkerOptions
from tests.kit.http_handler import in_a_thread
from tests.kit.tinker_rows import EOS
from tests.kit.tinker_server import serving
from tests.kit.tinker_toy import MODEL, Toy

PLUGINS = load_plugins()
TABLES = registered_tables(PLUGINS)


class ToyTokenizer:
    eos_token_id = EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % 20 for letter in text]}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read once, when it was imported


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def delta(toy: Toy) -> Callable[[], np.ndarray]:
    """The weights that the one training client has learnt."""

    def found() -> np.ndarray:
        (adapter,) = toy.adapters.values()
        return adapter.delta.copy()

    return found


@pytest.fixture
def url(toy: Toy) -> Iterator[str]:
    with serving(toy) as address:
        yield address


@pytest.fixture
def context(url: str) -> Callable[..., PluginContext]:
    """A context with keys by `table__key` in place of their defaults, `options__key` for `[backend.options]`."""

    def make(**changes: Any) -> PluginContext:
        given: dict[str, dict[str, Any]] = {
            "model": {"model": MODEL, "base_url": url, "lora_rank": 2},
            "training": {"lr": 0.1, "temperature": 1.0},
            "backend": {"backend": "tinker"},
            "options": {"timeout_s": 20.0, "connect_timeout_s": 20.0},
        }
        for path, value in changes.items():
            table, _, key = path.partition("__")
            given.setdefault(table, {})[key] = value
        options = TinkerOptions(**given.pop("options"))
        tables = {name: TABLES[name].model(**values) for name, values in given.items()}
        config = Config(tables=tables)
        return PluginContext(config=config, seeds=Seeds(1), plugins=PLUGINS, params=options, tokenizer=ToyTokenizer())

    return make


@pytest.fixture
def backend(context: Callable[..., PluginContext]) -> Iterator[Callable[..., TinkerBackend]]:
    """Backends that are closed when the test is over."""
    made: list[TinkerBackend] = []

    def make(**changes: Any) -> TinkerBackend:
        made.append(create_backend(context(**changes)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def serve_bytes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[bytes], str]]:
    """A URL that answers with given bytes."""
    shelf = tmp_path_factory.mktemp("shelf")
    handler = partial(SimpleHTTPRequestHandler, directory=shelf)
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:

        def serve(content: bytes) -> str:
            (shelf / "file").write_bytes(content)
            return f"http://127.0.0.1:{port}/file"

        yield serve
