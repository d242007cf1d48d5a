"""Checks before the first step: sampler and trainer use the same weights, and the loss is the requested one.

The checks sample a few tokens and run forward passes; they change nothing on the service.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from retrain.api import BackendError, Config, ConfigError, Floats, Problem, SampleRequest, SamplingParams, Seeds
from retrain_tinker.faults import safe_url
from retrain_tinker.losses import CROSS_ENTROPY, DRO, LIKELIHOOD, Datum, PolicyLoss, Reduction, untrained_row
from retrain_tinker.sampling import Sampler, reference_logprobs
from retrain_tinker.service import Service, total_loss

LOG = logging.getLogger("retrain")
PROBES, PROBE_TOKENS = 4, 16
# Nats, mean over the probe: precision accounts for 0.01, another distribution for 0.5.
LARGEST_GAP = 0.1
LOSS_TOLERANCE = 1e-3  # relative
# Ratios on both sides of every clipping bound, since a wrong bound shows only beyond it.
RATIOS = (0.3, 0.85, 1.0, 1.15, 1.45, 6.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The service's reduction of losses, and its support for clipped gradients."""

    reduction: Reduction
    clips_gradients: bool


def check_model(service: Service, config: Config) -> str:
    """Return the model's name on the service; ConfigError lists the available names when it is missing."""
    options = service.options
    name = options.base_model or config.model.model
    known = service.supported_models()
    if known and name not in known:
        shown = ", ".join(sorted(known)[:12]) + (", ..." if len(known) > 12 else "")
        where = config.place("backend.options" if options.base_model else "model.model")
        what = f"{safe_url(service.base_url)} has no model {name!r}"
        fix = "name one of them; if it has the same model under another name, set [backend.options] base_model"
        raise ConfigError(Problem(code="tinker.unknown-model", where=where, what=what, why=f"it has {shown}", fix=fix))
    return name


def check_service(sampler: Sampler, prompt: Sequence[int], config: Config, seeds: Seeds) -> Dialect:
    """Compare the sampler with the trainer and the service's loss with our formula; an error names the difference."""
    loss, service = PolicyLoss.of(config), sampler.service
    request = SampleRequest(
        prompt_T=np.asarray(prompt, dtype=np.int64),
        seeds_G=tuple(seeds.derive("tinker handshake", number) for number in range(PROBES)),
    )
    params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=config.training.temperature)
    (samples,) = sampler.draw([request], params, version=0)
    datums = []
    for sample in samples:
        tokens_T = np.concatenate([request.prompt_T, sample.tokens_T])
        row = untrained_row(tokens_T, np.arange(len(tokens_T)) >= len(prompt))
        logprobs_T = np.concatenate([np.zeros(len(prompt)), sample.logprobs_T])
        datums.append(Datum.of(replace(row, logprobs_T=logprobs_T)))
    new = service.logprobs(datums)
    gaps_N = np.concatenate([np.abs((n - d.logprobs_T)[d.action_T]) for n, d in zip(new, datums, strict=True)])
    if not gaps_N.mean() <= LARGEST_GAP:  # NaN too
        what = f"the log-probabilities of sampled tokens are {gaps_N.mean():.2g} nats off the trainer's, on average"
        fix = "check that the server was started with the model that [model] names"
        if config.training.temperature != 1.0:
            fix = "set [training] temperature = 1.0: the trainer's are of T = 1"
        raise BackendError(Problem(code="tinker.logprob-gap", where=safe_url(service.base_url), what=what, fix=fix))
    LOG.info("Sampler and trainer agree to %.1e nats at most on %d tokens.", gaps_N.max(), len(gaps_N))
    # `likelihood` is sent as cross_entropy where losses are summed, otherwise as importance_sampling
    output = _compared(service, datums, new, PolicyLoss() if loss.kind == LIKELIHOOD else loss, config)
    # The hosted service reports a sum, SkyRL-tx does not.
    sums = "loss:sum" in output.metrics
    reduction: Reduction = "token_sum" if sums else "sequence_mean"
    if service.options.reduction != "auto":
        reduction = service.options.reduction
    if reduction != "token_sum" and loss.kind == DRO:
        what, why = f"the loss {DRO!r} does not go with reduction {reduction!r}", "its penalty has no factor by row"
        fix = 'use loss = "importance_sampling"'
        where = config.place("algorithm.loss")
        raise ConfigError(Problem(code="tinker.dro-factor", where=where, what=what, why=why, fix=fix))
    if reduction == "token_sum" and (loss.kind == LIKELIHOOD or config.sft.steps):
        _compared(service, datums, new, PolicyLoss(kind=CROSS_ENTROPY), config)
    return Dialect(reduction=reduction, clips_gradients=sums)


def _compared(
    service: Service, datums: Sequence[Datum], new: Sequence[Floats], loss: PolicyLoss, config: Config
) -> Any:
    """Return the service's answer to a loss at known ratios and advantages; ConfigError unless it is our formula's."""
    is_of_sft = loss.kind == CROSS_ENTROPY and config.algorithm.loss != LIKELIHOOD
    probe, expected = _loss_probe(datums, new, loss, is_positive=is_of_sft)
    place = config.place("sft.steps" if is_of_sft else "algorithm.loss")
    fix = "set [sft] steps = 0" if is_of_sft else 'use loss = "importance_sampling"'
    try:
        output = service.forward(probe, loss)
    except BackendError as error:
        # No answer at all proves nothing about the loss.
        if error.__cause__ is None:
            raise
        what = f"the service does not compute the loss {loss.kind!r}"
        problem = Problem(code="tinker.loss-unsupported", where=place, what=what, why=str(error), fix=fix)
        raise ConfigError(problem) from error
    found = total_loss(output)
    if found is None:
        LOG.warning("The service reports no loss, so it cannot be checked against [algorithm] loss.")
    elif abs(found - expected) > LOSS_TOLERANCE * max(1.0, abs(expected)):
        what = f"the service computes another loss than [algorithm] loss: {found:.4g} instead of {expected:.4g}"
        if loss.kind == "ppo":
            fix = "use clip_eps = 0.2 and clip_eps_high = 0: SkyRL-tx always clips at 0.8 and 1.2"
        raise ConfigError(Problem(code="tinker.other-loss", where=place, what=what, fix=fix))
    return output


def check_reference(service: Service, prompt: Sequence[int]) -> None:
    """Raise BackendError unless the base model agrees with the new adapter: it changes nothing yet."""
    tokens_T = np.asarray(prompt, dtype=np.int64)
    row = untrained_row(tokens_T, np.arange(len(tokens_T)) > 0)
    (found_T,), (trainer_T,) = reference_logprobs(service, [tokens_T]), service.logprobs([Datum.of(row)])
    gap = float(np.abs(found_T - trainer_T).mean())
    LOG.info("The base model, reference of [kl], agrees with the new adapter to %.1e nats on average.", gap)
    if not gap <= LARGEST_GAP:
        what = f"the base model, reference of [kl], is {gap:.2g} nats off the new adapter, on average"
        fix = "check that the server was started with the model that [model] names, or set [kl] coef = 0"
        raise BackendError(Problem(code="tinker.reference-gap", where=safe_url(service.base_url), what=what, fix=fix))


def _loss_probe(
    datums: Sequence[Datum], new: Sequence[Floats], loss: PolicyLoss, *, is_positive: bool = False
) -> tuple[list[Datum], float]:
    """Return the probe with ratios from `RATIOS`, and the sum of its losses by our formula.

    Advantages have both signs unless `is_positive`.
    """
    probe: list[Datum] = []
    expected, count = 0.0, 0
    for datum, new_T in zip(datums, new, strict=True):
        new_N = new_T[datum.action_T]
        numbers_N = count + np.arange(len(new_N))
        count += len(new_N)
        ratios_N = np.asarray(RATIOS)[numbers_N % len(RATIOS)]
        # Each ratio occurs with both signs of the advantage: ppo clips only one side for each.
        signs_N = np.where((numbers_N // len(RATIOS)) % 2 & (not is_positive), -1.0, 1.0)
        reference_N = new_N - np.log(ratios_N)
        advantages_T = np.zeros(len(new_T))
        advantages_T[datum.action_T] = signs_N
        weighted = replace(datum, advantages_T=advantages_T).weighted(np.ones(len(new_N)), reference_N)
        probe.append(weighted.pulled_nowhere(new_T) if loss.kind == DRO else weighted)
        expected += float(loss.terms(new_N, reference_N, signs_N)[0].sum())
    return probe, expected
