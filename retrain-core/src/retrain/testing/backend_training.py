"""The training part of the backend suite: credit, and only credit, moves the policy, visibly once published."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np

from retrain.kernel.declared import Determinism
from retrain.kernel.errors import BackendError
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, TrainBatch, TrainReport
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_unchanged, fail
from retrain.testing.subjects import Sampled, Subject, batch_of, open_subject, requests, sampled

# Nats between sampler and trainer on the policy that was sampled from.
MAX_GAP = 1e-4
# Nats between log-probabilities of an unchanged policy: batches round differently.
SAME_GAP = 1e-5
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=1.0)
# A trained model may be certain of its first token at temperature 1.
TEMPERATURES = (1.0, 2.0, 4.0)
STEPS = 4
SEEDS = 32


def makes_rewarded_tokens_likelier(bench: Bench) -> None:
    """Steps that reward one token, and punish the other sampled ones, raise its log-probability."""
    subject = open_subject(bench)
    asked = requests(bench, (SEEDS,))
    params, chosen = _choice(subject, asked)
    before = _log_probability(subject.sample(asked, params), chosen)
    share = 0.0

    def credit(sample: Sample) -> float:
        """Reward minus its mean: the reward is 1 for the chosen token, 0 for others."""
        return float(sample.tokens_T[0] == chosen) - share

    for step in range(STEPS):
        samples = subject.sample(asked, params)
        share = sum(sample.tokens_T[0] == chosen for sample in samples[0]) / SEEDS
        batch = batch_of(asked, samples, credit, step=step, temperature=params.temperature)
        subject.part.train(batch)
        subject.part.publish()
    after = _log_probability(subject.sample(asked, params), chosen)
    expect(
        after is not None and before is not None and after > before,
        f"the log-probability of a token was {before}, and {after} after {STEPS} steps that rewarded it",
        why="that is what training is for",
        fix="minimise -sum(advantages_T * ratio) over the action tokens, and check the sign",
    )


def reports_what_it_did(bench: Bench) -> None:
    """The report has finite numbers, counts the action tokens, and says whether its loss is a placeholder."""
    subject = open_subject(bench)
    batch, report = _trained(bench, subject)
    for field in fields(TrainReport):
        value = getattr(report, field.name)
        # a remote trainer may report no loss, and a service that reports its loss may omit the gradient norm
        if value is None and (report.loss_is_placeholder or field.name in ("grad_norm", "lr")):
            continue
        # The run joins these fields itself when a step has several updates.
        if isinstance(value, str | tuple):
            continue
        why = "it is a field of metrics.jsonl"
        fix = "raise NonFiniteError, before the optimizer steps, when a number is not finite"
        expect(value is not None and math.isfinite(value), f"{field.name} is {value!r}", why=why, fix=fix)
    expect(
        report.num_tokens == batch.num_actions,
        f"num_tokens is {report.num_tokens}, the batch has {batch.num_actions} action tokens",
        why="the loss is a mean over these, zero advantages included",
        fix="count action_T over all rows",
    )
    shares = (report.clip_fraction or 0.0, 1.0 if report.ess_frac is None else report.ess_frac)
    expect(
        0.0 <= shares[0] <= 1.0 and 0.0 < shares[1] <= 1.0 + 1e-6 and (report.grad_norm or 0.0) >= 0.0,
        f"clip_fraction {report.clip_fraction}, ess_frac {report.ess_frac}, grad_norm {report.grad_norm}",
        why="the first two are shares, the last a norm",
        fix="see retrain.api.TrainReport for the formulas",
    )
    if subject.capabilities is not None:
        expect(
            report.loss_is_placeholder != subject.capabilities.reports_sync_loss,
            f"loss_is_placeholder is {report.loss_is_placeholder}, reports_sync_loss "
            f"{subject.capabilities.reports_sync_loss}",
            why="a placeholder must not be plotted as a loss",
            fix="say one and the same in both",
        )


def has_ratio_1_on_its_own_policy(bench: Bench) -> None:
    """On tokens of the policy being trained, trainer and sampler agree on log-probabilities, if a loss is reported."""
    subject = open_subject(bench)
    found = subject.capabilities
    if found is None or not found.reports_sync_loss or found.determinism is Determinism.NONE:
        return
    # A trainer that ignores the temperature passes at 1.
    for temperature in (1.0, 0.7):
        _, report = _trained(bench, subject, temperature=temperature)
        subject.part.publish()
        gap, ratio = report.gap_max, report.ratio_mean
        expect(
            gap is not None and ratio is not None and gap <= MAX_GAP and abs(ratio - 1.0) <= MAX_GAP,
            f"at temperature {temperature} the largest gap is {gap} nats, the mean ratio {ratio}",
            why="otherwise every update is off-policy from the start, by an unknown amount",
            fix="apply batch.temperature to the trainer's logits, and load sampler and trainer in one precision",
        )


def changes_nothing_without_credit(bench: Bench) -> None:
    """A first step whose advantages are all zero leaves the policy unchanged."""
    subject = open_subject(bench)
    if not subject.is_repeatable:
        return
    before = sampled(bench, subject)
    _trained(bench, subject, credit=0.0)
    subject.part.publish()
    expect(
        _is_close(before, sampled(bench, subject)),
        "other completions after a step without any advantage",
        why="the gradient of such a step is zero, and [training] weight_decay is 0 here",
        fix="add no term to the loss that is not configured",
    )


def credits_single_tokens(bench: Bench) -> None:
    """Advantages that cancel within each row still move the policy, if token advantages are declared."""
    subject = open_subject(bench)
    found = subject.capabilities
    if found is None or not found.preserves_token_advantages or not subject.is_repeatable:
        return
    before = sampled(bench, subject)
    _trained(bench, subject, credit=None)
    subject.part.publish()
    expect(
        not _is_close(before, sampled(bench, subject), gap=1e-6),
        "nothing changed after a step whose advantages are +1 and -1 in turn",
        why="a backend that gives each row its mean advantage turns every token transform into none",
        fix="multiply each token by its own advantage, or declare preserves_token_advantages = False",
    )


def trains_at_the_rate_it_is_given(bench: Bench) -> None:
    """A step at `TrainBatch.lr` = 0 leaves the policy unchanged, if the backend reports a learning rate."""
    subject = open_subject(bench)
    before = sampled(bench, subject)
    _, report = _trained(bench, subject, lr=0.0)
    if report.lr is None:
        return
    subject.part.publish()
    is_same = not subject.is_repeatable or _is_close(before, sampled(bench, subject))
    expect(
        report.lr == 0.0 and is_same,
        f"a step at learning rate 0 reports {report.lr} and {'keeps' if is_same else 'changes'} the policy",
        why="[optimizer] schedule sets the rate of every step",
        fix="use batch.lr where it is not None and report it as lr, or report None",
    )


def remembers_its_reference(bench: Bench) -> None:
    """Reference log-probabilities, if declared, stay at the policy of the start, however long it has trained."""
    subject = open_subject(bench)
    found = subject.capabilities
    if found is None or "kl_reward" not in found.regularisers:
        return
    batch, _ = _trained(bench, subject)
    answers = [subject.part.reference_logprobs(batch.rows, batch.temperature)]
    subject.part.train(batch)
    subject.part.publish()
    answers.append(subject.part.reference_logprobs(batch.rows, batch.temperature))
    for row, first_T, second_T in zip(batch.rows, *answers, strict=True):
        gap = float(np.abs(first_T - row.logprobs_T)[row.action_T].max(initial=0.0))
        expect(
            gap <= MAX_GAP and np.array_equal(first_T, second_T),
            f"the reference is {gap} nats from the policy that sampled first, or moves with training",
            why="[kl] would hold the policy near another one, or near itself",
            fix="compute it with the weights that training began with, or leave kl_reward out of regularisers",
        )


def publishes_when_asked(bench: Bench) -> None:
    """`sample` uses the last published policy; the version starts at 0 and grows with each published training step."""
    subject = open_subject(bench)
    versions = [subject.part.publish()]
    before = sampled(bench, subject)
    _trained(bench, subject)
    if subject.is_repeatable:
        expect(
            before == sampled(bench, subject),
            "after train and before publish, sample returns different completions",
            why="a step's completions must come from one policy",
            fix="let sample use what publish() froze",
        )
    for _ in range(2):
        versions.append(subject.part.publish())
        of_samples = {s.policy_version for group in subject.sample(requests(bench)) for s in group}
        expect(
            of_samples == {versions[-1]},
            f"publish() returned {versions[-1]}, samples have {sorted(of_samples)}",
            why="stale samples are found by it",
            fix="set Sample.policy_version to what publish() returned last",
        )
        _trained(bench, subject)
    expect(
        versions[0] == 0 and versions[0] < versions[1] < versions[2],
        f"publish() returned {versions}, with a training between each two",
        why="the version says how many optimizer steps are in the policy",
        fix="return 0 before any training, and more after each",
    )


def refuses_numbers_that_are_not_finite(bench: Bench) -> None:
    """A batch with NaN or infinity raises BackendError and leaves the policy unchanged."""
    subject = open_subject(bench)
    asked = requests(bench)
    good = batch_of(asked, subject.sample(asked), lambda sample: 1.0)
    before, version = sampled(bench, subject), subject.part.publish()
    for field in ("advantages_T", "logprobs_T"):
        for value in (float("nan"), float("inf")):
            row = good.rows[-1]
            values_T = np.array(getattr(row, field))
            values_T[-1] = value
            spoilt: dict[str, Any] = {field: values_T}
            try:
                subject.part.train(replace(good, rows=(*good.rows[:-1], replace(row, **spoilt))))
            except BackendError:
                continue
            why = "one NaN in the weights is the end of the run"
            fix = "raise retrain.api.NonFiniteError before anything has changed"
            fail(f"train took {field} with {value}", why=why, fix=fix)
    expect(
        subject.part.publish() == version,
        f"the version is {subject.part.publish()} after refused steps, it was {version}",
        why="a refused step is no step",
        fix="count a step after the optimizer has stepped",
    )
    expect(
        not subject.is_repeatable or _is_close(before, sampled(bench, subject), gap=1e-6),
        "other completions after refused steps",
        why="one NaN in a weight, or in a moment of the optimizer, is the end of the run",
        fix="check loss and gradients for finiteness before the optimizer steps, and set the gradients back",
    )


def leaves_batches_alone(bench: Bench) -> None:
    """Training does not modify its rows."""
    subject, asked = open_subject(bench), requests(bench)
    samples = subject.sample(asked)
    batch, before = (batch_of(asked, samples, lambda sample: 1.0) for _ in range(2))
    subject.part.train(batch)
    for row, was in zip(batch.rows, before.rows, strict=True):
        for field in fields(row):
            is_same = np.array_equal(getattr(row, field.name), getattr(was, field.name))
            expect_unchanged(is_same, f"{field.name} of a row", why="rows are recorded after training")


def _choice(subject: Subject, asked: list[SampleRequest]) -> tuple[SamplingParams, int]:
    """Return a token that is sampled sometimes but not always, and the temperature for that."""
    for temperature in TEMPERATURES:
        params = replace(ONE_TOKEN, temperature=temperature)
        counts = Counter(int(sample.tokens_T[0]) for sample in subject.sample(asked, params)[0])
        if len(counts) > 1:
            return params, counts.most_common()[1][0]
    why, fix = "nothing can be learnt without variety", "sample with the seeds of the request"
    fail(f"{SEEDS} seeds sampled the same token, even at temperature {TEMPERATURES[-1]:g}", why=why, fix=fix)


def _log_probability(samples: list[list[Sample]], token: int) -> float | None:
    return next((float(s.logprobs_T[0]) for s in samples[0] if s.tokens_T[0] == token), None)


def _trained(
    bench: Bench, subject: Subject, *, credit: float | None = 1.0, temperature: float = 1.0, lr: float | None = None
) -> tuple[TrainBatch, TrainReport]:
    """Train a step on completions of the policy; None credits +1 and -1 in turn, on an even number of tokens."""
    asked = requests(bench)
    samples = subject.sample(asked, SamplingParams(max_tokens=6, temperature=temperature))

    def advantages(sample: Sample) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        if credit is not None:
            return np.full(len(sample.tokens_T), credit)
        # An odd last token gets no credit, so that the advantages of a row add up to zero.
        places_T = np.arange(len(sample.tokens_T))
        return np.where(places_T < len(places_T) // 2 * 2, 1.0 - 2.0 * (places_T % 2), 0.0)

    batch = replace(batch_of(asked, samples, advantages, temperature=temperature), lr=lr)
    return batch, subject.part.train(batch)


def _is_close(first: Sampled, second: Sampled, gap: float = SAME_GAP) -> bool:
    return all(
        a == b and np.allclose(x, y, rtol=0.0, atol=gap) for (a, x, _), (b, y, _) in zip(first, second, strict=True)
    )
