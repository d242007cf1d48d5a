"""The plan of a training step against the tensors that lived in it: what a GPU would count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from retrain.api import TrainBatch, TrainRow, Workload
from retrain_local.memory import sizes
from retrain_local.planning import estimate_memory
from tests.kit.causal_types import small_config
from tests.kit.local_backend import Local

GROUP, PROMPT, OWN, VOCABULARY, RANK = 8, 32, 129, 2048, 16  # one pack: several would be computed side by side
PACK = PROMPT + GROUP * (OWN - 1)
DEPTH = 5  # times the layers of a small model: the plan rounds the layer in its backward pass up
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704}
SIZES |= {"moe_intermediate_size": 128, "max_position_embeddings": 512}
WIDE: dict[str, dict[str, Any]] = {"granitemoehybrid": {"mamba_d_head": 128}, "mamba2": {"head_dim": 128}}
KINDS = ("lfm2", "qwen3_5_text", "nemotron_h", "gemma2", "falcon_h1", "granitemoehybrid", "deepseek_v3")
KINDS += ("gpt_oss", "qwen3_moe", "gptj", "mamba2")


def batch(step: int) -> TrainBatch:
    rng = np.random.default_rng(step)
    prompt_T, action_T = rng.integers(3, VOCABULARY, PROMPT), np.arange(PROMPT + OWN - 1) >= PROMPT
    rows = [
        TrainRow(
            tokens_T=np.concatenate([prompt_T, rng.integers(3, VOCABULARY, OWN - 1)]),
            action_T=action_T,
            logprobs_T=np.where(action_T, -8.0, 0.0),
            advantages_T=np.where(action_T, rng.normal(), 0.0),
        )
        for _ in range(GROUP)
    ]
    return TrainBatch(step=step, rows=tuple(rows), temperature=1.0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_of_a_step_are_those_of_the_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = small_config(kind, **SIZES, **WIDE.get(kind, {}))
    count = few.num_hidden_layers
    lists = {
        name: value * DEPTH for name, value in vars(few).items() if isinstance(value, list) and len(value) == count
    }
    torch.manual_seed(0)
    config = small_config(kind, **SIZES, **WIDE.get(kind, {}), **lists, num_hidden_layers=count * DEPTH)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    options = {"micro_batch_tokens": PACK, "gradient_checkpointing": "off"}
    local = Local(folder=tmp_path, requests=())
    backend = local.make(rank=RANK, options=options)
    backend.train(batch(0))  # makes the optimizer's moments
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        backend.train(batch(1))
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    living = np.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    for name in ("HEAP_WASTE", "HEAP_WASTE_AGAIN", "HEAP_WASTE_HOSTED", "HEAP_WASTE_FEW"):
        monkeypatch.setattr(sizes, name, 1.0)  # of the heap, not of the tensors
    work: dict[str, Any] = {"batch_size": 1, "group_size": GROUP, "max_tokens": OWN, "prompt_tokens": PROMPT}
    plan = estimate_memory(local.context(rank=RANK, options=options).config, lambda *_: tmp_path).estimate(
        Workload(device="cpu", lora_rank=RANK, **work, **options), None, None
    )
    parts = next(phase.parts for phase in plan.phases if phase.name == "training")
    planned = sum(size for name, size in parts.items() if name != "scratch")
    print(f"{kind}: {living.max() / planned:.2f} of {planned / 2**20:.0f} MiB")
    assert living.max() == pytest.approx(planned, rel=0.1)
