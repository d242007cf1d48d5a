"""Our policy without its loop: `python policy.py sample|train SETTINGS.json`.

The backend comes from a configuration through the plugins, as a run's does; only prompts and rows are given. A line
goes to `calls.jsonl` for every measured call.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from meter import Meter
from transformers import AutoTokenizer

from retrain.api import (
    Backend,
    Kind,
    PluginContext,
    SampleRequest,
    SamplingParams,
    Seeds,
    TrainBatch,
    TrainRow,
    load_plugins,
)
from retrain.kernel.plugins.resolve import build_part
from retrain.run.configure import load_checked


def main() -> None:
    """Build the backend and do what was asked."""
    run(sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))


def run(what: str, settings: dict[str, Any]) -> None:
    """Build the backend and `sample` or `train`."""
    backend = _backend(settings)
    meter = Meter("calls.jsonl", settings["device"])
    try:
        (_sample if what == "sample" else _train)(backend, settings, meter)
    finally:
        backend.close()


def _backend(settings: dict[str, Any]) -> Backend:
    plugins = load_plugins()
    config = load_checked([settings["config"]], plugins).config
    context = PluginContext(
        config=config,
        seeds=Seeds(1),
        plugins=plugins,
        tokenizer=AutoTokenizer.from_pretrained(config.model.model),
    )
    options = config.backend.options
    backend: Backend = build_part(
        Kind.BACKEND, config.backend.backend, "backend.backend", context, options, "backend.options"
    )
    return backend


def _sample(backend: Backend, settings: dict[str, Any], meter: Meter) -> None:
    """One call per list of prompts; between two calls the policy is published, as between two steps."""
    has_entropy = backend.capabilities.provides_entropy
    for number, call in enumerate(settings["calls"]):
        prompts, new = call["prompts"], call["new"]
        params = SamplingParams(max_tokens=new, temperature=1.0, entropy=has_entropy)
        seeds = np.random.default_rng(number).integers(0, 2**62, size=(len(prompts), settings["group"]))
        requests = [
            SampleRequest(prompt_T=np.array(prompt), seeds_G=tuple(map(int, row)))
            for prompt, row in zip(prompts, seeds, strict=True)
        ]
        drawn = meter.measure(lambda asked=requests, how=params: backend.sample(asked, how), new=new)  # type: ignore[misc]
        short = [len(one.tokens_T) for group in drawn for one in group if len(one.tokens_T) != new]
        if short:
            sys.exit(f"{len(short)} completions have another length, the first {short[0]}")
        backend.publish()


def _train(backend: Backend, settings: dict[str, Any], meter: Meter) -> None:
    """The same batch again and again; its log-probabilities are the policy's own at the start."""
    rows = []
    for number, (tokens, num_prompt) in enumerate(settings["rows"]):
        action_T = np.arange(len(tokens)) >= num_prompt
        rows.append(
            TrainRow(
                tokens_T=np.array(tokens),
                action_T=action_T,
                logprobs_T=np.zeros(len(tokens)),
                advantages_T=np.where(action_T, 1.0 if number % 2 else -1.0, 0.0),
            )
        )
    warm = rows[: settings["warm_rows"]]
    backend.train(TrainBatch(step=0, rows=tuple(_seen(backend, warm)), temperature=1.0))
    batch = TrainBatch(step=1, rows=tuple(_seen(backend, rows)), temperature=1.0)
    for call in range(settings["calls"]):
        meter.measure(lambda at=call: backend.train(replace(batch, step=at + 1)))  # type: ignore[misc]
        backend.publish()


def _seen(backend: Backend, rows: list[TrainRow]) -> list[TrainRow]:
    found = backend.logprobs(rows, 1.0)
    return [replace(row, logprobs_T=logprobs_T) for row, logprobs_T in zip(rows, found, strict=True)]


if __name__ == "__main__":
    main()
