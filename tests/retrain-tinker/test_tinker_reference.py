"""Given answers as training data, and the base model as the reference of `[kl]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError, LogprobRow, PluginContext, TrainBatch
from retrain_tinker.backend import TinkerBackend, create_backend
from tests.kit.shared import first_or_long
from tests.kit.tinker_rows import batch_of, drawn
from tests.kit.tinker_toy import Toy

Make = Callable[..., TinkerBackend]
LINEAR = {"optimizer__eps": 1e6, "optimizer__beta1": 0.0, "optimizer__beta2": 0.0, "training__lr": 1e6}
services = pytest.mark.parametrize("reports_sum", [False, True], ids=["like SkyRL-tx", "like the hosted service"])


def given_answers(batch: TrainBatch) -> TrainBatch:
    """The same tokens as answers to learn, as `[sft]` makes its rows: all of weight 1, sampled by nobody."""
    rows = [
        replace(row, logprobs_T=np.zeros(len(row.tokens_T)), advantages_T=row.action_T.astype(float))
        for row in batch.rows
    ]
    return replace(batch, rows=tuple(rows), loss="likelihood")


def wanted_gradient(toy: Toy, batch: TrainBatch) -> tuple[np.ndarray, float]:
    """Of -A log p, mean over the action tokens of the step, in the logits; and that mean."""
    table = toy.logprobs(np.zeros_like(toy.base))
    gradient, total = np.zeros_like(table), 0.0
    for row in batch.rows:
        for at in np.flatnonzero(row.action_T):
            read, token, weight = row.tokens_T[at - 1], row.tokens_T[at], row.advantages_T[at] / batch.num_actions
            gradient[read] += weight * np.exp(table[read])
            gradient[read, token] -= weight
            total -= weight * table[read, token]
    return gradient, total


@services
@pytest.mark.parametrize(
    "is_sft", first_or_long([True, pytest.param(False, marks=pytest.mark.slow)]), ids=["sft", "likelihood"]
)
def test_the_gradient_of_given_answers_is_that_of_the_mean_over_their_tokens(
    backend: Make, toy: Toy, is_sft: bool, reports_sum: bool
) -> None:
    """Whatever the service divides by, and whatever `[algorithm]` says about the steps that follow."""
    toy.faults.reports_sum = reports_sum
    keys = {"sft__steps": 1, "algorithm__is_bounds": [0.5, 2.0]} if is_sft else {"algorithm__loss": "likelihood"}
    made = backend(**LINEAR, **keys)
    batch = batch_of(*drawn(made))
    if is_sft:
        batch = given_answers(batch)
    assert len({len(row.tokens_T) for row in batch.rows}) > 1
    gradient, loss = wanted_gradient(toy, batch)
    toy.calls.clear()
    report = made.train(batch)
    (adapter,) = toy.adapters.values()
    assert adapter.delta == pytest.approx(-gradient, abs=1e-5)
    assert report.loss == pytest.approx(loss, abs=1e-5)
    assert report.num_tokens == batch.num_actions
    asked = [body["forward_backward_input"]["loss_fn"] for path, body in toy.calls if path == "forward_backward"]
    assert asked == ["cross_entropy" if reports_sum else "importance_sampling"]
    assert toy.count("forward") == (0 if reports_sum else 1)


@services
def test_the_reference_is_the_base_model_however_long_the_policy_has_trained(
    backend: Make, toy: Toy, reports_sum: bool
) -> None:
    toy.faults.reports_sum = reports_sum
    made = backend(kl__coef=0.1, kl__where="reward")
    batch = batch_of(*drawn(made))
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
    before = made.reference_logprobs(rows, 1.0)
    made.train(batch)
    made.publish()
    trained = toy.adapters[next(iter(toy.adapters))].delta.copy()
    table = toy.logprobs(np.zeros_like(toy.base))
    for row, first_T, second_T in zip(rows, before, made.reference_logprobs(rows, 1.0), strict=True):
        wanted_T = np.concatenate([[0.0], table[row.tokens_T[:-1], row.tokens_T[1:]]])
        assert first_T == pytest.approx(np.where(row.action_T, wanted_T, 0.0), abs=1e-12)
        assert second_T.tolist() == first_T.tolist()
    assert toy.count("create_sampling_session") == 1
    assert toy.adapters[next(iter(toy.adapters))].delta.tolist() == trained.tolist()
    assert np.abs(trained).max() > 0.01


@pytest.mark.parametrize(
    ("shift", "words"),
    [
        (0.5, r"0\.5 nats off the new adapter"),
        pytest.param(float("nan"), "log-probabilities of", marks=pytest.mark.slow),
    ],
)
def test_another_base_model_or_one_without_an_answer_is_refused_before_training(
    context: Callable[..., PluginContext], toy: Toy, shift: float, words: str
) -> None:
    toy.faults.base_shift = shift
    with pytest.raises(BackendError, match=words) as caught:
        create_backend(context(kl__coef=0.1, kl__where="reward"))
    assert "fix: " in str(caught.value)
    create_backend(context()).close()  # without [kl] nobody asks


@pytest.mark.long
def test_a_service_with_another_cross_entropy_is_refused_by_the_key_that_needs_it(
    context: Callable[..., PluginContext], toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.faults.reports_sum = True
    honest = toy._loss

    def halved(given: dict[str, Any], new: np.ndarray, fields: dict[str, np.ndarray]) -> Any:
        losses, slopes = honest(given, new, fields)
        return (losses / 2, slopes) if given["loss_fn"] == "cross_entropy" else (losses, slopes)

    monkeypatch.setattr(toy, "_loss", halved)
    for keys, words in (({"sft__steps": 3}, "set [sft] steps = 0"), ({"algorithm__loss": "likelihood"}, "use loss =")):
        with pytest.raises(ConfigError, match="computes another loss") as caught:
            create_backend(context(**keys))
        assert words in str(caught.value)
    create_backend(context()).close()
