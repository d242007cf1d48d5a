"""The conformance checks for inference engines, and a test of how this one splits its work."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
{% endif %}
from collections.abc import Sequence
{% if cookiecutter.form == "file" %}
from pathlib import Path
{% endif %}

import numpy as np
import pytest
from retrain.api import Sample, SampleRequest, SamplingParams, StopReason
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import InPortions


@pytest.mark.parametrize("check", conformance("inference-engine", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


class Echo:
    """Returns its seed as the completion and records how many completions each call requests."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.is_closed = False

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        self.sizes.append(sum(len(request.seeds_G) for request in requests))
        return [[self._sample(seed) for seed in request.seeds_G] for request in requests]

    def close(self) -> None:
        self.is_closed = True

    def _sample(self, seed: int) -> Sample:
        tokens_T = np.array([seed], dtype=np.int64)
        return Sample(tokens_T=tokens_T, logprobs_T=np.zeros(1), stop_reason=StopReason.EOS, policy_version=0)


@pytest.mark.parametrize(
    ("counts", "sizes"), [((2, 2, 3), [4, 3]), ((9,), [4, 4, 1]), ((1, 5), [1, 4, 1]), ((0, 4), [4]), ((), [])]
)
def test_no_portion_is_too_large_and_nothing_is_lost(counts: tuple[int, ...], sizes: list[int]) -> None:
    inner = Echo()
    engine = InPortions(inner, max_completions=4)
    seeds = [tuple(range(10 * number, 10 * number + count)) for number, count in enumerate(counts)]
    requests = [SampleRequest(prompt_T=np.array([1], dtype=np.int64), seeds_G=seeds_G) for seeds_G in seeds]
    samples = engine.sample(requests, SamplingParams(max_tokens=1, temperature=1.0))
    assert [tuple(int(sample.tokens_T[0]) for sample in group) for group in samples] == seeds
    assert inner.sizes == sizes
    engine.close()
    assert inner.is_closed
