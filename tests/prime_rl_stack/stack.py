"""Starts the processes that a run with backend `prime_rl` needs: inference server, data ranks, trainer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "retrain-local" / "src" / "retrain_local" / "tiny"
SEQ_LEN = 128
START_S = 120.0

TOML = """
[model]
model = "builtin:tiny"
[backend]
backend = "prime_rl"
[backend.options]
output_dir = "{output_dir}"
seq_len = {seq_len}
data_world_size = {ranks}
transport = "{transport}"
zmq_port = {port}
sync_wait_s = 120
{options}
[inference]
engine = "vllm"
url = "{url}"
[training]
seed = 1
max_steps = 3
batch_size = 4
group_size = 4
max_tokens = 24
temperature = 0.7
save_every = 1
{training}
[data]
source = "arithmetic"
[reward]
type = "match"
"""


@dataclass
class Server:
    """A running inference server."""

    url: str

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Every request about weights that it has had, in order."""
        with urllib.request.urlopen(f"{self.url}/calls", timeout=60) as answer:
            return [(path, body) for path, body in json.load(answer)]

    def refuse(self, *codes: int) -> None:
        """Answer the next requests to load weights with these codes."""
        request = urllib.request.Request(f"{self.url}/switch", data=json.dumps({"refuse": codes}).encode())
        urllib.request.urlopen(request, timeout=60).close()


@dataclass
class Stack:
    """Ranks and trainer around one output folder; all of them are ended by `close`."""

    folder: Path
    transport: str = "filesystem"
    ranks: int = 2
    port: int = 0
    seq_len: int = SEQ_LEN
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def output_dir(self) -> Path:
        return self.folder / "out"

    def write_toml(self, server: Server, options: str = "", training: str = "") -> Path:
        """The configuration of a run on this stack."""
        self.port = self.port or two_free_ports()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        text = TOML.format(
            output_dir=self.output_dir,
            seq_len=self.seq_len,
            ranks=self.ranks,
            transport=self.transport,
            port=self.port,
            url=server.url,
            options=options,
            training=training,
        )
        file = self.folder / "retrain.toml"
        file.write_text(text, encoding="utf-8")
        return file

    def start_rank(self, rank: int) -> subprocess.Popen[bytes]:
        """A data rank; started again, it goes on where its predecessor was."""
        link = ("--transport", self.transport, "--port", str(self.port), "--seq-len", str(self.seq_len))
        return self._start("rank", str(rank), str(self.output_dir), *link)

    def start_trainer(self, *options: str) -> subprocess.Popen[bytes]:
        """The trainer; returns when it is ready."""
        sizes = ("--ranks", str(self.ranks), "--seq-len", str(self.seq_len))
        (self.output_dir / "TRAINER_READY").unlink(missing_ok=True)
        process = self._start("trainer", str(MODEL), str(self.output_dir), *sizes, *options)
        wait_until((self.output_dir / "TRAINER_READY").exists, process)
        return process

    def trained(self) -> list[dict[str, Any]]:
        """The trainer's own record of its steps."""
        file = self.output_dir / "trainer.jsonl"
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []

    def complaint(self) -> str:
        """What ranks or trainer found wrong with the wire; empty if nothing."""
        file = self.output_dir / "inbox" / "FAILED"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def close(self) -> None:
        """End every process."""
        for process in self.processes:
            process.kill()
            process.wait()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        self.processes.append(start(module, *arguments))
        return self.processes[-1]


AnyStack = TypeVar("AnyStack", bound=Stack)


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """One of the modules here as a process of its own, with one thread."""
    command = [sys.executable, "-m", f"tests.prime_rl_stack.{module}", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """An inference server with `builtin:tiny`, for the duration of the block."""
    file = folder / "port"
    process = start("policy_server", str(MODEL), str(file))
    try:
        wait_until(file.exists, process)
        yield Server(url=f"http://127.0.0.1:{file.read_text()}")
    finally:
        process.kill()
        process.wait()


@contextmanager
def making(kind: Callable[..., AnyStack], folder: Path) -> Iterator[Callable[..., AnyStack]]:
    """A function that makes stacks whose processes end with the block."""
    with ExitStack() as opened:
        yield lambda **options: opened.enter_context(closing(kind(folder=folder, **options)))


def wait_until(condition: Any, process: subprocess.Popen[Any], limit_s: float = START_S) -> None:
    """Until the condition holds; AssertionError when the process ends first, or it takes forever."""
    end = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end, "never happened"
        time.sleep(0.02)


def two_free_ports() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
