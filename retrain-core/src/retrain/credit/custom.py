"""A plugin's own `Algorithm` in a run: built by name, and its credit checked before anything is trained on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.credit.checks import as_numbers, call_part, check_count, refusal
from retrain.kernel.contracts.algorithm import Algorithm, Credit, Needs
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.losses import LossTraits
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Group, Kind

CONDITION = "condition"
UNUSED_LABELS = ("advantage_mode", "transform_mode", "uncertainty_kind")  # labels of the default algorithm


class WrappedAlgorithm:
    """An `Algorithm` around another one; subclasses override some of its methods."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    @property
    def needs(self) -> Needs:
        return self.algorithm.needs

    @property
    def labels(self) -> Mapping[str, str]:
        return self.algorithm.labels

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        return self.algorithm.assign(step, groups)

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        self.algorithm.observe(step, groups, credit)

    def state(self) -> Mapping[str, Any]:
        return self.algorithm.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.algorithm.restore(state)


class CustomAlgorithm(WrappedAlgorithm):
    """A plugin's algorithm; CreditError, with its name and the completion, for credit of the wrong shape or value.

    `loss` names a loss that takes one advantage per completion; empty for others.
    """

    def __init__(self, name: str, algorithm: Algorithm, condition: str = "", *, loss: str = "") -> None:
        super().__init__(algorithm)
        self.name, self._loss = name, loss
        self._condition = {CONDITION: condition} if condition else {}

    @property
    def labels(self) -> Mapping[str, str]:
        """The plugin's labels; labels of the default algorithm's parts are empty unless the plugin sets them."""
        labels = {"algorithm_mode": self.name, **dict.fromkeys(UNUSED_LABELS, ""), **self.algorithm.labels}
        return labels | self._condition

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        what = f"step {step}: algorithm {self.name!r}"
        credit = call_part(what, self.algorithm.assign, step, groups)
        if not isinstance(credit, Credit):
            wrong = f"{what} returned {type(credit).__name__}, not Credit"
            raise refusal(wrong, "return retrain.advantages.Credit", code="credit.not-credit")
        _check_credit(credit, groups, what)
        if self._loss and any(np.unique(t.advantages_A).size > 1 for each in credit.tokens_PG for t in each):
            finer = f"{what} credits single tokens, and the loss {self._loss!r} takes one advantage per completion"
            raise refusal(finer, 'use another loss, such as "ppo"', code="loss.credit-too-fine")
        return credit

    def observe(self, step: int, groups: Sequence[Group], credit: Credit) -> None:
        call_part(f"step {step}: algorithm {self.name!r}", self.algorithm.observe, step, groups, credit)


def build_custom(name: str, context: PluginContext, condition: str = "") -> CustomAlgorithm:
    """Build the algorithm that `[algorithm] algorithm_mode` names; PluginError unless its labels name the condition.

    `condition`, the label of a recipe, replaces that one.
    """
    params = context.config.algorithm.params
    algorithm = build_part(Kind.ALGORITHM, name, "algorithm.algorithm_mode", context, params, "algorithm.params")
    labels = getattr(algorithm, "labels", None)
    if not isinstance(labels, Mapping) or not isinstance(labels.get(CONDITION), str):
        what = f"algorithm {name!r} has no label {CONDITION!r}, the name of the run in its records"
        where, fix = context.config.place("algorithm.algorithm_mode"), f"set labels = {{{CONDITION!r}: {name!r}}}"
        raise PluginError(Problem(code="plugin.no-condition", where=where, what=what, fix=fix))
    traits = context.plugins.traits_of(Kind.LOSS, context.config.algorithm.loss, LossTraits)
    is_coarse = traits is not None and traits.credit == "completion"
    return CustomAlgorithm(name, algorithm, condition, loss=context.config.algorithm.loss if is_coarse else "")


def _check_credit(credit: Credit, groups: Sequence[Group], what: str) -> None:
    for name in ("statuses_P", "tokens_PG"):
        check_count(getattr(credit, name), len(groups), what=f"{what}: {name}", each="group")
    for number, (group, tokens_G) in enumerate(zip(groups, credit.tokens_PG, strict=True)):
        check_count(tokens_G, len(group.completions), what=f"{what}: credit of group {number}")
        for index, (completion, tokens) in enumerate(zip(group.completions, tokens_G, strict=True)):
            place = f"{what}: advantages of group {number} completion {index}"
            as_numbers(tokens.advantages_A, completion.num_actions, what=place)
    is_near = any(completion.kl_coef for group in groups for completion in group.completions)
    for number, row in enumerate(credit.rows):
        # Rows that a plugin builds by hand lose the reference, and the KL would silently be 0.
        if is_near and row.reference_logprobs_T is None:
            without = f"{what}: row {number} has no reference log-probabilities for [kl]"
            raise refusal(without, "build the rows with train_rows", code="credit.no-reference")
        advantages_T = as_numbers(row.advantages_T, len(row.tokens_T), what=f"{what}: advantages of row {number}")
        if advantages_T[~row.action_T].any():
            misplaced = f"{what}: row {number} has an advantage where the policy sampled no token"
            raise refusal(misplaced, "build the rows with train_rows", code="credit.unsampled-token")
