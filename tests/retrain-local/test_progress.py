"""The local backend says how far it has come, per segment of tokens and per pack, and nothing else depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retrain.api import PluginContext, Sample, SampleRequest, SamplingParams, TrainBatch
from retrain_local.factory import create_backend


def test_sampling_reports_tokens_per_segment_and_training_its_packs(
    make_context: Callable[..., PluginContext],
    requests: Sequence[SampleRequest],
    roll: Callable[..., TrainBatch],
) -> None:
    context = make_context(options={"micro_batch_tokens": 64})
    sampling, training = context.sampling_progress, context.training_progress
    backend = create_backend(context)
    drawn: list[int] = []

    def deliver(group: int, index: int, sample: Sample) -> None:
        drawn.append(sampling.drawn)

    samples = backend.sample(requests, SamplingParams(max_tokens=40, temperature=1.0, entropy=True), deliver)
    total = sum(len(sample.tokens_T) for group in samples for sample in group)
    assert sampling.drawn == total == drawn[-1]
    assert 0 < drawn[0] < total, "the first ones are delivered before the last"
    assert drawn == sorted(drawn)
    batch = roll(backend, requests)
    backend.train(batch)
    assert training.unit == "packs"
    assert training.done == training.total > 1
    assert training.tokens <= sum(len(row.tokens_T) for row in batch.rows), "the prompt of a group is stored once"
    backend.close()
