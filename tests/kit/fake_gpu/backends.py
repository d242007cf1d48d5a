"""Backend `local` on a fake GPU, the requests that it samples and the rows that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.api import SampleRequest, SamplingParams, TrainBatch, TrainReport, TrainRow
from tests.kit.fake_gpu.card import H100, Card
from tests.kit.fake_gpu.gpu import FakeGpu
from tests.kit.fake_gpu.models import vocabulary_of, weights_unread
from tests.kit.local_backend import Local


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The size of a step: `prompts` prompts of `prompt` tokens, `group` completions of `new` tokens for each."""

    prompts: int = 2
    group: int = 3
    prompt: int = 20
    new: int = 24

    def requests(self, vocabulary: int) -> list[SampleRequest]:
        rng = np.random.default_rng(0)
        return [
            SampleRequest(
                prompt_T=rng.integers(3, vocabulary, size=self.prompt),
                seeds_G=tuple(int(seed) for seed in rng.integers(0, 2**62, size=self.group)),
            )
            for _ in range(self.prompts)
        ]

    def rows(self, vocabulary: int, **more: Any) -> tuple[TrainRow, ...]:
        """Return the rows of the completions; `more` are fields of every row."""
        rng, found = np.random.default_rng(1), []
        for request in self.requests(vocabulary):
            for place in range(self.group):
                tokens_T = np.concatenate([request.prompt_T, rng.integers(3, vocabulary, size=self.new)])
                action_T = np.arange(len(tokens_T)) >= self.prompt
                found.append(
                    TrainRow(
                        tokens_T=tokens_T,
                        action_T=action_T,
                        logprobs_T=np.where(action_T, -12.0, 0.0),
                        advantages_T=np.where(action_T, 1.0 if place % 2 else -1.0, 0.0),
                        **more,
                    )
                )
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnCard:
    """A backend on a fake GPU; the calls name their phase of the record."""

    gpu: FakeGpu
    backend: Any
    vocabulary: int

    def sample(self, load: Load, phase: str = "sample", **params: Any) -> None:
        self.gpu.phase = phase
        given = {"temperature": 0.9, "entropy": True} | params
        self.backend.sample(load.requests(self.vocabulary), SamplingParams(max_tokens=load.new, **given))

    def train(self, load: Load, phase: str = "train", step: int = 0, **more: Any) -> TrainReport:
        self.gpu.phase = phase
        rows = load.rows(self.vocabulary, **more)
        report: TrainReport = self.backend.train(TrainBatch(step=step, rows=rows, temperature=0.9))
        return report

    def publish(self) -> None:
        self.gpu.phase = "publish"
        self.backend.publish()

    def step(self, load: Load = Load(), step: int = 0, **more: Any) -> None:
        self.sample(load)
        self.train(load, step=step, **more)
        self.publish()

    def faults(self) -> list[str]:
        return [str(fault) for fault in self.gpu.record.faults]


@contextmanager
def on_card(
    folder: Path, card: Card = H100, *, rank: int = 32, weighs: bool = False, **options: Any
) -> Iterator[OnCard]:
    """Open a backend of the model in `folder`; `options` are those of `Local.context`."""
    gpu = FakeGpu(card, weighs=weighs)
    with weights_unread(), gpu.in_place():
        backend = Local(folder=folder, requests=()).make(**({"devices": "gpu:0", "rank": rank, "lr": 1e-5} | options))
        yield OnCard(gpu=gpu, backend=backend, vocabulary=vocabulary_of(folder))
        gpu.phase = "close"
        backend.close()
