"""Samples all completions concurrently, and requests the base model's log-probabilities of given tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

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
from retrain_tinker.faults import bad_answer, explained, safe_url, timed_out
from retrain_tinker.service import Service

DOING = "sampling"
Place = TypeVar("Place")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Samples from the published weights.

    `stop_ids` end a completion and are part of it; `context_limit` is the model's longest row, None when unknown. The
    service's log-probabilities are of T = 1, whatever the sampling temperature.
    """

    service: Service
    stop_ids: frozenset[int]
    context_limit: int | None

    def draw(
        self, requests: Sequence[SampleRequest], params: SamplingParams, *, version: int, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        samples: dict[tuple[int, int], Sample] = {}
        for place, answer in _answers(self.service, self._started(requests, params), DOING, "completions"):
            samples[place] = self._sample(answer, version)
            if deliver is not None:
                deliver(*place, samples[place])
        return [[samples[group, index] for index in range(len(r.seeds_G))] for group, r in enumerate(requests)]

    def _started(
        self, requests: Sequence[SampleRequest], params: SamplingParams
    ) -> Iterator[tuple[tuple[int, int], Future[Any]]]:
        for group, request in enumerate(requests):
            prompt, fitting = request.prompt_T.tolist(), params
            if self.context_limit is not None:
                room = self.context_limit - len(prompt)
                if room < 1:
                    what = f"a prompt of {len(prompt)} tokens leaves no room in a context of {self.context_limit}"
                    fix = "use shorter prompts or another model"
                    raise BackendError(Problem(code="tinker.prompt-too-long", where=DOING, what=what, fix=fix))
                fitting = replace(params, max_tokens=min(params.max_tokens, room))
            for index, seed in enumerate(request.seeds_G):
                yield (group, index), self.service.start_sample(prompt, seed, fitting, sorted(self.stop_ids))

    def _sample(self, answer: Any, version: int) -> Sample:
        if len(answer.sequences) != 1:
            raise bad_answer(DOING, f"it holds {len(answer.sequences)} completions instead of one")
        sequence = answer.sequences[0]
        tokens_T = np.asarray(sequence.tokens, dtype=np.int64)
        if sequence.logprobs is None or len(sequence.logprobs) != len(tokens_T) or not len(tokens_T):
            num_logprobs = len(sequence.logprobs or ())
            raise bad_answer(DOING, f"it holds {len(tokens_T)} tokens with {num_logprobs} log-probabilities")
        has_stopped = str(sequence.stop_reason) == "stop"
        if has_stopped and int(tokens_T[-1]) not in self.stop_ids:
            what = "the service ended a completion without returning the token that ended it"
            why = f"its last token is {tokens_T[-1]}, and the end-of-sequence ids are {sorted(self.stop_ids)}"
            fix = "check that service and tokenizer agree"
            raise BackendError(Problem(code="tinker.other-tokenizer", where=DOING, what=what, why=why, fix=fix))
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=np.asarray(sequence.logprobs, dtype=np.float64),
            stop_reason=StopReason.EOS if has_stopped else StopReason.LENGTH,
            policy_version=version,
        )


def reference_logprobs(service: Service, rows: Sequence[Tokens]) -> list[Floats]:
    """Return the base model's log-probabilities of each row's tokens after the first, raw (T = 1).

    BackendError when one is missing or not finite.
    """
    started = ((number, service.start_logprobs(tokens_T.tolist())) for number, tokens_T in enumerate(rows))
    found: dict[int, Floats] = {}
    for number, answer in _answers(service, started, "asking the base model for log-probabilities", "rows"):
        length, given = len(rows[number]), list(answer or ())
        # it begins with None, for the token that nothing precedes; SkyRL-tx leaves that out
        values = given[-(length - 1) :]
        if len(given) not in (length - 1, length) or None in values or not np.isfinite(values).all():
            reason = f"it holds {len(given)} log-probabilities of {length} tokens, or not of all"
            raise bad_answer(safe_url(service.base_url), reason)
        found[number] = np.asarray(values, dtype=np.float64)
    return [found[number] for number in range(len(rows))]


def _answers(
    service: Service, started: Iterable[tuple[Place, Future[Any]]], doing: str, what: str
) -> Iterator[tuple[Place, Any]]:
    """Yield every answer with its place, as they come; BackendError when one fails, or misses the deadline."""
    timeout_s = service.options.timeout_s
    deadline = time.monotonic() + timeout_s
    places: dict[Future[Any], Place] = {}
    try:
        for place, future in started:
            places[future] = place
        pending = set(places)
        while pending:
            done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
            if not done:
                left = f"{doing}: {len(pending)} of {len(places)} {what} are missing"
                raise timed_out(left, service.base_url, timeout_s, "timeout_s")
            for future in done:
                try:
                    answer = future.result()
                except Exception as error:
                    raise explained(error, doing, service.base_url) from error
                yield places[future], answer
    finally:
        for future in places:
            future.cancel()  # no effect on finished ones
