"""KL to the reference in a run: measured on the sampled tokens, then taken off rewards or handed to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from retrain.kernel.config.plugin_tables import KlTable
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.errors import BackendError, Problem, ResumeError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import MAX_LOG_RATIO, Completion, Floats, Group, LogprobRow, Outcome, Score, TrainReport

STATE = "kl"
# With coef = 0 one completion in so many is measured, at a cost of at most 2 % of the time of training.
STRIDE = 16
# The clip of arXiv:1909.08593: the divergence of one step is noisy, and must not swing the coefficient.
MAX_CHANGE = 0.2


def shaper_of(
    config: Config, backend: Backend, *, by_token: bool = False, needs_verdict: bool = True
) -> list[KlShaper]:
    """Return the shaper in a list, which is empty where neither the reward, the loss nor the log needs the reference.

    `by_token`: credit takes rewards of single tokens; `needs_verdict`: it trains only completions with a verdict.
    """
    table, offered = config.kl, backend.capabilities.regularisers
    logs = table.log and "kl_log" in offered
    is_asked = table.log and not logs and "kl_reward" in offered and config.origin("kl.log") != DEFAULT_ORIGIN
    if not (table.coef or logs or is_asked):
        return []
    log = {"logs": logs or is_asked, "is_asked": is_asked}
    credit = {"by_token": by_token, "needs_verdict": needs_verdict}
    return [KlShaper(table=table, backend=backend, temperature=config.training.temperature, **log, **credit)]


def steered(coef: float, kl: float, *, target: float, count: int, horizon: int) -> float:
    """The next coefficient after `count` completions of mean divergence `kl`, arXiv:1909.08593.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) count / horizon)
    """
    return coef * (1.0 + float(np.clip(kl / target - 1.0, -MAX_CHANGE, MAX_CHANGE)) * count / horizon)


@dataclass(slots=True, kw_only=True, eq=False)
class KlShaper:
    """A `Shaper` that measures every completion that may be trained, and a watcher that keeps the coefficient.

    `where = "reward"`: r - coef sum_t k1, or, `by_token`, -coef k1 as the reward of each token, of every group: an
    advantage that sees the whole step counts surplus groups too. `where = "loss"`: completions carry reference
    log-probabilities and the coefficient to the loss; surplus groups are never trained, so they are not measured. With
    coef = 0 a share of the completions is measured after training: the run is then the same, to the bit. A steered
    coefficient moves once per finished step.
    """

    table: KlTable
    backend: Backend
    temperature: float
    logs: bool
    is_asked: bool  # the user switched the log on, for a backend that does not offer it by itself
    by_token: bool
    needs_verdict: bool
    coef: float = field(init=False)
    _next_coef: float = field(init=False)

    def __post_init__(self) -> None:
        self.coef = self._next_coef = self.table.coef

    def shape(self, step: int, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """Return the groups with their KL, and its fields; no state changes: a step may be taken again."""
        self._next_coef = self.coef
        if not self.coef:
            return tuple(groups), {}
        judged = self._measured(groups)
        if not judged:
            return tuple(groups), {"kl_coef": self.coef}
        found = dict(zip(map(id, judged), self._reference(judged), strict=True))
        logs_A = [difference(completion, found[id(completion)]) for completion in judged]
        fields = means(logs_A, "kl") | {"kl_coef": self.coef}
        if self.table.target:
            target, horizon = self.table.target, self.table.horizon
            self._next_coef = steered(self.coef, fields["kl_mean"], target=target, count=len(judged), horizon=horizon)
        if self.table.where == "loss":
            return tuple(self._carrying(group, found) for group in groups), fields
        penalties = {id(c): self.coef * float(k1(d_A).sum()) for c, d_A in zip(judged, logs_A, strict=True)}
        fields["kl_penalty_mean"] = float(np.mean(list(penalties.values())))
        if self.by_token:
            rewards = {id(c): -self.coef * k1(d_A) for c, d_A in zip(judged, logs_A, strict=True)}
            return tuple(with_token_rewards(group, rewards) for group in groups), fields
        return tuple(_penalised(group, penalties) for group in groups), fields

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None, report: TrainReport | None) -> dict[str, float]:
        if groups is None:
            return {}
        self.coef = self._next_coef
        judged = self._measured(groups.groups)
        if self.coef or report is None or not self.logs or not judged:
            return {}
        # Spread over the step, so that every group is about as likely to be measured.
        some = judged[:: min(STRIDE, len(judged))]
        return means(list(map(difference, some, self._reference(some))), "kl")

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """Save the steered coefficient, and that the log was switched on: a run's settings no longer show it."""
        if self.table.target:
            return {STATE: {"coef": self.coef}}
        return {STATE: {"log": True}} if self.is_asked and self.logs else {}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        # A run's config.toml writes `log` out, so its origin no longer shows that the user set it.
        if self.is_asked:
            self.logs = STATE in state
        if not self.table.target:
            return
        try:
            self.coef = self._next_coef = float(state[STATE]["coef"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"the checkpoint has no coefficient of [kl]: {type(error).__name__}: {error}"
            fix = "resume from a checkpoint of this run"
            raise ResumeError(Problem(code="resume.no-kl-coef", what=what, fix=fix)) from error

    def _carrying(self, group: Group, found: Mapping[int, Floats]) -> Group:
        completions = (
            replace(c, reference_logprobs_T=found[id(c)], kl_coef=self.coef) if id(c) in found else c
            for c in group.completions
        )
        return replace(group, completions=tuple(completions))

    def _reference(self, completions: Sequence[Completion]) -> list[Floats]:
        def asked(rows: list[LogprobRow]) -> list[Floats]:
            return self.backend.reference_logprobs(rows, self.temperature)

        return given_logprobs(completions, asked, where="[kl]", of="log-probability of the reference")

    def _measured(self, groups: Sequence[Group]) -> list[Completion]:
        """The completions to measure, in order: those with a verdict, or all of them where credit needs none."""
        every = self.coef and self.table.where == "reward"
        chosen = (group for group in groups if every or not group.is_surplus)
        pairs = (pair for group in chosen for pair in zip(group.completions, group.scores, strict=True))
        return [c for c, score in pairs if not self.needs_verdict or _value(score) is not None]


def _value(score: Score) -> float | None:
    return score.value if score.outcome is Outcome.SCORED else None


def _penalised(group: Group, penalties: Mapping[int, float]) -> Group:
    scores = (
        score if (value := _value(score)) is None else replace(score, value=value - penalties[id(completion)])
        for completion, score in zip(group.completions, group.scores, strict=True)
    )
    return group.shaped(tuple(scores))


# The distance of the policy that sampled from another model, per token: d = log p_other - log p, `_A` one entry per
# action token of a completion.


def k1(d_A: Floats) -> Floats:
    """-d per token: unbiased for KL(p, p_other) on samples of p, of either sign."""
    return -d_A


def k3(d_A: Floats) -> Floats:
    """e^d - 1 - d per token: unbiased too, never negative, and of less variance near the other model."""
    # Clamp before the exponential: one token of a very different reference would drown all others.
    clamped_A = np.clip(d_A, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    result: Floats = np.expm1(clamped_A) - clamped_A
    return result


def means(differences: Sequence[Floats], prefix: str) -> dict[str, float]:
    """`{prefix}_mean` by k3 and `{prefix}_k1_mean`, over all tokens."""
    d_A = np.concatenate(differences)
    return {f"{prefix}_mean": float(k3(d_A).mean()), f"{prefix}_k1_mean": float(k1(d_A).mean())}


def difference(completion: Completion, other_T: Floats) -> Floats:
    """d of the action tokens, p being the policy that sampled them."""
    result: Floats = (other_T - completion.logprobs_T)[completion.action_T]
    return result


def given_logprobs(
    completions: Sequence[Completion], logprobs: Callable[[list[LogprobRow]], Sequence[Floats]], *, where: str, of: str
) -> list[Floats]:
    """Another model's log-probabilities at the action tokens of each completion, 0 at the others.

    Every context that the policy was given is a separate row, as in training. BackendError, with `where` and the
    quantity (`of`), for a number that is not finite.
    """
    rows = [LogprobRow(c.tokens_T[part], c.action_T[part]) for c in completions for part in c.contexts]
    answers = iter(logprobs(rows))
    found = []
    for completion in completions:
        values_T = np.zeros(len(completion.tokens_T))
        for part in completion.contexts:
            values_T[part] = next(answers)
        if not np.isfinite(values_T).all():
            what, fix = f"a {of} is not finite", "check the model's weights and dtype"
            raise BackendError(Problem(code="model.not-finite", where=where, what=what, fix=fix))
        found.append(values_T)
    return found


def with_token_rewards(group: Group, rewards: Mapping[int, Floats]) -> Group:
    """Return the group with these rewards of single tokens, by the completion's `id()`, added to its own."""
    completions = []
    for completion in group.completions:
        if id(completion) in rewards:
            before_T = completion.rewards_T
            # A copy, since a step that is taken again starts from the same rewards.
            rewards_T = np.zeros(len(completion.tokens_T)) if before_T is None else before_T.copy()
            rewards_T[completion.action_T] += rewards[id(completion)]
            completion = replace(completion, rewards_T=rewards_T)
        completions.append(completion)
    return replace(group, completions=tuple(completions))
