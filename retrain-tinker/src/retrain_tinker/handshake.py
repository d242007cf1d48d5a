"""Before the first step: does the service sample from what it trains, and is its loss the one that was asked for?

Nothing is changed on the service: the questions are answered by sampling a few tokens and by forward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.api import (
    BackendError,
    Config,
    ConfigError,
    Floats,
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
    Seeds,
    TrainRow,
)
from retrain_tinker import sdk
from retrain_tinker.datums import Datum, Reduction
from retrain_tinker.faults import safe_url
from retrain_tinker.losses import PolicyLoss
from retrain_tinker.options import TinkerOptions
from retrain_tinker.sampling import Sampler
from retrain_tinker.service import Service

LOG = logging.getLogger("retrain")
PROBES, PROBE_TOKENS = 4, 16
LARGEST_GAP = 0.1  # nats, mean over the probe; precisions differ by a hundredth, another distribution by half a nat
LOSS_TOLERANCE = 1e-3  # relative
RATIOS = (0.3, 0.85, 1.0, 1.15, 1.45, 6.0)  # on both sides of every bound that a loss may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What was found out: how the service adds up losses, and whether it can clip a gradient."""

    reduction: Reduction
    clips_gradients: bool


def check_model(service: Service, config: Config, options: TinkerOptions) -> str:
    """The model's name on the service; ConfigError with the names that it has when this is none of them."""
    name = options.base_model or config.model.model
    known = service.supported_models()
    if known and name not in known:
        shown = ", ".join(sorted(known)[:12]) + (", ..." if len(known) > 12 else "")
        where = config.place("backend.options" if options.base_model else "model.model")
        what = f"{safe_url(service.base_url)} has no model {name!r}"
        fix = "name one of them; where it has the same model under another name, set [backend.options] base_model"
        raise ConfigError(Problem(where=where, what=what, why=f"it has {shown}", fix=fix))
    return name


def shake_hands(
    service: Service, sampler: Sampler, prompt: Sequence[int], config: Config, options: TinkerOptions, seeds: Seeds
) -> Dialect:
    """Compare sampler with trainer and the service's loss with ours; an error tells which of them disagree."""
    loss = PolicyLoss.of(config)
    request = SampleRequest(
        prompt_T=np.asarray(prompt, dtype=np.int64),
        seeds_G=tuple(seeds.derive("tinker handshake", number) for number in range(PROBES)),
    )
    params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=config.training.temperature)
    (samples,) = sampler.draw([request], params, version=0)
    datums = [_datum(prompt, sample) for sample in samples]
    new = service.logprobs(datums)
    gaps_N = np.concatenate([np.abs((n - d.logprobs_T)[d.action_T]) for n, d in zip(new, datums, strict=True)])
    _refuse_other_distribution(gaps_N, config, service)
    LOG.info("Sampler and trainer agree to %.1e nats at most on %d tokens.", gaps_N.max(), len(gaps_N))
    return _check_loss(service, datums, new, loss, config, options)


def _datum(prompt: Sequence[int], sample: Sample) -> Datum:
    ahead, drawn = len(prompt), len(sample.tokens_T)
    row = TrainRow(
        tokens_T=np.concatenate([np.asarray(prompt, dtype=np.int64), sample.tokens_T]),
        action_T=np.arange(ahead + drawn) >= ahead,
        logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
        advantages_T=np.zeros(ahead + drawn),
    )
    return Datum.of(row)


def _refuse_other_distribution(gaps_N: Floats, config: Config, service: Service) -> None:
    if np.isfinite(gaps_N).all() and gaps_N.mean() <= LARGEST_GAP:
        return
    temperature = config.training.temperature
    what = f"the log-probabilities of sampled tokens are {gaps_N.mean():.2g} nats off the trainer's, on average"
    why = "the sampler does not draw from the weights that are trained, or the service is broken"
    fix = "check that the server was started with the model that [model] names"
    if temperature != 1.0:
        why = f"its sampler tells them of the distribution at temperature {temperature:g}, its trainer at 1"
        fix = "set [training] temperature = 1.0"
    raise BackendError(Problem(where=safe_url(service.base_url), what=what, why=why, fix=fix))


def _check_loss(
    service: Service,
    datums: Sequence[Datum],
    new: Sequence[Floats],
    loss: PolicyLoss,
    config: Config,
    options: TinkerOptions,
) -> Dialect:
    """Ask for the loss where ratios and advantages are known, and compare."""
    posed, expected = _posed(datums, new, loss)
    place = config.place("algorithm.loss")
    try:
        output = service.forward(posed, loss)
    except BackendError as error:
        if error.__cause__ is None:  # no answer at all says nothing about the loss
            raise
        what, fix = f"the service does not compute the loss {loss.kind!r}", 'use loss = "importance_sampling"'
        raise ConfigError(Problem(where=place, what=what, why=str(error), fix=fix)) from error
    found = sdk.total_loss(output)
    if found is None:
        LOG.warning("The service tells no loss, so that it cannot be checked against [algorithm] loss.")
    elif abs(found - expected) > LOSS_TOLERANCE * max(1.0, abs(expected)):
        what = f"the service computes another loss than [algorithm] asks for: {found:.4g} where it is {expected:.4g}"
        why = "SkyRL-tx clips ppo at 0.8 and 1.2, whatever it is told" if loss.kind == "ppo" else ""
        fix = "use clip_eps = 0.2 and clip_eps_high = 0" if loss.kind == "ppo" else 'use loss = "importance_sampling"'
        raise ConfigError(Problem(where=place, what=what, why=why, fix=fix))
    sums = sdk.tells_sums(output)
    reduction: Reduction = "token_sum" if sums else "sequence_mean"
    if options.reduction != "auto":
        reduction = options.reduction
    return Dialect(reduction=reduction, clips_gradients=sums)


def _posed(datums: Sequence[Datum], new: Sequence[Floats], loss: PolicyLoss) -> tuple[list[Datum], float]:
    """The probe with ratios from `RATIOS` and advantages of both signs, and the sum of its losses by our formula."""
    posed: list[Datum] = []
    expected, count = 0.0, 0
    for datum, new_T in zip(datums, new, strict=True):
        new_N = new_T[datum.action_T]
        numbers_N = count + np.arange(len(new_N))
        count += len(new_N)
        ratios_N = np.asarray(RATIOS)[numbers_N % len(RATIOS)]
        signs_N = np.where((numbers_N // len(RATIOS)) % 2, -1.0, 1.0)
        old_N = new_N - np.log(ratios_N)
        advantages_T = np.zeros(len(new_T))
        advantages_T[datum.action_T] = signs_N
        posed.append(replace(datum, advantages_T=advantages_T).weighted(np.ones(len(new_N)), old_N))
        expected += float(loss.terms(new_N, old_N, signs_N)[0].sum())
    return posed, expected
