"""An inference server in a process of its own around a small real model: `python -m tests.kit.tiny_server --model M`.

It speaks the protocol of `inference_server`, computes with transformers, and takes PEFT adapters. `--fault NAME` and
`--every N` switch a fault on for every N-th completion; the port is printed once it listens.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit import inference_server
from tests.kit.inference_server import Body, Fault, Handler, InferenceServer

ROOT = Path(__file__).parents[2]


class TinyModel:
    """A causal language model on the CPU; an adapter is a copy of it with PEFT's matrices merged in."""

    def __init__(self, folder: Path, *, noise: float = 0.0) -> None:
        """`noise` is added to the weights of the last layer: another model, under the same name."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.root = str(folder)
        self._base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if noise:
            head = self._base.get_output_embeddings().weight.data
            head += noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
        self.vocabulary = int(self._base.get_input_embeddings().num_embeddings)
        self.context_limit = int(self._base.config.max_position_embeddings)
        self._lock = threading.Lock()

    def load(self, folder: Path) -> Any:
        import copy

        from peft import PeftModel

        if not (folder / "adapter_config.json").is_file():
            raise OSError("no adapter")
        return PeftModel.from_pretrained(copy.deepcopy(self._base), str(folder)).merge_and_unload().eval()

    def logits(self, ids: list[int], weights: Any, cache: dict[Any, Any]) -> Iterator[np.ndarray]:
        import torch

        model, past, fresh = weights or self._base, None, ids
        while True:
            with self._lock, torch.inference_mode():
                out = model(input_ids=torch.tensor([fresh]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            token = yield out.logits[0, -1].double().numpy()
            fresh = [token]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--raw", action="store_true", help="log-probabilities before temperature")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--every", type=int, default=0)
    options = parser.parse_args()
    server = InferenceServer(
        TinyModel(options.model, noise=options.noise), port=options.port, processed=not options.raw
    )
    server.model_name = str(options.model)
    if options.every:
        server.always = every(options.every, options.fault)
    print(f"port {server.server_address[1]}", flush=True)
    server.serve_forever(0.05)


def every(count: int, name: str) -> Fault:
    """A fault for every `count`-th completion, all of them in turn by the name `mixed`; none for the others."""
    numbers = itertools.count(1)
    faults = itertools.cycle([fault for key, fault in FAULTS.items() if name in (key, "mixed")])

    def sometimes(handler: Handler, answer: Body) -> None:
        if next(numbers) % count == 0:
            next(faults)(handler, answer)
        else:
            handler.reply(answer)

    return sometimes


FAULTS = {
    "hangs_up": inference_server.hangs_up,
    "truncated": inference_server.truncated,
    "429": inference_server.status(429),
    "500": inference_server.status(500),
    "nan": inference_server.changed(token_logprobs=lambda values: [float("nan"), *values[1:]]),
    "lengths": inference_server.changed(token_logprobs=lambda values: values[1:]),
}


def launch(model: Path, *arguments: str, port: int) -> subprocess.Popen[str]:
    """Start one without waiting for it; its first line has the port."""
    command = [sys.executable, "-m", "tests.kit.tiny_server", "--model", str(model), "--port", str(port), *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def start(model: Path, *arguments: str, port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """Start one; returns when it listens, with its port."""
    process = launch(model, *arguments, port=port)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("port "), "the server did not start"
    return process, int(line.split()[1])


@contextmanager
def tiny_serving(model: Path, *arguments: str) -> Iterator[str]:
    """The URL of a server that runs for the duration of the block."""
    process, port = start(model, *arguments)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
