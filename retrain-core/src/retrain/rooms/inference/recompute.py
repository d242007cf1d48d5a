"""The log-probabilities that a sample carries: the engine's own, or recomputed with the training model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.kernel.contracts.serving import LogprobRow, Policy
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.types import Floats, Sample, Tokens
from retrain.rooms.inference.answers import Drawn

COMPARED_ROWS = 8  # of each batch, where the comparison costs a forward pass of its own


@dataclass(slots=True, kw_only=True, eq=False)
class Behaviour:
    """Makes samples of what servers drew.

    With `recomputes` the training model says how likely each token was at the sampling temperature. The engine's own
    numbers are kept beside these for the truncated importance weight if they are of the same distribution; if not (a
    server that reports them before temperature), engine and trainer are compared at T = 1 on a few rows.
    """

    policy: Policy
    recomputes: bool
    is_same_distribution: bool
    _log_weights: list[Floats] = field(default_factory=list)

    def samples(self, drawn: Sequence[tuple[Tokens, Drawn]], temperature: float, version: int) -> list[Sample]:
        """One sample for each (prompt_T, completion)."""
        if not self.recomputes:
            return [_sample(one, one.logprobs_T, None, version) for _, one in drawn]
        rows = [LogprobRow.of(prompt_T, one.tokens_T) for prompt_T, one in drawn]
        ours = self._trainers(rows, temperature)
        if self.is_same_distribution:
            self._log_weights += [ours_T - one.logprobs_T for ours_T, (_, one) in zip(ours, drawn, strict=True)]
        else:
            plain = self._trainers(rows[:COMPARED_ROWS], 1.0)
            self._log_weights += [ours_T - one.logprobs_T for ours_T, (_, one) in zip(plain, drawn, strict=False)]
        theirs = [one.logprobs_T if self.is_same_distribution else None for _, one in drawn]
        return [_sample(one, own, engine, version) for own, engine, (_, one) in zip(ours, theirs, drawn, strict=True)]

    def metrics(self) -> Mapping[str, float]:
        """`engine_gap_*`: |log p_trainer - log p_engine| of recomputed tokens since last asked; nats."""
        if not self._log_weights:
            return {}
        sizes_N = np.abs(np.concatenate(self._log_weights))
        self._log_weights.clear()
        gaps = {"mean": sizes_N.mean(), "p99": np.percentile(sizes_N, 99), "max": sizes_N.max()}
        return {f"engine_gap_{name}": float(value) for name, value in gaps.items()}

    def _trainers(self, rows: Sequence[LogprobRow], temperature: float) -> list[Floats]:
        found = self.policy.logprobs(rows, temperature)
        if found is None:
            what = "the training model is not in this process, so log-probabilities cannot be recomputed with it"
            raise BackendError(
                Problem(where="[inference] logprobs", what=what, fix='set logprobs = "engine" for this backend')
            )
        return [values_T[action_T] for values_T, (_, action_T) in zip(found, rows, strict=True)]


def _sample(drawn: Drawn, logprobs_T: Floats, engine_T: Floats | None, version: int) -> Sample:
    return Sample(
        tokens_T=drawn.tokens_T,
        logprobs_T=logprobs_T,
        stop_reason=drawn.stop_reason,
        policy_version=version,
        engine_logprobs_T=engine_T,
    )
