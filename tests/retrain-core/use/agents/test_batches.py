"""Batch after batch of episodes: nothing of an earlier one is kept."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.kernel.contracts.context import PhaseProgress
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Sample, SamplingParams
from retrain.use.agents.episode import Episode
from retrain.use.agents.player import AgentPlayer
from retrain.use.agents.programs import FunctionAgent
from retrain.use.serving.batcher import Generation, Inbox
from retrain.use.serving.service import Answer

PROGRAMS = Path(__file__).parent / "programs"
KEPT = (Episode, Generation, Answer, Inbox, Sample, threading.Thread)


def alive() -> Counter[str]:
    """Objects of each kind that a batch makes."""
    gc.collect()
    return Counter(kind.__name__ for each in gc.get_objects() for kind in KEPT if issubclass(type(each), kind))


@pytest.mark.long
def test_nothing_of_a_batch_outlives_it(
    scripted: Any, config: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))
    backend = scripted(lambda prompt, seed: "said")
    program = FunctionAgent(entry="hostile:play", where="[environment] id")
    # scores are the scoring's affair
    scoring: Any = SimpleNamespace(batch=lambda label, failures: nullcontext())
    player = AgentPlayer(program, name="hostile:play", most_calls=5, concurrency=2, timeout_s=30.0, memory_gb=0.0)
    context: Any = SimpleNamespace(tokenizer=tokenizer, config=config, sampling_progress=PhaseProgress())
    rollouts = player.rollouts(backend, scoring, context, SamplingParams(max_tokens=16, temperature=0.7), None)

    def step(number: int) -> None:
        examples = [Example(id=f"{number}", prompt="p", reference="4", info={"do": do}) for do in ("good", "silent")]
        with rollouts.batch(f"step_{number}") as batch:
            prompts = [Prompt(example=example, tokens_T=np.arange(3)) for example in examples]
            groups = batch.sample(prompts, 2, Streams(seeds=Seeds(number), purpose="sample"))
            assert [len(group) for group in groups] == [2, 2]
        backend.asked.clear()
        backend.wrote.clear()

    try:
        for number in range(4):
            step(number)
        before = alive()
        for number in range(4, 24):
            step(number)
        assert alive() - before == Counter()
    finally:
        player.close()
