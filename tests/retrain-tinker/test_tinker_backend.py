from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import (
    BackendError,
    ConfigError,
    LogprobRow,
    PluginContext,
    SampleRequest,
    SamplingParams,
    StopReason,
    TrainBatch,
)
from retrain_tinker.backend import STATE_FILE, TinkerBackend, create_backend
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long
from tests.kit.tinker_rows import EOS, PROMPT, batch_of, drawn, policy_gradient
from tests.kit.tinker_toy import Toy

Make = Callable[..., TinkerBackend]
Delta = Callable[[], np.ndarray]


# ---------------------------------------------------------------- sampling


def test_samples_carry_ids_raw_logprobs_stop_reason_and_version(backend: Make, toy: Toy, delta: Delta) -> None:
    made = backend()
    _, samples = drawn(made, count=8, max_tokens=40)
    table = toy.logprobs(delta())
    for group, prompt in zip(samples, (PROMPT, PROMPT + 1), strict=True):
        for sample in group:
            previous = np.concatenate([[prompt[-1]], sample.tokens_T[:-1]])
            assert sample.logprobs_T == pytest.approx(table[previous, sample.tokens_T], abs=1e-6)
            has_ended = int(sample.tokens_T[-1]) == EOS
            assert sample.stop_reason is (StopReason.EOS if has_ended else StopReason.LENGTH)
            assert has_ended or len(sample.tokens_T) == 40
            assert sample.policy_version == 0
    assert {s.stop_reason for group in samples for s in group} == {StopReason.EOS, StopReason.LENGTH}


def test_a_completion_depends_on_its_prompt_and_seed_only_and_is_delivered_as_it_finishes(backend: Make) -> None:
    made, params = backend(), SamplingParams(max_tokens=8, temperature=1.0)
    requests = [SampleRequest(prompt_T=PROMPT, seeds_G=(2**62 + 5, 7)), SampleRequest(prompt_T=PROMPT, seeds_G=(7,))]
    seen: dict[tuple[int, int], list[int]] = {}
    samples = made.sample(requests, params, lambda group, index, s: seen.update({(group, index): s.tokens_T.tolist()}))
    assert seen == {(g, i): s.tokens_T.tolist() for g, group in enumerate(samples) for i, s in enumerate(group)}
    (first, second), (third,) = samples
    assert second.tokens_T.tolist() == third.tokens_T.tolist()
    assert first.tokens_T.tolist() != second.tokens_T.tolist()
    (again,) = made.sample([SampleRequest(prompt_T=PROMPT, seeds_G=(2**62 + 5,))], params)
    assert again[0].tokens_T.tolist() == first.tokens_T.tolist()
    (group,) = made.sample([SampleRequest(prompt_T=PROMPT, seeds_G=(1, 2, 3))], replace(params, greedy=True))
    assert len({tuple(sample.tokens_T) for sample in group}) == 1


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("reports_sum", [False, True], ids=["like SkyRL-tx", "like the hosted service"])
def test_the_gradient_is_that_of_the_mean_over_action_tokens(
    backend: Make, toy: Toy, reports_sum: bool, delta: Delta
) -> None:
    """A huge epsilon makes AdamW's first step linear in the gradient, so that its scale can be seen."""
    toy.faults.reports_sum = reports_sum
    made = backend(optimizer__eps=1e6, optimizer__beta1=0.0, optimizer__beta2=0.0, training__lr=1e6)
    batch = batch_of(*drawn(made))
    wanted = policy_gradient(toy.logprobs(delta()), batch)  # the ratios are 1
    report = made.train(batch)
    assert delta() == pytest.approx(-wanted, abs=1e-5)
    actions = np.concatenate([row.advantages_T[row.action_T] for row in batch.rows])
    assert report.loss == pytest.approx(-actions.mean(), abs=1e-5)
    assert report.num_tokens == batch.num_actions
    assert report.gap_max < 1e-5
    assert report.ess_frac == pytest.approx(1.0)
    assert report.grad_norm is None
    assert not report.loss_is_placeholder


@pytest.mark.long
@pytest.mark.parametrize("reports_sum", [False, True], ids=["like SkyRL-tx", "like the hosted service"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "constant"])
def test_the_other_averages_scale_what_is_sent(backend: Make, toy: Toy, aggregation: str, reports_sum: bool) -> None:
    """By row, since masked completions count too and rows differ in length; the loss is reported in that average."""
    toy.faults.reports_sum = reports_sum
    made = backend(algorithm__aggregation=aggregation, training__max_tokens=9)
    batch = replace(batch_of(*drawn(made)), num_masked=3)
    assert len({int(row.action_T.sum()) for row in batch.rows}) > 1
    sequences, total = len(batch.rows) + 3, 0.0
    toy.calls.clear()
    report = made.train(batch)
    (body,) = [body for path, body in toy.calls if path == "forward_backward"]
    for row, datum in zip(batch.rows, body["forward_backward_input"]["data"], strict=True):
        actions, count = row.action_T[1:], int(row.action_T.sum())
        divided = row.advantages_T[1:][actions] / sequences / (9 if aggregation == "constant" else count)
        back = 1.0 if reports_sum else len(actions) * len(batch.rows)  # by what the service itself divides
        sent = np.asarray(datum["loss_fn_inputs"]["advantages"]["data"])[actions]
        assert sent == pytest.approx(divided * back, rel=1e-5)
        total -= float(divided.sum())
    assert report.loss == pytest.approx(total, abs=1e-5)  # on policy


def test_the_keys_of_adamw_are_passed_on_with_the_rate_of_each_batch(backend: Make, toy: Toy) -> None:
    toy.faults.reports_sum = True
    keys = {"beta1": 0.8, "beta2": 0.7, "eps": 1e-5, "grad_clip_norm": 0.3}
    given = {f"optimizer__{name}": value for name, value in keys.items()}
    made = backend(**given, training__weight_decay=0.1, training__lr=0.02)
    batch = batch_of(*drawn(made))
    rates = [made.train(replace(batch, lr=lr)).lr for lr in (0.01, None, 0.005)]
    assert rates == [0.01, 0.02, 0.005]
    sent = [body["adam_params"] for path, body in toy.calls if path == "optim_step"]
    assert sent == [keys | {"weight_decay": 0.1, "learning_rate": rate} for rate in rates]


def test_of_several_updates_the_importance_weight_is_that_of_the_first(backend: Make, toy: Toy) -> None:
    """The rows carry the trainer's log-probabilities before the step, so that none are asked for."""
    toy.faults.reports_sum = True
    made = backend(algorithm__tis_cap=1.2, training__lr=0.5)
    batch = batch_of(*drawn(made))
    rows = [replace(row, engine_logprobs_T=np.where(row.action_T, row.logprobs_T - 0.1, 0.0)) for row in batch.rows]
    toy.calls.clear()
    reports = [made.train(replace(batch, rows=tuple(rows), update=update, updates=2)) for update in (0, 1)]
    paths = [path for path, _ in toy.calls if path != "retrieve_future"]
    assert paths == ["forward_backward", "optim_step"] * 2
    for body in (body for path, body in toy.calls if path == "forward_backward"):
        for row, datum in zip(rows, body["forward_backward_input"]["data"], strict=True):
            fields, actions = datum["loss_fn_inputs"], row.action_T[1:]
            weighted = row.advantages_T[1:][actions] * np.exp(0.1) / batch.num_actions
            assert np.asarray(fields["advantages"]["data"])[actions] == pytest.approx(weighted, rel=1e-5)
            assert np.asarray(fields["logprobs"]["data"])[actions] == pytest.approx(row.logprobs_T[1:][actions])
    assert reports[0].ratio_mean == pytest.approx(np.exp(0.1), rel=1e-5)  # trainer to sampler
    assert reports[1].ratio_max != pytest.approx(np.exp(0.1), rel=1e-3)  # the policy has moved


def test_a_truncated_importance_weight_is_applied_here(backend: Make, toy: Toy) -> None:
    made = backend(algorithm__tis_cap=1.2)
    requests, samples = drawn(made)
    batch = batch_of(requests, samples)
    shift = np.log([0.5, 3.0])  # the sampler believed something else
    rows = []
    for number, row in enumerate(batch.rows):
        rows.append(replace(row, logprobs_T=np.where(row.action_T, row.logprobs_T - shift[number % 2], 0.0)))
    toy.calls.clear()
    report = made.train(TrainBatch(step=0, rows=tuple(rows), temperature=1.0))
    assert [path for path, _ in toy.calls if path != "retrieve_future"] == ["forward", "forward_backward", "optim_step"]
    (body,) = [body for path, body in toy.calls if path == "forward_backward"]
    sent = [datum["loss_fn_inputs"] for datum in body["forward_backward_input"]["data"]]
    total = sum(int(row.action_T.sum()) for row in rows)
    for number, (row, fields) in enumerate(zip(rows, sent, strict=True)):
        actions = row.action_T[1:]
        scale = len(actions) * len(rows) / total
        factor = min(np.exp(shift[number % 2]), 1.2)
        advantages = np.asarray(fields["advantages"]["data"])[actions]
        assert advantages == pytest.approx(row.advantages_T[1:][actions] * factor * scale, rel=1e-5)
        own = np.asarray(fields["logprobs"]["data"])[actions]
        assert own == pytest.approx(row.logprobs_T[1:][actions] + shift[number % 2], abs=1e-5)
    assert report.clip_fraction == pytest.approx(sum(int(r.action_T.sum()) for r in rows[1::2]) / total)
    assert report.ratio_max == pytest.approx(3.0, rel=1e-4)


# ---------------------------------------------------------------- versions


def test_dro_pulls_sampled_tokens_back_and_no_prompt(backend: Make, toy: Toy, delta: Delta) -> None:
    """The service's penalty covers every position; the second of two updates is the first with something to pull."""
    toy.faults.reports_sum = True
    keys = {"algorithm__loss": "dro", "algorithm__loss_params": {"beta": 0.3}}
    made = backend(optimizer__eps=1e6, optimizer__beta1=0.0, optimizer__beta2=0.0, training__lr=1e6, **keys)
    batch = batch_of(*drawn(made))
    made.train(batch)
    before, table = delta(), toy.logprobs(delta())
    moves = [np.r_[0.0, table[row.tokens_T[:-1], row.tokens_T[1:]] - row.logprobs_T[1:]] for row in batch.rows]
    pulled = replace(
        batch,
        rows=tuple(
            replace(row, advantages_T=row.advantages_T - 0.3 * move_T * row.action_T)
            for row, move_T in zip(batch.rows, moves, strict=True)
        ),
    )
    report = made.train(batch)
    assert delta() - before == pytest.approx(-policy_gradient(table, pulled), abs=1e-5)
    terms = [
        (row.advantages_T * (row.logprobs_T + move_T) - 0.15 * move_T**2)[row.action_T]
        for row, move_T in zip(batch.rows, moves, strict=True)
    ]
    assert report.loss == pytest.approx(-np.concatenate(terms).mean(), abs=1e-5)
    assert max(np.abs(move_T).max() for move_T in moves) > 1e-3


def test_dro_needs_a_service_that_sums(backend: Make, toy: Toy) -> None:
    with pytest.raises(ConfigError, match="does not compute the loss 'dro'"):
        backend(algorithm__loss="dro")
    toy.faults.reports_sum = True
    with pytest.raises(ConfigError, match="does not go with reduction 'sequence_mean'"):
        backend(algorithm__loss="dro", options__reduction="sequence_mean")


@pytest.mark.parametrize("reports_sum", [False, True], ids=["like SkyRL-tx", "like the hosted service"])
@pytest.mark.parametrize("keys", [{}, {"algorithm__is_bounds": [0.1, 10.0]}], ids=["alone", "with a weight"])
def test_stale_completions_with_negative_credit_are_left_out(
    backend: Make, toy: Toy, delta: Delta, reports_sum: bool, keys: dict[str, Any]
) -> None:
    toy.faults.reports_sum = reports_sum
    made = backend(
        optimizer__eps=1e6,
        optimizer__beta1=0.0,
        optimizer__beta2=0.0,
        training__lr=1e6,
        algorithm__off_policy_mask=0.2,
        **keys,
    )
    batch = batch_of(*drawn(made))
    gaps = [0.3 if number % 2 else 0.1 for number in range(len(batch.rows))]
    stale = replace(
        batch,
        rows=tuple(
            replace(row, logprobs_T=row.logprobs_T + gap * row.action_T)
            for row, gap in zip(batch.rows, gaps, strict=True)
        ),
    )
    left_out = [gap > 0.2 and row.advantages_T.min() < 0.0 for row, gap in zip(batch.rows, gaps, strict=True)]
    assert 0 < sum(left_out) < len(left_out)
    weighed = replace(
        batch,
        rows=tuple(
            replace(row, advantages_T=row.advantages_T * np.exp(-gap) * (not is_left))
            for row, gap, is_left in zip(batch.rows, gaps, left_out, strict=True)
        ),
    )
    report = made.train(stale)
    assert delta() == pytest.approx(-policy_gradient(toy.logprobs(np.zeros_like(toy.base)), weighed), abs=1e-5)
    count = sum(int(row.action_T.sum()) for row, is_left in zip(batch.rows, left_out, strict=True) if is_left)
    assert report.clip_fraction == pytest.approx(count / batch.num_actions)


def test_every_version_has_a_sampling_client_of_its_own_and_the_old_one_is_never_asked_again(
    backend: Make, toy: Toy, delta: Delta
) -> None:
    made = backend()
    for version in range(3):
        requests, samples = drawn(made, first_seed=version)
        assert {sample.policy_version for group in samples for sample in group} == {version}
        made.train(batch_of(requests, samples))
        trained = delta()
        with pytest.raises(BackendError, match=f"is trained, but {version} is published"):
            drawn(made)
        assert made.publish() == made.publish() == version + 1
        drawn(made)
        assert delta() == pytest.approx(trained), "sampling put older weights back into training"
    sessions = [body["sampling_session_id"] for path, body in toy.calls if path == "asample"]
    assert sessions == sorted(sessions)
    assert len(set(sessions)) == 4


def test_the_trainers_own_logprobs_of_any_row(backend: Make, toy: Toy, delta: Delta) -> None:
    made = backend()
    requests, samples = drawn(made)
    made.train(batch_of(requests, samples))
    made.publish()
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch_of(requests, samples).rows]
    table = toy.logprobs(delta())
    for (tokens, action), found in zip(rows, made.logprobs(rows, 1.0), strict=True):
        wanted = np.concatenate([[0.0], table[tokens[:-1], tokens[1:]]])
        assert found == pytest.approx(np.where(action, wanted, 0.0), abs=1e-6)


# ---------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_nothing_had_happened(backend: Make, toy: Toy, tmp_path: Path) -> None:
    def two_steps(made: TinkerBackend, first: int) -> np.ndarray:
        for step in (first, first + 1):
            made.train(batch_of(*drawn(made, first_seed=step), step))
            made.publish()
        return list(toy.adapters.values())[-1].delta.copy()

    straight = backend()
    two_steps(straight, 0)
    (tmp_path / "c").mkdir()
    straight.save(tmp_path / "c")
    wanted = two_steps(straight, 2)
    straight.close()

    resumed = backend()
    resumed.load(tmp_path / "c")
    _, samples = drawn(resumed)
    assert samples[0][0].policy_version == 2
    assert two_steps(resumed, 2) == pytest.approx(wanted, abs=1e-12)
    assert len(toy.adapters) == 1, "clients that were replaced or closed must not stay on the service"


def test_a_checkpoint_says_where_its_state_is_and_holds_the_repaired_adapter(backend: Make, tmp_path: Path) -> None:
    made = backend()
    made.train(batch_of(*drawn(made)))
    made.publish()
    for name in ("one", "two"):  # twice at the same version: names on the service must not clash
        (tmp_path / name).mkdir()
        made.save(tmp_path / name)
    state = json.loads((tmp_path / "one" / STATE_FILE).read_text())
    assert state["state_path"].startswith("tinker://model_0/weights/")
    assert state["policy_version"] == 1
    config = json.loads((tmp_path / "one" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        STATE_FILE,
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    first_or_long(
        [
            ({"lora_rank": 8}, "lora_rank is 8, and this run needs 2"),
            ({"model": "other"}, "model is 'other'"),
            ({"format": 9}, "format is 9"),
            ({"state_path": "/etc/passwd"}, "no tinker:// path"),
            ({"policy_version": "many"}, "cannot be used"),
            ({"state_path": "tinker://gone/weights/x"}, "does not have these saved weights"),
            (None, "cannot be used"),
        ]
    ),
    ids=str,
)
def test_a_checkpoint_of_something_else_is_refused(
    backend: Make, tmp_path: Path, change: dict[str, object] | None, words: str
) -> None:
    made = backend(options__download_adapter=False)
    made.save(tmp_path)
    path = tmp_path / STATE_FILE
    assert list(tmp_path.iterdir()) == [path], "the adapter stays on the service"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BackendError, match=words):
        made.load(tmp_path)


def test_a_closed_backend_says_so(backend: Make, toy: Toy) -> None:
    made = backend()
    made.close()
    made.close()
    assert not toy.adapters
    with pytest.raises(BackendError):
        drawn(made)


# ---------------------------------------------------------------- given answers, and the reference of [kl]


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
