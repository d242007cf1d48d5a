"""A fleet of servers in processes of their own, and somebody who kills, stops, slows and confuses them at random."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import httpx

from tests.kit import server_process
from tests.kit.server_process import free_port, running
from tests.kit.tiny_server import launch, start

PROCESSED = ("--logprobs-mode", "processed_logprobs")


class Member(Protocol):
    """One server of the fleet; `faults` are the names of the methods that may befall it."""

    url: str
    faults: Sequence[str]

    def mend(self) -> None:
        """Undo what befell it."""

    def close(self) -> None:
        """End it."""


class StandIn:
    """`tests.kit.tiny_server` around the model."""

    faults = ("kill", "stop", "slow", "stale", "other_model")

    def __init__(self, model: Path) -> None:
        self._model = model
        self._process, self._port = start(model)
        self.url = f"http://127.0.0.1:{self._port}"

    def kill(self) -> None:
        """As `kill -9`, in the middle of whatever it does; it comes back empty."""
        self.close()

    def stop(self) -> None:
        """It takes connections and answers nothing."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def slow(self) -> None:
        """Each answer takes two seconds more."""
        self._control(latency_s=2.0)

    def stale(self) -> None:
        """New adapters get the weights of the one before."""
        self._control(is_stale=True)

    def other_model(self) -> None:
        """It comes back with other weights under the name of the model."""
        self.close()
        self._process = launch(self._model, "--noise", "0.05", port=self._port)

    def mend(self) -> None:
        if self._process.poll() is None and not self._is_another():
            os.kill(self._process.pid, signal.SIGCONT)
            self._control(latency_s=0.0, is_stale=False)
            return
        self.close()
        self._process = launch(self._model, port=self._port)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _is_another(self) -> bool:
        return "--noise" in self._process.args  # type: ignore[operator]

    def _control(self, **settings: object) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{self.url}/control", json=settings, timeout=5.0, trust_env=False)


class RealVllm:
    """A real vLLM; a restart takes it half a minute and more."""

    faults = ("kill", "stop")

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._log, self._port = model, folder / "vllm.log", server_process.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process = self._launched()
        server_process.wait_for(f"{self.url}/health", self._process, self._log, START_S)

    def kill(self) -> None:
        """As `kill -9`, its engine too."""
        self.close()

    def stop(self) -> None:
        """Its front end takes connections and answers nothing."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def num_answers(self) -> int:
        """Completions that it has answered since the start, probes among them."""
        return self._log.read_text(encoding="utf-8").count('"POST /v1/completions HTTP/1.1" 200')

    def mend(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGCONT)
        else:
            self._process = self._launched()

    def close(self) -> None:
        server_process.end(self._process)

    def _launched(self) -> subprocess.Popen[bytes]:
        line = command(self._model, self._port, *ADAPTERS, *PROCESSED)
        return server_process.launch(line, self._log, environ())


@contextmanager
def troubled(members: Sequence[Member], seed: int) -> Iterator[Counter[str]]:
    """Faults at random for the duration of the block, never on all members at once; yields how many of each so far."""
    stream, over, counts = random.Random(seed), threading.Event(), Counter[str]()
    broken: dict[Member, float] = {}  # until when

    def trouble() -> None:
        while not over.wait(stream.uniform(1.0, 6.0)):
            for member in [member for member, until in broken.items() if until < time.monotonic()]:
                del broken[member]
                member.mend()
            well = [member for member in members if member not in broken and answers(member)]
            if len(well) > 1:
                member = stream.choice(well)
                fault = stream.choice(member.faults)
                broken[member] = time.monotonic() + stream.uniform(0.5, 15.0)
                getattr(member, fault)()
                counts[f"{fault} {type(member).__name__}"] += 1

    thread = threading.Thread(target=trouble, name="trouble")
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()
        for member in broken:
            member.mend()


def answers(member: Member) -> bool:
    """Whether it has come back from the last fault."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{member.url}/health", timeout=5.0, trust_env=False).status_code == 200
    return False


# ---------------------------------------------------------------- a real vLLM on the CPU


START_S = 300.0
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
OPTIONS = ("--dtype", "float32", "--max-model-len", "640", "--max-num-seqs", "16", "--enforce-eager")
ADAPTERS = ("--enable-lora", "--max-lora-rank", "64", "--max-loras", "2")


def python() -> str:
    """The server's Python; empty when there is none."""
    return os.environ.get("RETRAIN_VLLM_PYTHON", "")


@contextmanager
def vllm_serving(model: Path, log: Path, *options: str, takes_adapters: bool = True) -> Iterator[str]:
    """The URL of a server that runs for the duration of the block; what it says goes into a file."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    options = (*(ADAPTERS if takes_adapters else ()), *options)
    with running(command(model, port, *options), f"{url}/health", log, start_s=START_S, environ=environ()):
        yield url


def command(model: Path, port: int, *options: str) -> list[str]:
    start = [python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1"]
    return [*start, "--port", str(port), *OPTIONS, *options]


def environ() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}
