"""The default `Algorithm`: the configured flow of credit, with the planning detector and controller that it uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from retrain.credit.checks import refusal
from retrain.credit.flow import CreditFlow
from retrain.credit.pipeline import CreditGroup, CreditResult, assign_credit, named_rewards
from retrain.credit.specs import Controller, ControllerView, PlanningDetector
from retrain.kernel.contracts.algorithm import Algorithm, Credit, Needs, TokenCredit
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.progress import merge_fields
from retrain.kernel.types import (
    Completion,
    Floats,
    Group,
    GroupStatus,
    Kind,
    Mask,
    Outcome,
    Score,
    StopReason,
    Tokens,
    TrainRow,
    Turns,
    group_status,
    groups_of,
    num_correct,
)
from retrain.text.tokenizer import token_texts


@dataclass(slots=True, kw_only=True, eq=False)
class CreditAlgorithm:
    """Credit by the configured flow; lambda comes from the controller, read before the step's observation.

    Its metrics: `sepa_lambda`; mean and variance of uncertainty over execution and planning tokens; the fields of the
    controller and of the flow.
    """

    flow: CreditFlow
    mode: str = ""  # the text of `[algorithm] algorithm_mode`
    detector: PlanningDetector | None = None
    tokenizer: Any = None  # decodes the tokens for a transform with `needs_text`
    controller: Controller | None = None  # lambda is 0 without one

    @property
    def needs(self) -> Needs:
        return Needs(
            entropy=self.flow.needs_entropy,
            token_rewards=self.flow.needs_token_rewards,
            greedy=self.flow.needs_greedy,
            squared_probs=self.flow.needs_squared_probs,
        )

    @property
    def labels(self) -> Mapping[str, str]:
        return {
            "algorithm_mode": self.mode,
            "advantage_mode": self.flow.advantage.name,
            "transform_mode": self.flow.transform.name,
            "uncertainty_kind": self.flow.uncertainty.name,
            "condition": self.flow.condition,
        }

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        """Credit every judged completion, and make the rows of the groups to train (see `assign_credit`).

        A completion without a verdict is neither trained nor part of its group's statistics, unless the advantage needs
        none: then every group teaches.
        """
        statuses_P = tuple(
            group_status(group) if self.flow.needs_verdict and not self.flow.trains_all else GroupStatus.INFORMATIVE
            for group in groups
        )
        judged_P = [
            tuple(c for c, score in zip(group.completions, group.scores, strict=True) if self._counts(score))
            for group in groups
        ]
        planning_P = self._planning(judged_P)
        sepa_lambda = self.controller.value(step) if self.controller else 0.0
        informative_P = [status is GroupStatus.INFORMATIVE for status in statuses_P]
        credit_groups = [
            self._credit_group(f"step {step} group {number} (example {group.example.id})", group, judged, planning_G)
            for number, (group, judged, planning_G) in enumerate(zip(groups, judged_P, planning_P, strict=True))
        ]
        result = assign_credit(credit_groups, self.flow, sepa_lambda=sepa_lambda, trained=informative_P)
        result = _without_surplus(result, statuses_P)
        planning_A = _joined((mask for planning_G in planning_P for mask in planning_G), np.bool_)
        return Credit(
            statuses_P=statuses_P,
            tokens_PG=tuple(
                self._token_credits(group, planning_G, advs_G)
                for group, planning_G, advs_G in zip(groups, planning_P, result.token_advs, strict=True)
            ),
            rows=tuple(
                row
                for number, judged in enumerate(judged_P)
                if result.trained[number]
                for completion, advs_A in zip(judged, result.token_advs[number], strict=True)
                for row in train_rows(completion, advs_A, group=number)
            ),
            metrics=self._metrics([c for judged in judged_P for c in judged], planning_A, result, sepa_lambda),
            # `observe` is called only once the step has succeeded, so a step that is taken again counts once.
            memo=self._view(step, groups, planning_A, result),
        )

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        if self.controller:
            self.controller.observe(credit.memo)

    def state(self) -> Mapping[str, Any]:
        return {"controller": dict(self.controller.state())} if self.controller else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.controller and "controller" in state:
            self.controller.restore(state["controller"])

    def _counts(self, score: Score) -> bool:
        return score.outcome is Outcome.SCORED or not self.flow.needs_verdict

    def _planning(self, judged_P: Sequence[Sequence[Completion]]) -> list[tuple[Mask, ...]]:
        if self.detector is None:
            return [tuple(np.zeros(c.num_actions, np.bool_) for c in judged) for judged in judged_P]
        masks = iter(self.detector.masks([c.tokens_T[c.action_T] for judged in judged_P for c in judged]))
        return [tuple(next(masks) for _ in judged) for judged in judged_P]

    def _credit_group(
        self, name: str, group: Group, judged: Sequence[Completion], planning_G: Sequence[Mask]
    ) -> CreditGroup:
        entropies = [c.entropies_T[c.action_T] for c in judged if c.entropies_T is not None]
        tokens_G = [c.tokens_T[c.action_T] for c in judged] if self.flow.needs_text else None
        token_rewards_G = [np.zeros(c.num_actions) if c.rewards_T is None else c.rewards_T[c.action_T] for c in judged]
        pairs = [pair for pair in zip(group.scores, group.raw_scores, strict=True) if self._counts(pair[0])]
        rewards_G = _values(score.value for score, _ in pairs)
        # A completion without a verdict has no earlier score, so the shaper's counts as raw.
        raw_G = _values(score.value if raw.value is None else raw.value for score, raw in pairs)
        squared_G = [c.squared_probs_T[c.action_T] for c in judged if c.squared_probs_T is not None]
        return CreditGroup(
            rewards_G=rewards_G,
            logprobs_G=[completion.logprobs_T[completion.action_T] for completion in judged],
            planning_G=planning_G,
            # Entropies of only some completions would make the uncertainties of a group incomparable.
            entropies_G=entropies if len(entropies) == len(judged) else None,
            named_rewards=named_rewards([score.parts for score, _ in pairs]),
            shaping_G=None if np.array_equal(rewards_G, raw_G, equal_nan=True) else rewards_G - raw_G,
            tokens_G=tokens_G,
            texts_G=None if tokens_G is None else [token_texts(self.tokenizer, t.tolist()) for t in tokens_G],
            token_rewards_G=token_rewards_G if self.flow.needs_token_rewards else None,
            squared_probs_G=squared_G if len(squared_G) == len(judged) else None,
            greedy=float(_values([group.greedy_score.value])[0]) if group.greedy_score else None,
            turns_G=[c.by_turn or Turns(lengths=(c.num_actions,)) for c in judged],
            name=name,
            task=next((task for task in self.flow.norm_tasks if groups_of(task, [group])), ""),
        )

    def _token_credits(
        self, group: Group, planning_G: Sequence[Mask], advs_G: Sequence[Floats]
    ) -> tuple[TokenCredit, ...]:
        judged = iter(zip(planning_G, advs_G, strict=True))
        tokens_G = []
        for completion, score in zip(group.completions, group.scores, strict=True):
            length = completion.num_actions
            planning_A, advs_A = next(judged) if self._counts(score) else (np.zeros(length, np.bool_), np.zeros(length))
            tokens_G.append(TokenCredit(advantages_A=advs_A, planning_A=planning_A if self.detector else None))
        return tuple(tokens_G)

    def _metrics(
        self, judged: Sequence[Completion], planning_A: Mask, result: CreditResult, sepa_lambda: float
    ) -> Mapping[str, Any]:
        pooled_A = _joined(u for pooled_G in result.pooled for u in pooled_G)
        kind = self.flow.uncertainty.name
        fields = {"sepa_lambda": sepa_lambda, **token_metrics(judged, planning_A, pooled_A, uncertainty=kind)}
        if self.controller:
            fields = merge_fields(fields, self.controller.metrics(), source=f"controller {self.flow.controller!r}")
        return merge_fields(fields, result.metrics, source=self.flow.condition)

    def _view(
        self, step: int, groups: Sequence[Group], planning_A: Mask, result: CreditResult
    ) -> ControllerView | None:
        """View of the step for the controller, before pooling; None without a controller."""
        if self.controller is None:
            return None
        executing_A = _joined(u for u_G in result.uncertainties for u in u_G)[~planning_A]
        # First rounds only: a refill is drawn because of earlier scores, so its rate is biased.
        unselected = [group for group in groups if not group.round]
        total = sum(len(group.completions) for group in unselected)
        return ControllerView(
            step=step,
            correct_rate=sum(num_correct(group) for group in unselected) / total,
            execution_variance=float(executing_A.var()) if executing_A.size else None,
        )


def train_rows(completion: Completion, advantages_A: Floats, *, group: int = 0) -> list[TrainRow]:
    """One row for each context that the policy was given: one, unless an episode rewrote its history.

    `advantages_A` has one entry per action token of the completion; CreditError otherwise. `group` is the position of
    its group in the step.
    """
    if len(advantages_A) != completion.num_actions:
        what = f"credit of a completion has length {len(advantages_A)}, expected {completion.num_actions}"
        raise refusal(what, "give one number per sampled token", code="credit.wrong-length")
    advantages_T = np.zeros(len(completion.tokens_T))
    advantages_T[completion.action_T] = advantages_A
    turns_T: Tokens | None = None
    if completion.by_turn is not None:
        lengths = completion.by_turn.lengths
        turns_T = np.zeros(len(completion.tokens_T), np.int64)
        turns_T[completion.action_T] = np.repeat(np.arange(len(lengths)), lengths)

    def cut(values_T: Any, part: slice) -> Any:
        return None if values_T is None else values_T[part]

    return [
        TrainRow(
            tokens_T=completion.tokens_T[part],
            action_T=completion.action_T[part],
            logprobs_T=completion.logprobs_T[part],
            advantages_T=advantages_T[part],
            engine_logprobs_T=cut(completion.engine_logprobs_T, part),
            reference_logprobs_T=cut(completion.reference_logprobs_T, part),
            kl_coef=completion.kl_coef,
            experts_TLK=cut(completion.experts_TLK, part),
            group=group,
            # An episode that ran out of turns is not truncated: its last turn is whole.
            is_truncated=completion.stop_reason is StopReason.LENGTH,
            turns_T=cut(turns_T, part),
            teacher=completion.teacher,
        )
        for part in completion.contexts
    ]


def build_algorithm(flow: CreditFlow, context: PluginContext) -> Algorithm:
    """A plugin's own algorithm, or the flow with its planning detector and controller.

    With `[training] overlong = "mask"` it leaves truncated rows out.
    """
    config, mode = context.config, context.config.algorithm.algorithm_mode
    algorithm: Algorithm
    if flow.is_custom:
        from retrain.credit.custom import build_custom

        algorithm = build_custom(mode, context, flow.recipe)
    else:
        name = flow.controller
        algorithm = CreditAlgorithm(
            flow=flow,
            mode=mode,
            detector=build_detector(flow, context),
            tokenizer=context.tokenizer,
            controller=build_part(Kind.CONTROLLER, name, "algorithm.transform_mode", context) if name else None,
        )
    if config.training.overlong != "mask":
        return algorithm
    from retrain.credit.overlong import MaskedOverlong

    return MaskedOverlong(algorithm)


def build_detector(flow: CreditFlow, context: PluginContext) -> PlanningDetector | None:
    if not flow.needs_planning:
        return None
    name = context.config.planning.detector
    params: dict[str, Any] = context.config.planning.params
    detector: PlanningDetector = build_part(
        Kind.PLANNING_DETECTOR, name, "planning.detector", context, params, "planning.params"
    )
    return detector


def _values(values: Iterable[float | None]) -> Floats:
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def _without_surplus(result: CreditResult, statuses_P: Sequence[GroupStatus]) -> CreditResult:
    """Remove the credit of surplus groups: an advantage that sees the whole step gives them some too."""
    is_surplus_P = [status is GroupStatus.SURPLUS for status in statuses_P]
    if not any(is_surplus_P):
        return result
    pairs = zip(result.token_advs, is_surplus_P, strict=True)
    return replace(
        result,
        token_advs=tuple(tuple(map(np.zeros_like, advs_G)) if surplus else advs_G for advs_G, surplus in pairs),
        trained=tuple(t and not surplus for t, surplus in zip(result.trained, is_surplus_P, strict=True)),
    )


# Fields of a step's line about the uncertainty of its tokens; `_A` one entry per action token of the step.


def token_metrics(
    completions: Sequence[Completion], planning_A: Mask, pooled_A: Floats, *, uncertainty: str
) -> dict[str, float]:
    """Mean and variance of uncertainty over execution and planning tokens, before and after pooling.

    `surprisal` is -log p of the sampled tokens, `entropy` the sampling distribution's; `post_*` is the configured
    uncertainty after pooling. A field is absent when there is no such token.
    """
    logprobs_A = _joined(c.logprobs_T[c.action_T] for c in completions)
    fields = _split("surprisal", -logprobs_A, planning_A)
    entropies = [c.entropies_T[c.action_T] for c in completions if c.entropies_T is not None]
    if len(entropies) == len(completions):
        fields |= _split("entropy", _joined(entropies), planning_A)
    kind = "surprisal" if uncertainty == "surprisal" else "uncertainty"
    return fields | {f"post_{name}": value for name, value in _split(kind, pooled_A, planning_A).items()}


def _joined(arrays: Iterable[np.ndarray[Any, Any]], dtype: type = np.float64) -> np.ndarray[Any, Any]:
    # Plugins may return lists, and no completion at all must still give an array of this type.
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)


def _split(name: str, values_A: Floats, planning_A: Mask) -> dict[str, float]:
    fields: dict[str, float] = {}
    for part, chosen in (("exec", values_A[~planning_A]), ("plan", values_A[planning_A])):
        if chosen.size:
            fields |= {f"{part}_{name}_mean": float(chosen.mean()), f"{part}_{name}_var": float(chosen.var())}
    return fields
