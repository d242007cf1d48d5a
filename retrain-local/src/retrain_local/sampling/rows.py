"""Completions that are being sampled."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.api import (
    BackendError,
    ConfigError,
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
    StopReason,
    Tokens,
    generator,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One completion: its prompt, its stream of uniforms, and the tokens sampled so far.

    `request` and `place` are the indices of its request and of its seed. `prompt_key` is equal for equal prompts.
    `room` is the number of tokens it may still get. Each token consumes one number of the stream, in order, so a
    preempted row continues exactly where it stopped. `blocks` of the pool hold every token of a running row except the
    last, the next one to read.
    """

    request: int
    place: int
    prompt_T: Tokens
    prompt_key: bytes
    seed: int
    room: int
    ended_by_room: bool = True
    is_delivered: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stream: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rewind()

    def rewind(self) -> None:
        """Move the stream to the first number that no token has consumed."""
        self.stream = generator(self.seed)
        self.stream.random(len(self.tokens))

    @property
    def prefix_T(self) -> Tokens:
        return np.concatenate([self.prompt_T, np.asarray(self.tokens, dtype=np.int64)])

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are cached before the next step: all but the last."""
        return len(self.prompt_T) + len(self.tokens) - 1

    @property
    def parity(self) -> int:
        """The half of the rows that it belongs to, 0 or 1: every other one of a group and of the requests."""
        return (self.request + self.place) % 2

    @property
    def last(self) -> int:
        return self.tokens[-1] if self.tokens else int(self.prompt_T[-1])

    def take(
        self, tokens: Sequence[int], logprobs: Sequence[float], entropies: Sequence[float], *, stop: Collection[int]
    ) -> None:
        used = min(len(tokens), self.room)
        end = next((i for i in range(used) if tokens[i] in stop), None)
        if end is not None:
            used, self.ended_by_room = end + 1, False
        self.tokens += tokens[:used]
        self.logprobs += logprobs[:used]
        self.entropies += entropies[:used]
        self.room = 0 if end is not None else self.room - used

    def sample(self, version: int, *, entropy: bool, since: int = 0) -> Sample:
        return Sample(
            tokens_T=np.asarray(self.tokens[since:], dtype=np.int64),
            logprobs_T=np.asarray(self.logprobs[since:], dtype=np.float64),
            stop_reason=StopReason.LENGTH if self.ended_by_room else StopReason.EOS,
            policy_version=version,
            entropies_T=np.asarray(self.entropies[since:], dtype=np.float64) if entropy else None,
        )


def new_rows(
    requests: Sequence[SampleRequest], params: SamplingParams, limit: int | None, vocabulary: int, *, first: int = 0
) -> list[Row]:
    """Create a row per seed of each request, numbered from `first`; an error if the model cannot read a prompt."""
    rows = []
    for index, request in enumerate(requests, start=first):
        prompt_T = np.asarray(request.prompt_T, dtype=np.int64)
        _check(prompt_T, index, limit, vocabulary)
        room = params.max_tokens if limit is None else min(params.max_tokens, limit - len(prompt_T))
        key = prompt_T.tobytes()
        rows += [
            Row(request=index, place=place, prompt_T=prompt_T, prompt_key=key, seed=seed, room=room)
            for place, seed in enumerate(request.seeds_G)
        ]
    return rows


def _check(prompt_T: Tokens, index: int, limit: int | None, vocabulary: int) -> None:
    if prompt_T.ndim != 1 or not len(prompt_T):
        what = f"prompt {index} must be a non-empty row of token ids"
        raise BackendError(Problem(what=what, fix="correct the data source or environment that made it"))
    if prompt_T.min() < 0 or prompt_T.max() >= vocabulary:
        what = f"prompt {index} holds a token id that is not among the model's {vocabulary}"
        raise BackendError(Problem(what=what, fix="use the tokenizer that belongs to the model"))
    if limit is not None and len(prompt_T) >= limit:
        what = f"prompt {index} has {len(prompt_T)} tokens, and the model's context of {limit} leaves no room to answer"
        fix = "use shorter prompts or a model with a longer context"
        raise ConfigError(Problem(where="[data]", what=what, fix=fix))
