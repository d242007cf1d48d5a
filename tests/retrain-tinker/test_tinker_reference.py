"""Given answers as training data, and the base model as the reference of `[kl]`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError, LogprobRow, PluginContext, TrainBatch
from retrain_tinker.backend import TinkerBackend, create_backend
from tests.kit.problems import codes_in
from tests.kit.tinker_rows import batch_of, drawn, policy_gradient
from tests.kit.tinker_toy import Toy

Make = Callable[..., TinkerBackend]
KL = {"kl__coef": 0.1, "kl__where": "reward"}
SFT, LIKELIHOOD = {"sft__steps": 1, "algorithm__is_bounds": [0.5, 2.0]}, {"algorithm__loss": "likelihood"}
LINEAR = {"optimizer__eps": 1e6, "optimizer__beta1": 0.0, "optimizer__beta2": 0.0, "training__lr": 1e6}
services = pytest.mark.parametrize("reports_sum", [False, True], ids=["like SkyRL-tx", "like the hosted service"])


def given_answers(batch: TrainBatch) -> TrainBatch:
    """The same tokens as answers to learn, as `[sft]` makes its rows: all of weight 1, without log-probabilities."""
    rows = (
        replace(row, logprobs_T=np.zeros(len(row.tokens_T)), advantages_T=row.action_T.astype(float))
        for row in batch.rows
    )
    return replace(batch, rows=tuple(rows), loss="likelihood")


@services
@pytest.mark.parametrize("keys", [SFT, pytest.param(LIKELIHOOD, marks=pytest.mark.slow)], ids=["sft", "likelihood"])
def test_the_gradient_of_given_answers_is_the_gradient_of_the_mean_over_their_tokens(
    backend: Make, toy: Toy, delta: Callable[[], np.ndarray], keys: dict[str, Any], reports_sum: bool
) -> None:
    """Whatever the service divides by, and whatever `[algorithm]` says about the steps that follow."""
    toy.faults.reports_sum = reports_sum
    made = backend(**LINEAR, **keys)
    batch = batch_of(*drawn(made))
    batch = given_answers(batch) if keys is SFT else batch
    assert len({len(row.tokens_T) for row in batch.rows}) > 1
    table = toy.logprobs(np.zeros_like(toy.base))
    loss = -sum(
        float((row.advantages_T[1:] * row.action_T[1:] * table[row.tokens_T[:-1], row.tokens_T[1:]]).sum())
        for row in batch.rows
    )
    toy.calls.clear()
    report = made.train(batch)
    assert delta() == pytest.approx(-policy_gradient(table, batch), abs=1e-5)
    assert report.loss == pytest.approx(loss / batch.num_actions, abs=1e-5)
    assert report.num_tokens == batch.num_actions
    sent = [body["forward_backward_input"]["loss_fn"] for path, body in toy.calls if path == "forward_backward"]
    assert sent == ["cross_entropy" if reports_sum else "importance_sampling"]
    assert toy.count("forward") == (0 if reports_sum else 1)


@services
def test_the_reference_is_the_base_model_however_long_the_policy_has_trained(
    backend: Make, toy: Toy, delta: Callable[[], np.ndarray], reports_sum: bool
) -> None:
    toy.faults.reports_sum = reports_sum
    made = backend(**KL)
    batch = batch_of(*drawn(made))
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
    before = made.reference_logprobs(rows, 1.0)
    made.train(batch)
    made.publish()
    trained = delta()
    table = toy.logprobs(np.zeros_like(toy.base))
    for row, first_T, second_T in zip(rows, before, made.reference_logprobs(rows, 1.0), strict=True):
        wanted_T = np.concatenate([[0.0], table[row.tokens_T[:-1], row.tokens_T[1:]]])
        assert first_T == pytest.approx(np.where(row.action_T, wanted_T, 0.0), abs=1e-12)
        assert second_T.tolist() == first_T.tolist()
    assert toy.count("create_sampling_session") == 1
    assert delta().tolist() == trained.tolist()
    assert np.abs(trained).max() > 0.01


@pytest.mark.parametrize(("shift", "code"), [(0.5, "reference-gap"), (float("nan"), "bad-answer")])
def test_another_base_model_or_one_without_an_answer_is_refused_before_training(
    context: Callable[..., PluginContext], toy: Toy, shift: float, code: str
) -> None:
    toy.faults.base_shift = shift
    with pytest.raises(BackendError) as caught:
        create_backend(context(**KL))
    assert codes_in(caught) == [f"tinker.{code}"]
    create_backend(context()).close()  # only [kl] needs it


@pytest.mark.long
@pytest.mark.parametrize(("keys", "fix"), [(SFT, "set [sft] steps = 0"), (LIKELIHOOD, "use loss =")])
def test_a_service_with_another_cross_entropy_is_refused_by_the_key_that_needs_it(
    context: Callable[..., PluginContext], toy: Toy, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], fix: str
) -> None:
    toy.faults.reports_sum = True
    honest = toy._loss

    def halved(given: dict[str, Any], new: np.ndarray, fields: dict[str, np.ndarray]) -> Any:
        losses, slopes = honest(given, new, fields)
        return losses / (2 if given["loss_fn"] == "cross_entropy" else 1), slopes

    monkeypatch.setattr(toy, "_loss", halved)
    with pytest.raises(ConfigError) as caught:
        create_backend(context(**keys))
    assert codes_in(caught) == ["tinker.other-loss"]
    assert fix in str(caught.value)
    create_backend(context()).close()
