"""The weight of each token: minus the derivative of the loss by its log-probability. Above 0 it becomes likelier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.losses import LossTrial
from retrain.kernel.registry import Plugins
from retrain.kernel.types import ActionRow, Completion, Floats, Group, Mask, Tokens, TrainBatch

Key = tuple[int, bytes, bytes]  # a row by its group, tokens and actions


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One context of a completion."""

    tokens_T: Tokens
    action_T: Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChange:
    """A token whose weight in the gradient changes: its position, and its weight over the gradient's norm.

    `token` is its text, `reward` its completion's.
    """

    group: int
    index: int
    position: int
    before: float
    after: float
    token: str = ""
    reward: float | None = None


class TokenWeights:
    """The weights of a step's action tokens, under any condition, at the log-probabilities of the policy before it."""

    def __init__(
        self,
        groups: Sequence[Group],
        plugins: Plugins,
        logprobs: Callable[[Sequence[ActionRow], float], list[Floats]],
        temperature: float,
    ) -> None:
        self._groups, self._plugins = groups, plugins
        parts = [
            (number, _part(completion, span))
            for number, group in enumerate(groups)
            for completion in group.completions
            for span in completion.contexts
        ]
        found = logprobs([part for _, part in parts], temperature)
        self._logprobs = {_key(number, part): values_T for (number, part), values_T in zip(parts, found, strict=True)}
        certain = {
            _key(number, part): [np.exp(values_T[part.action_T])]
            for (number, part), values_T in zip(parts, found, strict=True)
        }
        self.open = {place: 1.0 - chances_A for place, chances_A in self._by_completion(certain).items()}

    def of(self, config: Config, batch: TrainBatch) -> dict[tuple[int, int], Floats] | None:
        """Return weights by group and completion, one for each action token; 0 where it is not trained.

        None where no backend can compute them, or an algorithm trains rows that it made. Completions that are equal
        to the token each get the mean. Terms of [kl] and [entropy] are left out.
        """
        keys = [_key(row.group, row) for row in batch.rows]
        if not all(key in self._logprobs for key in keys):
            return None
        trial = LossTrial(batch=batch, logprobs=[self._logprobs[key] for key in keys], packs=[range(len(keys))])
        name = config.backend.backend
        value = self._plugins.call_backend("evaluate_loss", config, self._plugins, trial, backend=name)
        if value is None:
            return None
        by_key: dict[Key, list[Floats]] = {}
        for key, row, gradient_T in zip(keys, batch.rows, value.gradients, strict=True):
            by_key.setdefault(key, []).append(-gradient_T[row.action_T])
        return self._by_completion(by_key)

    def _by_completion(self, by_key: Mapping[Key, list[Floats]]) -> dict[tuple[int, int], Floats]:
        return {
            (number, index): np.concatenate([self._of_part(number, completion, span, by_key) for span in spans])
            for number, group in enumerate(self._groups)
            for index, completion in enumerate(group.completions)
            if (spans := completion.contexts)
        }

    @staticmethod
    def _of_part(number: int, completion: Completion, span: slice, by_key: Mapping[Key, list[Floats]]) -> Floats:
        part = _part(completion, span)
        found = by_key.get(_key(number, part))
        zeros_A = np.zeros(int(np.count_nonzero(part.action_T)))
        return zeros_A if found is None else np.mean(found, axis=0)


def token_changes(
    taken: Mapping[tuple[int, int], Floats],
    other: Mapping[tuple[int, int], Floats],
    open_: Mapping[tuple[int, int], Floats],
    *,
    norms: tuple[float, float],
    most: int,
) -> list[TokenChange]:
    """Return the tokens that turn the gradient most: change of weight over the gradients' norms, times 1 - p.

    1 - p is the derivative of log p by the token's logit: one that was certain moves nothing, whatever it weighs.
    """
    found = []
    for (group, index), before_A in taken.items():
        was_A, is_A = before_A / norms[0], other[group, index] / norms[1]
        sizes_A = np.abs(is_A - was_A) * open_[group, index]
        for position in np.argsort(-sizes_A, kind="stable")[:most]:
            before, after = float(was_A[position]), float(is_A[position])
            change = TokenChange(group=group, index=index, position=int(position), before=before, after=after)
            found.append((float(sizes_A[position]), change))
    ranked = sorted(found, key=lambda pair: -pair[0])
    return [change for size, change in ranked[:most] if size > 0.0]


def _part(completion: Completion, span: slice) -> Part:
    return Part(tokens_T=completion.tokens_T[span], action_T=completion.action_T[span])


def _key(group: int, row: ActionRow) -> Key:
    return group, row.tokens_T.tobytes(), row.action_T.tobytes()
