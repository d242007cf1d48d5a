"""The reference of `[kl]`: the base model on the service, which gives the log-probabilities of tokens that we have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from retrain.api import BackendError, Floats, Problem, Tokens
from retrain_tinker.faults import SERVER_FIX, explained, safe_url, timed_out
from retrain_tinker.service import Service

DOING = "asking the base model for log-probabilities"


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
                left = f"{DOING}: {len(pending)} of {len(rows)} rows are missing"
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
            raise explained(error, DOING, self._service.base_url) from error
        found = list(answer or ())[-(length - 1) :]
        if len(answer or ()) not in (length - 1, length) or None in found or not np.isfinite(found).all():
            what = f"the service returned {len(answer or ())} log-probabilities of {length} tokens, or not of all"
            raise BackendError(Problem(where=safe_url(self._service.base_url), what=what, fix=SERVER_FIX))
        return np.asarray(found, dtype=np.float64)
