"""The older wire: one advantage per sample, and nothing that would have to be averaged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from retrain.api import BackendError, NonFiniteError, TrainBatch, TrainRow
from retrain_prime_rl.packing import scalar_batch


def test_prompt_and_completion_are_cut_before_the_first_action(make_batch):
    batch = make_batch([6, 9], varying=False)
    sent = scalar_batch(batch, step=4, seq_len=32)
    assert sent.step == 4
    for row, sample in zip(batch.rows, sent.examples, strict=True):
        assert sample.prompt_ids + sample.completion_ids == row.tokens_T.tolist()
        assert not any(sample.prompt_mask)
        assert all(sample.completion_mask)
        assert sample.completion_logprobs == row.logprobs_T[row.action_T].tolist()
        assert sample.completion_temperatures == [0.7] * len(sample.completion_ids)
        assert sample.advantage == 0.5


def test_tokens_of_an_environment_are_masked_inside_the_completion():
    action_T = np.array([False, True, True, False, True])
    row = TrainRow(
        tokens_T=np.array([51, 61, 62, 52, 63]),
        action_T=action_T,
        logprobs_T=np.array([0.0, -0.5, -0.25, -9.0, -1.0]),
        advantages_T=np.where(action_T, -1.5, 0.0),
    )
    (sample,) = scalar_batch(TrainBatch(step=0, rows=(row,), temperature=1.0), step=0, seq_len=8).examples
    assert sample.completion_mask == [True, True, False, True]
    assert sample.completion_logprobs == [-0.5, -0.25, 0.0, -1.0]
    assert sample.advantage == -1.5


def test_credit_that_varies_inside_a_sample_is_refused_by_row_and_range(make_batch):
    with pytest.raises(BackendError) as caught:
        scalar_batch(make_batch([6, 6]), step=0, seq_len=32)
    assert "row 0" in str(caught.value)
    assert 'wire = "per_token"' in str(caught.value)


def test_rounding_is_no_variation(make_batch):
    batch = make_batch([6], varying=False)
    row = replace(batch.rows[0], advantages_T=batch.rows[0].advantages_T + np.array([0, 0, 0, 0, 0, 5e-7]))
    assert scalar_batch(replace(batch, rows=(row,)), step=0, seq_len=8).examples[0].advantage == 0.5


def test_a_row_that_the_trainer_would_cut_is_refused(make_batch):
    with pytest.raises(BackendError, match="would truncate it"):
        scalar_batch(make_batch([6, 9], varying=False), step=0, seq_len=8)


def test_a_number_that_is_none_is_never_sent(make_batch):
    batch = make_batch([6], varying=False)
    row = replace(batch.rows[0], logprobs_T=np.full(6, np.nan))
    with pytest.raises(NonFiniteError):
        scalar_batch(replace(batch, rows=(row,)), step=0, seq_len=8)
