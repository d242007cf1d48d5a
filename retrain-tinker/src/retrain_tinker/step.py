"""One optimizer step: the service computes log-probabilities and gradient, everything else is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.api import Config, Floats, NonFiniteError, Problem, TrainBatch, TrainReport
from retrain_tinker.losses import CROSS_ENTROPY, DRO, LIKELIHOOD, Datum, PolicyLoss, Reduction, scales
from retrain_tinker.service import Service


class Step:
    """The loss of `[algorithm]` and AdamW, with their configured parameters, on a service."""

    def __init__(self, service: Service, reduction: Reduction, config: Config) -> None:
        self._service = service
        self._loss = PolicyLoss.of(config)
        self._reduction: Reduction = reduction
        self._adam = {
            "learning_rate": config.training.lr,
            "beta1": config.optimizer.beta1,
            "beta2": config.optimizer.beta2,
            "eps": config.optimizer.eps,
            "weight_decay": config.training.weight_decay,
            "grad_clip_norm": config.optimizer.grad_clip_norm,
        }

    def take(self, batch: TrainBatch) -> TrainReport:
        """Compute the gradient, then update; NonFiniteError, before the update, on a non-finite log-probability.

        With an importance weight the ratio is relative to the trainer's own log-probabilities before the step. They
        cost a forward pass unless the rows of several updates carry them, and the mismatch with the sampler becomes a
        factor of the advantages.
        """
        loss = PolicyLoss(kind=batch.loss) if batch.loss else self._loss
        plain = [Datum.of(row) for row in batch.rows]
        sampled = [datum.logprobs_T[datum.action_T] for datum in plain]
        datums, clipped = plain, 0
        if loss.is_bounds is not None:
            if batch.updates > 1:
                reported = [r.logprobs_T if r.engine_logprobs_T is None else r.engine_logprobs_T for r in batch.rows]
                before, sampled = sampled, [f_T[row.action_T] for f_T, row in zip(reported, batch.rows, strict=True)]
            else:
                before = _at_actions(self._service.logprobs(plain), plain)
            weights = [loss.importance(new, behaviour) for new, behaviour in zip(before, sampled, strict=True)]
            datums = [d.weighted(w[0], new) for d, w, new in zip(plain, weights, before, strict=True)]
            clipped = sum(int(w[1].sum()) for w in weights)
        if loss.off_policy_mask and not batch.loss:
            now = _at_actions(self._service.logprobs(plain), plain)
            masks = [
                loss.left_out(new, sampler, d.advantages_T[d.action_T])
                for new, sampler, d in zip(now, sampled, plain, strict=True)
            ]
            datums = [
                d.weighted(np.where(mask, 0.0, 1.0), d.logprobs_T[d.action_T])
                for d, mask in zip(datums, masks, strict=True)
            ]
            clipped += sum(int(mask.sum()) for mask in masks)
        denominators = loss.denominators([len(logprobs_N) for logprobs_N in sampled], batch.num_masked)
        factors = scales(datums, self._reduction, denominators)
        scaled = [replace(d, advantages_T=d.advantages_T * f) for d, f in zip(datums, factors, strict=True)]
        if loss.kind == DRO:
            scaled = [d.pulled_nowhere(now_T) for d, now_T in zip(scaled, self._service.logprobs(plain), strict=True)]
        # The penalty of dro is not proportional to the advantage. The factors are all equal: see `problems_of`.
        output = self._gradient(scaled, replace(loss, beta=loss.beta * factors[0]))
        new = _at_actions(self._service.checked(output, datums), datums)
        mean, cut = _mean(loss, datums, new, denominators)
        report = TrainReport.measured(
            loss=mean,
            grad_norm=None,
            gaps_N=np.concatenate(new) - np.concatenate(sampled),
            # A token can be outside the bounds of the weight and of the loss, and then counts twice.
            clipped=min(clipped + cut, sum(map(len, new))),
        )
        adam = self._adam if batch.lr is None else self._adam | {"learning_rate": batch.lr}
        metrics = self._service.optim_step(**adam)
        norms = [float(value) for name, value in metrics.items() if "grad_norm" in name and np.isfinite(value)]
        return replace(report, grad_norm=norms[0] if norms else None, lr=adam["learning_rate"])

    def _gradient(self, scaled: Sequence[Datum], loss: PolicyLoss) -> Any:
        """Return the service's answer to the request for the gradient of a loss.

        `likelihood` is cross_entropy where token losses are summed. SkyRL-tx divides that by the weights of its row, so
        that no row could count more than another: there it is importance_sampling relative to the trainer's own
        log-probabilities, with ratio 1 and the same gradient, for one more forward pass.
        """
        if loss.kind == LIKELIHOOD and self._reduction == "token_sum":
            loss = PolicyLoss(kind=CROSS_ENTROPY)
        elif loss.kind == LIKELIHOOD:
            now = _at_actions(self._service.logprobs(scaled), scaled)
            scaled = [datum.weighted(np.ones(len(new_N)), new_N) for datum, new_N in zip(scaled, now, strict=True)]
            loss = PolicyLoss()
        return self._service.forward(scaled, loss, with_gradient=True)


def _mean(
    loss: PolicyLoss, datums: Sequence[Datum], new: Sequence[Floats], denominators: Sequence[int]
) -> tuple[float, int]:
    parts = [
        loss.terms(new_N, datum.logprobs_T[datum.action_T], datum.advantages_T[datum.action_T])
        for datum, new_N in zip(datums, new, strict=True)
    ]
    losses_N = np.concatenate([losses for losses, _ in parts])
    if not np.isfinite(losses_N).all():
        raise _not_finite("the loss")
    clipped = sum(int(cut.sum()) for _, cut in parts)
    if loss.aggregation == "token_mean":
        return float(losses_N.mean()), clipped
    return sum(float(part_N.sum()) / n for (part_N, _), n in zip(parts, denominators, strict=True)), clipped


def _at_actions(values: Sequence[Floats], datums: Sequence[Datum]) -> list[Floats]:
    """Return the log-probabilities at action tokens; NonFiniteError names a row with a non-finite one."""
    found = [row_T[datum.action_T] for row_T, datum in zip(values, datums, strict=True)]
    for index, row_N in enumerate(found):
        if not np.isfinite(row_N).all():
            raise _not_finite(f"log-probabilities of row {index}")
    return found


def _not_finite(subject: str) -> NonFiniteError:
    what, why = f"the service returned numbers that are not finite: {subject}", "weights and optimizer are unchanged"
    fix = "lower [training] lr"
    return NonFiniteError(Problem(code="tinker.not-finite", where="training", what=what, why=why, fix=fix))
