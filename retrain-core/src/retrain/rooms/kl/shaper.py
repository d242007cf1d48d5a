"""KL to the reference in a run: measured on what was sampled, then taken off rewards or handed to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.errors import BackendError, Problem, ResumeError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import MAX_LOG_RATIO, Completion, Floats, Group, Outcome, Score, TrainReport
from retrain.rooms.credit.algorithm import contexts
from retrain.rooms.kl.tables import KlTable
from retrain.rooms.session.logprob_gap import LogprobRow

STATE = "kl"
STRIDE = 16  # of so many completions one is measured with coef = 0: 2 % of the time of training at most
MAX_CHANGE = 0.2


def shaper_of(config: Config, backend: Backend, *, by_token: bool = False) -> list[KlShaper]:
    """One, or none where neither the reward, the loss nor the log asks for the reference.

    `by_token`: credit takes rewards of single tokens.
    """
    table, offered = config.table("kl", KlTable), backend.capabilities.regularisers
    is_asked = table.log and config.origin("kl.log") != DEFAULT_ORIGIN
    logs = table.log and ("kl_log" in offered or (is_asked and "kl_reward" in offered))
    if not (table.coef or logs):
        return []
    return [KlShaper(table, backend, config.training.temperature, logs=logs, by_token=by_token)]


def k1(d_A: Floats) -> Floats:
    """-d per token, d = log p_ref - log p: unbiased for KL(p, p_ref) on samples of p, of either sign."""
    return -d_A


def k3(d_A: Floats) -> Floats:
    """e^d - 1 - d per token: unbiased too, never negative, and of less variance near the reference."""
    clamped_A = np.clip(d_A, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    result: Floats = np.expm1(clamped_A) - clamped_A
    return result


def steered(coef: float, kl: float, *, target: float, count: int, horizon: int) -> float:
    """The next coefficient after `count` completions of mean divergence `kl`, arXiv:1909.08593.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) count / horizon)
    """
    return coef * (1.0 + float(np.clip(kl / target - 1.0, -MAX_CHANGE, MAX_CHANGE)) * count / horizon)


class KlShaper:
    """A `Shaper` that measures completions with a verdict, and a watcher that keeps the coefficient.

    `where = "reward"`: r - coef sum_t k1, or, `by_token`, -coef k1 as the reward of each token, of every group: an
    advantage that sees the whole step counts surplus groups too. `where = "loss"`: completions carry reference
    log-probabilities and the coefficient to the loss; surplus groups are never trained, so they are not measured. With
    coef = 0 a share of the completions is measured after training, which leaves the run as it is, to the bit. A steered
    coefficient moves once per finished step.
    """

    def __init__(
        self, table: KlTable, backend: Backend, temperature: float, *, logs: bool = True, by_token: bool = False
    ) -> None:
        self._table, self._backend, self._temperature, self._logs = table, backend, temperature, logs
        self._by_token = by_token
        self.coef = table.coef
        self._next_coef = table.coef

    def shape(self, step: int, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """The groups with their KL, and its fields; no state changes: a step may be taken again."""
        self._next_coef = self.coef
        if not self.coef:
            return tuple(groups), {}
        judged = self._measured(groups)
        if not judged:
            return tuple(groups), {"kl_coef": self.coef}
        found = dict(zip(map(id, judged), self._reference(judged), strict=True))
        logs_A = [_differences(completion, found[id(completion)]) for completion in judged]
        fields = _means(logs_A) | {"kl_coef": self.coef}
        self._next_coef = self._steered(fields["kl_mean"], len(judged))
        if self._table.where == "loss":
            return tuple(self._carrying(group, found) for group in groups), fields
        penalties = {id(c): self.coef * float(k1(d_A).sum()) for c, d_A in zip(judged, logs_A, strict=True)}
        fields["kl_penalty_mean"] = float(np.mean(list(penalties.values())))
        if self._by_token:
            rewards = {id(c): -self.coef * k1(d_A) for c, d_A in zip(judged, logs_A, strict=True)}
            return tuple(_penalised_by_token(group, rewards) for group in groups), fields
        return tuple(_penalised(group, penalties) for group in groups), fields

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView, report: TrainReport | None) -> dict[str, float]:
        """The step is done: the coefficient moves; with coef = 0, the mean KL of a share of the completions."""
        self.coef = self._next_coef
        judged = self._measured(groups.groups)
        if self.coef or report is None or not self._logs or not judged:
            return {}
        some = judged[:: min(STRIDE, len(judged))]
        logs_A = map(_differences, some, self._reference(some))
        return _means(list(logs_A))

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """The steered coefficient."""
        return {STATE: {"coef": self.coef}} if self._table.target else {}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue with it."""
        if not self._table.target:
            return
        try:
            self.coef = self._next_coef = float(state[STATE]["coef"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"the checkpoint has no coefficient of [kl]: {type(error).__name__}: {error}"
            raise ResumeError(Problem(what=what, fix="resume from a checkpoint of this run")) from error

    def _measured(self, groups: Sequence[Group]) -> list[Completion]:
        """The completions to measure, in order."""
        every = self.coef and self._table.where == "reward"
        return [c for group in groups if every or not group.is_surplus for c in _judged(group)]

    def _steered(self, kl: float, count: int) -> float:
        table = self._table
        if not table.target:
            return self.coef
        return steered(self.coef, kl, target=table.target, count=count, horizon=table.horizon)

    def _carrying(self, group: Group, found: Mapping[int, Floats]) -> Group:
        completions = (
            replace(c, reference_logprobs_T=found[id(c)], kl_coef=self.coef) if id(c) in found else c
            for c in group.completions
        )
        return replace(group, completions=tuple(completions))

    def _reference(self, completions: Sequence[Completion]) -> list[Floats]:
        """Reference log-probabilities at the action tokens of each, 0 elsewhere.

        Every context that the policy was given is a row of its own, as it is in training.
        """
        rows = [LogprobRow(c.tokens_T[part], c.action_T[part]) for c in completions for part in contexts(c)]
        answers = iter(self._backend.reference_logprobs(rows, self._temperature))
        found = []
        for completion in completions:
            values_T = np.zeros(len(completion.tokens_T))
            for part in contexts(completion):
                values_T[part] = next(answers)
            if not np.isfinite(values_T).all():
                what = "a log-probability of the reference is not finite"
                raise BackendError(Problem(where="[kl]", what=what, fix="check the model's weights and dtype"))
            found.append(values_T)
        return found


def _differences(completion: Completion, reference_T: Floats) -> Floats:
    """log p_ref - log p of the action tokens, p being the policy that sampled them."""
    result: Floats = (reference_T - completion.logprobs_T)[completion.action_T]
    return result


def _means(differences: Sequence[Floats]) -> dict[str, float]:
    """Both estimates of the mean KL per token."""
    d_A = np.concatenate(differences)
    return {"kl_mean": float(k3(d_A).mean()), "kl_k1_mean": float(k1(d_A).mean())}


def _judged(group: Group) -> list[Completion]:
    return [c for c, score in zip(group.completions, group.scores, strict=True) if _value(score) is not None]


def _value(score: Score) -> float | None:
    return score.value if score.outcome is Outcome.SCORED else None


def _penalised(group: Group, penalties: Mapping[int, float]) -> Group:
    scores = (
        score if (value := _value(score)) is None else replace(score, value=value - penalties[id(completion)])
        for completion, score in zip(group.completions, group.scores, strict=True)
    )
    return group.shaped(tuple(scores))


def _penalised_by_token(group: Group, rewards: Mapping[int, Floats]) -> Group:
    """The group with rewards of single tokens, on top of those that it has; the scores stay."""
    completions = []
    for completion in group.completions:
        if id(completion) in rewards:
            rewards_T = (
                np.zeros(len(completion.tokens_T)) if completion.rewards_T is None else completion.rewards_T.copy()
            )
            rewards_T[completion.action_T] += rewards[id(completion)]
            completion = replace(completion, rewards_T=rewards_T)
        completions.append(completion)
    return replace(group, completions=tuple(completions))
