"""What was trained opens by its name and samples, without data or rewards, and sampler and trainer agree on it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from retrain.kernel.errors import BackendError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import LogprobRow, Sample, SampleRequest, SamplingParams
from retrain.run.opened import Opened, opened
from retrain.run.subject import find_subject

RUN = Path(__file__).with_name("stopped_run")
QUESTION = "What is 12 + 30?"
PARAMS = SamplingParams(max_tokens=12, temperature=1.0)


def drawn(policy: Opened) -> list[Sample]:
    prompt_T = np.array(policy.tokenizer.encode(QUESTION))
    (samples,) = policy.backend.sample([SampleRequest(prompt_T=prompt_T, seeds_G=(1, 2, 3, 4))], PARAMS)
    for sample in samples:
        tokens_T = np.concatenate([prompt_T, sample.tokens_T])
        row = LogprobRow(tokens_T=tokens_T, action_T=np.arange(len(tokens_T)) >= len(prompt_T))
        (logprobs_T,) = policy.backend.logprobs([row], PARAMS.temperature)
        np.testing.assert_allclose(logprobs_T[len(prompt_T) :], sample.logprobs_T, atol=1e-4)
    return samples


def logprobs(samples: list[Sample]) -> list[bytes]:
    return [sample.tokens_T.tobytes() + sample.logprobs_T.tobytes() for sample in samples]


def test_a_run_its_checkpoint_and_its_adapter_alone_are_one_policy_and_its_base_another(tmp_path: Path) -> None:
    plugins, alone = load_plugins(), tmp_path / "adapter"
    shutil.copytree(RUN / "adapter" / "checkpoint_step_5", alone)
    for file in alone.iterdir():
        if not file.name.startswith("adapter_"):
            file.unlink()
    with opened(find_subject(RUN), plugins) as policy:
        of_run = logprobs(drawn(policy))
        policy.use(None)
        of_base = logprobs(drawn(policy))
        with pytest.raises(BackendError, match="nowhere"):
            policy.use(tmp_path / "nowhere")
        assert logprobs(drawn(policy)) == of_base
        policy.use(alone)
        assert logprobs(drawn(policy)) == of_run
    with opened(find_subject(alone), plugins) as policy:
        assert logprobs(drawn(policy)) == of_run
    with opened(find_subject("builtin:tiny"), plugins) as policy:
        assert logprobs(drawn(policy)) == of_base
    assert of_run != of_base
