"""Sampling behind a server on this machine: `python served.py engine|alone SETTINGS.json`; lines go to `calls.jsonl`.

Starts vLLM with the interpreter that has it. `engine` draws through our engine `vllm`, as a run does: with the adapter
that training publishes, log-probabilities of every token, one request per completion. `alone` sends the server the
same prompts, all at once, and wants nothing but tokens of the model without an adapter: what it can do at most.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from meter import Meter

START_S, STOP_S, CALL_S = 420.0, 20.0, 600.0
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",  # by itself it leaves a core to others
    "VLLM_NO_USAGE_STATS": "1",
}
ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
TYPES = {"fp32": "float32", "bf16": "bfloat16"}


def main() -> None:
    """Start the server, draw, stop it."""
    how, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    with _serving(settings, has_adapter=how == "engine") as url:
        if how == "alone":
            _alone(url, settings)
            return
        import policy

        file = Path(settings["config"])
        text = file.read_text(encoding="utf-8") + f'\n[inference]\nengine = "vllm"\nurl = "{url}"\n'
        settings["config"] = str(file.with_name("served.toml"))
        Path(settings["config"]).write_text(text, encoding="utf-8")
        policy.run("sample", settings)


def _alone(url: str, settings: dict[str, Any]) -> None:
    meter = Meter("calls.jsonl", "cpu")
    for call in settings["calls"]:
        asked = {"model": settings["model"], "max_tokens": call["new"], "temperature": 1.0, "ignore_eos": True}
        rows = [prompt for prompt in call["prompts"] for _ in range(settings["group"])]
        work = partial(asyncio.run, _complete_all(url, rows, asked))
        meter.measure(work, new=call["new"])


async def _complete_all(url: str, rows: list[list[int]], asked: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=CALL_S, limits=httpx.Limits(), trust_env=False) as client:
        await asyncio.gather(*(_complete(client, url, row, asked) for row in rows))


async def _complete(client: httpx.AsyncClient, url: str, prompt: list[int], asked: dict[str, Any]) -> None:
    answer = await client.post(f"{url}/v1/completions", json={**asked, "prompt": prompt})
    answer.raise_for_status()
    drawn = answer.json()["usage"]["completion_tokens"]
    if drawn != asked["max_tokens"]:
        sys.exit(f"a completion has {drawn} tokens")


@contextmanager
def _serving(settings: dict[str, Any], *, has_adapter: bool) -> Iterator[str]:
    """The URL of a server that runs for the duration of the block; what it says goes to `server.log`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    rows = len(settings["calls"][0]["prompts"]) * settings["group"]
    options = ["--dtype", TYPES[settings["dtype"]], "--max-num-seqs", str(rows), "--max-model-len", "1024"]
    if has_adapter:
        options += ["--enable-lora", "--max-lora-rank", "16", "--max-loras", "2"]
        options += ["--logprobs-mode", "processed_logprobs"]
    command = [settings["server_python"], "-m", "vllm.entrypoints.openai.api_server", "--model", settings["model"]]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], *options]
    environ = {**os.environ, **ENVIRONMENT, **(ADAPTERS if has_adapter else {})}
    with Path("server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        _wait(url, process)
        yield url
    finally:
        _stop(psutil.Process().children(recursive=True))  # its engine is a process of its own


def _stop(processes: list[psutil.Process]) -> None:
    for stop in (psutil.Process.terminate, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                stop(process)
        _, processes = psutil.wait_procs(processes, timeout=STOP_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + START_S
    while time.monotonic() < limit and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    sys.exit(f"{Path('server.log').read_text(encoding='utf-8', errors='replace')[-3000:]}\nthe server did not start")


if __name__ == "__main__":
    main()
