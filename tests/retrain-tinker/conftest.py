"""A backend on a small Tinker service of the tests' own, through the real SDK and real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from retrain.api import Config, PluginContext, Seeds, load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import KlTable, SftTable
from retrain_tinker.backend import TinkerBackend, create_backend
from retrain_tinker.options import TinkerOptions
from tests.kit.tinker_rows import EOS
from tests.kit.tinker_server import serving
from tests.kit.tinker_toy import MODEL, Toy


class ToyTokenizer:
    """The two things that the backend asks of a tokenizer."""

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
        models = {
            "model": schema.ModelTable,
            "training": schema.TrainingTable,
            "backend": schema.BackendTable,
            "algorithm": schema.AlgorithmTable,
            "optimizer": schema.OptimizerTable,
            "lora": schema.LoraTable,
            "kl": KlTable,
            "sft": SftTable,
        }
        tables = {name: models[name](**values) for name, values in given.items()}
        return PluginContext(
            config=Config(tables=tables),
            seeds=Seeds(1),
            plugins=load_plugins(),
            params=options,
            tokenizer=ToyTokenizer(),
        )

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
def serve_bytes() -> Iterator[Callable[..., str]]:
    """A URL that answers with given bytes."""
    servers: list[ThreadingHTTPServer] = []

    def serve(content: bytes, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Silence."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/file"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()
