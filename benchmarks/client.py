"""What the inference client costs: `python benchmarks/client.py [--json FILE]`.

A server in a process of its own answers after a set time, and computes nothing.

1. Concurrency: 128 completions with 200 ms of latency each, the last with 400 ms; the time of all against the slowest.
2. Overhead: processor time of this process per completion of 64 tokens, 128 in flight, everything from the request to
   the checked sample included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from retrain.engines.client import Client
from retrain.engines.dialect import Caller, ServedModel
from retrain.engines.table import Settings
from retrain.engines.vllm import VLLM

COMPLETIONS, LATENCY_S, TOKENS, REPEATS = 128, 0.2, 64, 5
MODEL = "nothing"


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve())
        return
    with _server() as url:
        figures = {
            "date": datetime.now(UTC).date().isoformat(),
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
            "completions": COMPLETIONS,
            "latency_s": LATENCY_S,
            **_concurrency(url),
            **_overhead(url),
        }
    for name, value in figures.items():
        print(f"{name:28} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _concurrency(url: str) -> dict[str, float]:
    ratios = []
    for _ in range(REPEATS):
        ended = [0.0] * COMPLETIONS
        with _caller(url) as caller:
            started = time.perf_counter()
            for batch in caller.client.run(_calls(caller, [LATENCY_S] * (COMPLETIONS - 1) + [2 * LATENCY_S])):
                for number, _ in batch:
                    ended[number] = time.perf_counter() - started
        ratios.append(max(ended) / (2 * LATENCY_S))
    return {"total_over_slowest": round(statistics.median(ratios), 3)}


def _overhead(url: str) -> dict[str, float]:
    with _caller(url) as caller:
        caller.client.results(_calls(caller, [0.0] * COMPLETIONS))  # connections are made once per run
        costs = []
        for _ in range(REPEATS):
            calls = _calls(caller, [0.0] * 4 * COMPLETIONS)
            started = time.process_time()
            caller.client.results(calls)
            costs.append((time.process_time() - started) / len(calls))
    return {"cpu_ms_per_completion": round(1000 * statistics.median(costs), 3)}


@contextmanager
def _caller(url: str) -> Iterator[Caller]:
    client = Client(Settings(urls=(url,)))
    served = {url: ServedModel(name=MODEL)}
    try:
        yield Caller(
            client=client,
            dialect=VLLM(),
            served=served,
            stop_ids=frozenset({0}),
            vocabulary=1000,
            context_limit=None,
        )
    finally:
        client.close()


def _calls(caller: Caller, latencies_s: list[float]) -> list[Any]:
    prompt_T = np.arange(1, 101)
    return [
        caller.completion(prompt_T, seed=round(1e6 * latency_s), max_tokens=TOKENS, temperature=1.0)
        for latency_s in latencies_s
    ]


@contextmanager
def _server() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


async def _serve() -> None:
    """Answers every completion with the same tokens, after as many microseconds as its seed says."""
    choice = {
        "token_ids": [7] * TOKENS,
        "prompt_token_ids": None,
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [-0.5] * TOKENS, "top_logprobs": [{"7": -0.5}] * TOKENS},
    }
    body = json.dumps({"model": MODEL, "choices": [choice]}).encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                await asyncio.sleep(asked["seed"] / 1e6)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main()
