"""Behaviour log-probabilities of a sample: the engine's own, or recomputed with the training model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retrain.credit.logprob_gap import LogprobGap, LogprobRow
from retrain.engines.answers import Completion
from retrain.engines.policy import Policy
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.types import Floats, Sample, Tokens

COMPARED_ROWS = 8  # of each batch, where the comparison costs an extra forward pass


@dataclass(slots=True, kw_only=True, eq=False)
class Behaviour:
    """Turns completions into samples.

    With `recomputes` the training model computes the behaviour log-probabilities at the sampling temperature. The
    engine's own are kept beside them for the truncated importance weight when both describe the same distribution;
    when not (a server that reports them before temperature), the two are compared at T = 1 on a few rows.
    """

    policy: Policy
    recomputes: bool
    is_same_distribution: bool
    _differences: list[Floats] = field(default_factory=list)  # log p_trainer - log p_engine

    def samples(
        self, completions: Sequence[tuple[Tokens, Completion]], temperature: float, version: int
    ) -> list[Sample]:
        """One sample for each (prompt_T, completion)."""
        if not self.recomputes:
            return [_sample(completion, completion.logprobs_T, None, version) for _, completion in completions]
        rows = [LogprobRow.of(prompt_T, completion.tokens_T) for prompt_T, completion in completions]
        trained = self._trainer_logprobs(rows, temperature)
        compared = trained if self.is_same_distribution else self._trainer_logprobs(rows[:COMPARED_ROWS], 1.0)
        self._differences += [
            trained_T - completion.logprobs_T for trained_T, (_, completion) in zip(compared, completions, strict=False)
        ]
        return [
            _sample(completion, trained_T, completion.logprobs_T if self.is_same_distribution else None, version)
            for trained_T, (_, completion) in zip(trained, completions, strict=True)
        ]

    def metrics(self) -> Mapping[str, float]:
        """`engine_gap_*`: |log p_trainer - log p_engine| over the tokens recomputed since the last call, in nats."""
        if not self._differences:
            return {}
        gap = LogprobGap.of(self._differences)
        self._differences.clear()
        return {"engine_gap_mean": gap.mean, "engine_gap_p99": gap.p99, "engine_gap_max": gap.max}

    def _trainer_logprobs(self, rows: Sequence[LogprobRow], temperature: float) -> list[Floats]:
        found = self.policy.logprobs(rows, temperature)
        if found is None:
            what = "the training model is not in this process, so log-probabilities cannot be recomputed with it"
            raise BackendError(
                Problem(where="[inference] logprobs", what=what, fix='set logprobs = "engine" for this backend')
            )
        return [values_T[action_T] for values_T, (_, action_T) in zip(found, rows, strict=True)]


def _sample(completion: Completion, logprobs_T: Floats, engine_T: Floats | None, version: int) -> Sample:
    return Sample(
        tokens_T=completion.tokens_T,
        logprobs_T=logprobs_T,
        stop_reason=completion.stop_reason,
        policy_version=version,
        engine_logprobs_T=engine_T,
    )
