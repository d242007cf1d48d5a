"""Sampling with transformers: `python generate.py generate|continuous SETTINGS.json`; lines go to `calls.jsonl`."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from meter import Meter
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE = 32


def main() -> None:
    """Load the model and draw."""
    how, settings = sys.argv[1], json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    device = settings["device"]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(device).eval()
    meter = Meter("calls.jsonl", device)
    draw = {"generate": _generate, "continuous": _continuous}[how]
    for number, call in enumerate(settings["calls"]):
        torch.manual_seed(number)
        rows = [prompt for prompt in call["prompts"] for _ in range(settings["group"])]
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=call["new"], pad_token_id=0
        )
        lengths = meter.measure(lambda asked=rows, how=sampling: draw(model, asked, how), new=call["new"])  # type: ignore[misc]
        if set(lengths) != {call["new"]}:
            sys.exit(f"completions have other lengths: {sorted(set(lengths))}")


@torch.no_grad()  # type: ignore[untyped-decorator]
def _generate(model: Any, rows: list[list[int]], sampling: GenerationConfig) -> list[int]:
    """One padded batch with one growing cache; all prompts have one length, so nothing is padded."""
    ids = torch.tensor(rows, device=model.device)
    drawn = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=sampling)
    return [len(row) - len(rows[0]) for row in drawn.tolist()]


def _continuous(model: Any, rows: list[list[int]], sampling: GenerationConfig) -> list[int]:
    """transformers' continuous batching over its paged cache, which is kept from call to call.

    On a CPU its cache would fill half of the machine's memory, and be zeroed every time: it gets as many pages as the
    rows need. On CUDA it chooses for itself.
    """
    sizes = None
    if model.device.type == "cpu":
        pages = math.ceil((len(rows[0]) + sampling.max_new_tokens + 1) / PAGE)
        sizes = ContinuousBatchingConfig(
            page_size=PAGE, num_blocks=len(rows) * pages + 1, max_batch_tokens=max(len(rows), 512)
        )
    drawn = model.generate_batch(
        inputs=rows, generation_config=sampling, continuous_batching_config=sizes, persistent_manager=True
    )
    return [len(one.generated_tokens) for one in drawn.values()]


if __name__ == "__main__":
    main()
