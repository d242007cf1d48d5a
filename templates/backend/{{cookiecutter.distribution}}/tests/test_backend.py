"""The conformance checks for backends, and a test that this one learns."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import numpy as np
import pytest
from retrain.api import Sample, SampleRequest, SamplingParams, TrainBatch, TrainRow
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import BigramBackend

END, TARGET, VOCABULARY = 0, 7, 12
PROMPT_T = np.array([3, 5], dtype=np.int64)


@pytest.mark.parametrize("check", conformance("backend", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def row(sample: Sample, advantage: float) -> TrainRow:
    """Prompt and completion, with the same credit for every sampled token."""
    num_prompt = len(PROMPT_T)
    tokens_T = np.concatenate([PROMPT_T, sample.tokens_T])
    action_T = np.arange(len(tokens_T)) >= num_prompt
    logprobs_T = np.concatenate([np.zeros(num_prompt), sample.logprobs_T])
    return TrainRow(
        tokens_T=tokens_T, action_T=action_T, logprobs_T=logprobs_T, advantages_T=np.where(action_T, advantage, 0.0)
    )


def test_it_learns_to_say_a_token_and_to_stop() -> None:
    backend = BigramBackend(VOCABULARY, END, step_size=0.5)
    params = SamplingParams(max_tokens=4, temperature=1.0)
    shares = []
    for step in range(40):
        seeds = tuple(range(100 * step, 100 * step + 32))
        (samples,) = backend.sample([SampleRequest(prompt_T=PROMPT_T, seeds_G=seeds)], params)
        rewards_G = np.array([float(sample.tokens_T.tolist() == [TARGET, END]) for sample in samples])
        shares.append(rewards_G.mean())
        advantages_G = rewards_G + [0.1 * (sample.tokens_T[0] == TARGET) for sample in samples]
        advantages_G -= advantages_G.mean()
        rows = tuple(row(sample, float(a)) for sample, a in zip(samples, advantages_G, strict=True))
        backend.train(TrainBatch(step=step, rows=rows, temperature=1.0))
        backend.publish()
    assert shares[0] < 0.2
    assert shares[-1] > 0.8
