"""A real HTTP server for tests that speaks vLLM's completions protocol, with faults that a test switches on.

`serving(model)` starts one in this process; `python tests/kit/tiny_server.py` one in a process of its own that can be
killed. What it gets wrong on purpose: `faults` holds one behaviour per completion request, used up in order; the traps
of the real server (names that exist, stale caches of keys and values, adapters nobody loaded) are always there.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.kit import http_handler
from tests.kit.http_handler import in_a_thread

BASE = "toy"
EOS = (0, 2)  # of the model, where a request names none
BLOCK = 128  # tokens per block of the cache of keys and values
Body = dict[str, Any]
Fault = Callable[["Handler", Body], None]


class Model(Protocol):
    """What computes: weights of an adapter from its folder (None = the base), and logits after some tokens."""

    vocabulary: int
    context_limit: int
    root: str

    def load(self, folder: Path) -> Any: ...

    def logits(self, ids: list[int], weights: Any, cache: dict[Any, Any]) -> Iterator[np.ndarray]:
        """Logits after `ids`, and after each further token that is sent in. `cache` is that of one adapter's name."""


class Handler(http_handler.Handler):
    """One connection; the routes are vLLM's."""

    server: InferenceServer

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self.hang()
        if self.path == "/v1/models":
            self.reply({"data": self.server.entries()})
        elif self.path == "/health":
            self.reply({})
        else:
            self.error(404, "Not Found")

    def hang(self) -> None:
        """Nothing happens while the server hangs."""
        while self.server.hangs and not self.server.released.wait(0.01):
            continue

    def do_POST(self) -> None:
        self.hang()
        asked = json.loads(self.body())
        server = self.server
        with server.lock:
            server.requests.append((self.path, asked))
        if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
            self.error(401, "Unauthorized")
        elif self.path == "/v1/completions":
            self.complete(asked)
        elif self.path == "/v1/load_lora_adapter":
            self.load(asked)
        elif self.path == "/v1/unload_lora_adapter":
            known = server.adapters.pop(asked["lora_name"], None)
            self.text("Success") if known is not None else self.error(404, "The lora adapter cannot be found.")
        elif self.path == "/control":  # ours: a test in another process switches faults on
            for name, value in asked.items():
                setattr(server, name, value)
            self.reply({})
        elif self.path.partition("?")[0] in ("/pause", "/resume", "/update_weights"):
            if "weight_dir" in asked:
                server.base = server.model.load(Path(asked["weight_dir"]))
            self.reply({"status": "ok"})
        else:
            self.error(404, "Not Found")

    def load(self, asked: Body) -> None:
        """As vLLM: an existing name is refused and goes on with its old weights, unless loaded in place."""
        server, name = self.server, asked["lora_name"]
        with server.lock:
            if name in server.adapters and not asked.get("load_inplace"):
                self.error(400, f"The lora adapter '{name}' has already been loaded.")
                return
            try:
                loaded = server.model.load(Path(asked["lora_path"]))
                is_stale = server.is_stale and len(server.adapters) > 0
                server.adapters[name] = list(server.adapters.values())[-1] if is_stale else loaded
            except (OSError, ValueError, KeyError) as error:
                self.error(404, f"Loading lora {name} failed: No adapter found for {asked['lora_path']} ({error})")
                return
        self.text(f"Success: LoRA adapter '{name}' added successfully.")

    def complete(self, asked: Body) -> None:
        server = self.server
        with server.lock:
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
            fault = server.faults.popleft() if server.faults else server.always
            is_full = 0 < server.limit < server.busy
        try:
            if is_full:
                self.error(429, "too many requests", Retry_After=str(server.retry_after_s))
                return
            if server.latency_s:
                time.sleep(server.latency_s)
            known = asked["model"] == server.model_name or asked["model"] in server.adapters
            if not known:
                self.error(404, f"The model `{asked['model']}` does not exist.")
            elif fault is None:
                self.reply(server.answer(asked))
            else:
                fault(self, server.answer(asked))
        finally:
            with server.lock:
                server.busy -= 1

    def text(self, text: str) -> None:
        self.send(200, text.encode(), Content_Type="text/plain; charset=utf-8")

    def error(self, status: int, message: str, **headers: str) -> None:
        self.reply({"error": {"message": message, "code": status}}, status, **headers)


class InferenceServer(ThreadingHTTPServer):
    """The server's state; `deaf` ignores adapters, `processed` gives log-probabilities after temperature."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, model: Model, *, port: int = 0, **settings: Any) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = model
        self.lock = threading.Lock()
        self.requests: list[tuple[str, Body]] = []
        self.connections: set[socket.socket] = set()
        self.adapters: dict[str, Any] = {}
        self.caches: dict[str, dict[Any, Any]] = {}
        self.base: Any = None
        self.faults: deque[Fault | None] = deque()
        self.always: Fault | None = None
        self.busy = self.most_busy = self.limit = 0
        self.retry_after_s = 0.05
        self.latency_s = 0.0
        self.processed = True
        self.deaf = self.ignores_n = False
        self.hangs = False
        self.layers = 0  # with experts, as after --enable-return-routed-experts
        self.is_stale = False  # new names get the weights of the last one
        self.key = ""
        self.texts: dict[int, str] = {}  # of tokens, for log-probabilities of given ones
        self.model_name = BASE
        self.released = threading.Event()
        for name, value in settings.items():
            setattr(self, name, value)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def completions(self) -> list[Body]:
        """All completion requests so far."""
        return [body for path, body in self.requests if path == "/v1/completions"]

    def entries(self) -> list[Body]:
        limit = self.model.context_limit
        base = {"id": self.model_name, "root": self.model.root, "parent": None, "max_model_len": limit}
        return [base, *({"id": name, "root": "", "parent": self.model_name} for name in self.adapters)]

    def answer(self, asked: Body) -> Body:
        """A completion drawn from the adapter's distribution, one token after the other."""
        if "prompt_logprobs" in asked:
            return self.given(asked)
        name, temperature = asked["model"], asked["temperature"]
        weights = self.base if self.deaf else self.adapters.get(name, self.base)
        cache = self.caches.setdefault(f"{name}{asked.get('cache_salt', '')}", {})
        stream = np.random.default_rng(asked["seed"])
        stop, tokens, logprobs, tops = set(asked.get("stop_token_ids", EOS)), [], [], []
        steps = self.model.logits(list(asked["prompt"]), weights, cache)
        logits = next(steps)
        while True:
            warm, shown = log_softmax(logits / (temperature or 1.0)), log_softmax(logits)
            token = int(np.searchsorted(np.cumsum(np.exp(warm)), stream.random() * np.exp(warm).sum()))
            token = min(token, self.model.vocabulary - 1) if temperature else int(logits.argmax())
            shown = warm if self.processed else shown
            tokens.append(token)
            logprobs.append(float(shown[token]))
            best = np.argsort(-shown)[: asked["logprobs"]]
            named = "token_id:{}" if asked.get("return_tokens_as_token_ids") else "t{}"
            tops.append({named.format(n): float(shown[n]) for n in {token, *best.tolist()}})
            if token in stop or len(tokens) == asked["max_tokens"]:
                break
            logits = steps.send(token)  # type: ignore[attr-defined]
        choice = {
            "index": 0,
            "text": " ".join(map(str, tokens)),
            "token_ids": tokens,
            "prompt_token_ids": asked["prompt"],
            "logprobs": {"token_logprobs": logprobs, "top_logprobs": tops, "tokens": [f"token_id:{t}" for t in tokens]},
            "finish_reason": "stop" if tokens[-1] in stop else "length",
        }
        if self.layers:
            choice["routed_experts"] = expert_file(np.array([*asked["prompt"], *tokens[:-1]]), self.layers)
        return {"id": "1", "object": "text_completion", "model": name, "choices": [choice]}

    def given(self, asked: Body) -> Body:
        """Log-probabilities of the prompt's own tokens, as vLLM gives them: by the id as text, none for the first."""
        prompt = list(asked["prompt"])
        steps = self.model.logits(prompt[:1], self.adapters.get(asked["model"], self.base), {})
        entries, logits = [None], next(steps)
        for token in prompt[1:]:
            shown = float(log_softmax(logits)[token])
            entries.append({str(token): {"logprob": shown, "rank": 1, "decoded_token": self.texts.get(token)}})
            logits = steps.send(token)  # type: ignore[attr-defined]
        return {"id": "1", "model": asked["model"], "choices": [{"index": 0, "prompt_logprobs": entries}]}

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that hangs up is what some tests are about."""

    def die(self) -> None:
        """As after SIGKILL: nothing listens, every connection is cut, every adapter forgotten."""
        self.shutdown()
        self.server_close()
        self.released.set()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(model: Model, **settings: Any) -> Iterator[InferenceServer]:
    """A server for the duration of the block."""
    server = InferenceServer(model, **settings)
    with in_a_thread(server, end=server.die):
        yield server


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


# ---------------------------------------------------------------- faults


def status(code: int, **headers: str) -> Fault:
    return lambda handler, answer: handler.error(code, "switched on", **headers)


def hangs(handler: Handler, answer: Body) -> None:
    handler.server.released.wait(60)
    handler.close_connection = True


def hangs_up(handler: Handler, answer: Body) -> None:
    handler.close_connection = True
    with suppress(OSError):
        handler.connection.shutdown(socket.SHUT_RDWR)


def expert_file(read_T: np.ndarray, layers: int) -> str:
    """As vLLM encodes them: of each token that was read, here its id in each layer, and the next one."""
    file = io.BytesIO()
    np.save(file, np.stack([np.stack([read_T, read_T + 1], axis=1)] * layers, axis=1).astype(np.int32))
    return base64.b64encode(file.getvalue()).decode()


def truncated(handler: Handler, answer: Body) -> None:
    handler.send(200, json.dumps(answer).encode()[:-40])


def not_json(handler: Handler, answer: Body) -> None:
    handler.send(200, b"<html>gateway</html>")


def changed(**parts: Any) -> Fault:
    """The answer with parts of its choice replaced: a value, or a function of what stood there."""

    def fault(handler: Handler, answer: Body) -> None:
        choice = answer["choices"][0]
        for name, value in parts.items():
            place = choice if name in choice else choice["logprobs"] if name in choice["logprobs"] else answer
            place[name] = value(place[name]) if callable(value) else value
        handler.reply(answer)

    return fault
