"""Samples all completions concurrently, and asks the base model for log-probabilities of given tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from retrain.api import (
    BackendError,
    Deliver,
    Floats,
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
    StopReason,
    Tokens,
)
from retrain_tinker.faults import SERVER_FIX, explained, safe_url, timed_out
from retrain_tinker.service import Service

DOING = "sampling"
REFERENCE = "asking the base model for log-probabilities"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples from the published weights.

    `stop_ids` end a completion and are part of it; `context_limit` is the longest row that the model can read, None
    when unknown. The service's log-probabilities are those of T = 1, whatever the sampling temperature.
    """

    service: Service
    stop_ids: frozenset[int]
    context_limit: int | None
    timeout_s: float

    def draw(
        self,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        *,
        version: int,
        deliver: Deliver | None = None,
    ) -> list[list[Sample]]:
        """One sample per seed of each request, `deliver`ed as they finish; BackendError if any is missing."""
        deadline = time.monotonic() + self.timeout_s
        places: dict[Future[Any], tuple[int, int]] = {}
        samples: dict[tuple[int, int], Sample] = {}
        try:
            for group, request in enumerate(requests):
                prompt, fitting = request.prompt_T.tolist(), self._fit_context(request, params)
                for index, seed in enumerate(request.seeds_G):
                    started = self.service.start_sample(prompt, seed, fitting, sorted(self.stop_ids))
                    places[started] = group, index
            pending = set(places)
            while pending:
                done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
                if not done:
                    left = f"{DOING}: {len(pending)} of {len(places)} completions are missing"
                    raise timed_out(left, self.service.base_url, self.timeout_s, "timeout_s")
                for future in done:
                    place = places[future]
                    samples[place] = self._read_sample(future, version)
                    if deliver is not None:
                        deliver(*place, samples[place])
        finally:
            for future in places:
                future.cancel()  # no effect on finished ones
        return [[samples[group, index] for index in range(len(r.seeds_G))] for group, r in enumerate(requests)]

    def _fit_context(self, request: SampleRequest, params: SamplingParams) -> SamplingParams:
        if self.context_limit is None:
            return params
        room = self.context_limit - len(request.prompt_T)
        if room < 1:
            what = f"a prompt of {len(request.prompt_T)} tokens leaves no room in a context of {self.context_limit}"
            raise BackendError(Problem(where=DOING, what=what, fix="use shorter prompts or another model"))
        return replace(params, max_tokens=min(params.max_tokens, room))

    def _read_sample(self, future: Future[Any], version: int) -> Sample:
        try:
            answer = future.result()
        except Exception as error:
            raise explained(error, DOING, self.service.base_url) from error
        if len(answer.sequences) != 1:
            what = f"asked for one completion, the service returned {len(answer.sequences)}"
            raise BackendError(Problem(where=DOING, what=what, fix=SERVER_FIX))
        sequence = answer.sequences[0]
        tokens_T = np.asarray(sequence.tokens, dtype=np.int64)
        if sequence.logprobs is None or len(sequence.logprobs) != len(tokens_T) or not len(tokens_T):
            count = "no" if sequence.logprobs is None else str(len(sequence.logprobs))
            what = f"the service returned {len(tokens_T)} tokens with {count} log-probabilities"
            raise BackendError(Problem(where=DOING, what=what, fix=SERVER_FIX))
        has_stopped = str(sequence.stop_reason) == "stop"
        if has_stopped and int(tokens_T[-1]) not in self.stop_ids:
            what = "the service ended a completion without returning the token that ended it"
            why = f"its last token is {tokens_T[-1]}, and the end-of-sequence ids are {sorted(self.stop_ids)}"
            raise BackendError(Problem(where=DOING, what=what, why=why, fix="check that service and tokenizer agree"))
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=np.asarray(sequence.logprobs, dtype=np.float64),
            stop_reason=StopReason.EOS if has_stopped else StopReason.LENGTH,
            policy_version=version,
        )


class Reference:
    """A sampling client of the base model, made when it is first asked."""

    def __init__(self, service: Service, base_model: str, timeout_s: float) -> None:
        self._service, self._base_model, self._timeout_s = service, base_model, timeout_s

    def logprobs(self, rows: Sequence[Tokens]) -> list[Floats]:
        """Of each row's tokens after the first, raw (T = 1); BackendError when one is missing or not finite."""
        deadline = time.monotonic() + self._timeout_s
        started = [self._service.start_logprobs(self._base_model, tokens_T.tolist()) for tokens_T in rows]
        try:
            _, pending = wait(started, max(0.0, deadline - time.monotonic()))
            if pending:
                left = f"{REFERENCE}: {len(pending)} of {len(rows)} rows are missing"
                raise timed_out(left, self._service.base_url, self._timeout_s, "timeout_s")
            return [self._read(future, len(tokens_T)) for future, tokens_T in zip(started, rows, strict=True)]
        finally:
            for future in started:
                future.cancel()  # no effect on finished ones

    def _read(self, future: Future[Any], length: int) -> Floats:
        """The answer begins with None, for the token that nothing precedes; SkyRL-tx leaves it out."""
        try:
            answer = future.result()
        except Exception as error:
            raise explained(error, REFERENCE, self._service.base_url) from error
        found = list(answer or ())[-(length - 1) :]
        if len(answer or ()) not in (length - 1, length) or None in found or not np.isfinite(found).all():
            what = f"the service returned {len(answer or ())} log-probabilities of {length} tokens, or not of all"
            raise BackendError(Problem(where=safe_url(self._service.base_url), what=what, fix=SERVER_FIX))
        return np.asarray(found, dtype=np.float64)
