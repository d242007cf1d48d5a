"""`[training] max_thinking_tokens`: a thought that is still open at its limit is closed before its answer.

The row is sampled in parts, each a request of its own, so that any engine can do it and none has to look at a token
while it samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Deliver
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Sample, SampleRequest, SamplingParams, StopReason, Tokens, joined_experts
from retrain.text.thinking import Thinking
from retrain.text.transcript import joined

Draw = Callable[[Sequence[SampleRequest], SamplingParams, Sequence[str], Deliver], list[list[Sample]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ThinkingBudget:
    """At most `tokens` for a thought; `cut_T` closes it. Prompt and answer have room in `context_length` tokens."""

    thinking: Thinking
    tokens: int
    cut_T: Tokens
    context_length: int | None = None

    @classmethod
    def of(cls, config: Config, thinking: Thinking, context_length: int | None) -> ThinkingBudget:
        tokens = config.training.max_thinking_tokens
        if not thinking.opening:
            what, where = f"{config.model.model} has no tags of thoughts", config.place("training.max_thinking_tokens")
            fix = "remove it, or use a model whose chat template thinks"
            raise ConfigError(Problem(code="training.no-thinking-tags", where=where, what=what, fix=fix))
        ids = thinking.tokenizer(thinking.cut, add_special_tokens=False)["input_ids"]
        cut_T = np.asarray(ids, dtype=np.int64)
        return cls(thinking=thinking, tokens=tokens, cut_T=cut_T, context_length=context_length)

    def draw(
        self,
        draw: Draw,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        names: Sequence[str],
        deliver: Deliver | None,
    ) -> list[list[Sample]]:
        """Return samples as `draw` does, in parts: up to the limit, then the rest of every row that has not ended."""
        first = min(self.tokens, params.max_tokens)
        rows_PG = [
            [_Row(place=(at, i), prompt_T=each.prompt_T, seed=seed, limit=first) for i, seed in enumerate(each.seeds_G)]
            for at, each in enumerate(requests)
        ]

        def part(
            limit: int, rows: Sequence[Sequence[_Row]], wanted: Sequence[SampleRequest], labels: Sequence[str]
        ) -> None:
            early = set[tuple[int, int]]()

            def take(group: int, index: int, sample: Sample) -> None:
                row = rows[group][index]
                early.add((group, index))
                self._take(row, sample, params.max_tokens)
                if not row.limit and deliver is not None:
                    deliver(*row.place, row.sample())

            found = draw(wanted, replace(params, max_tokens=limit), labels, take)
            for group, samples in enumerate(found):
                for index, sample in enumerate(samples):
                    if (group, index) not in early:
                        take(group, index, sample)

        part(first, rows_PG, requests, names)
        while going := [row for rows in rows_PG for row in rows if row.limit]:
            # A call has one limit for all; rows that were cut at the same place share it.
            limit = going[0].limit
            some = [row for row in going if row.limit == limit]
            part(limit, [[row] for row in some], [row.request() for row in some], [names[row.place[0]] for row in some])
        return [[row.sample() for row in rows] for rows in rows_PG]

    def _take(self, row: _Row, sample: Sample, max_tokens: int) -> None:
        """Add a part, and the closing tag where the thought is to end; `limit` is that of the next part, 0 = none."""
        row.parts.append(sample)
        is_over = sample.stop_reason is not StopReason.LENGTH or len(sample.tokens_T) < row.limit
        tokens_T = row.tokens_T
        room = max_tokens - len(tokens_T)
        if self.context_length is not None:
            room = min(room, self.context_length - len(row.prompt_T) - len(tokens_T))
        thought = self.thinking.split(row.prompt_T, tokens_T)
        if is_over or room <= 0:
            row.limit = 0
        elif thought is None:  # it may still begin
            row.limit = min(self.tokens, room)
        elif not thought.is_open:
            row.limit = room
        elif len(self.cut_T) < room:
            row.parts.append(self._forced(sample))
            row.limit = room - len(self.cut_T)
        else:
            row.limit = 0

    def _forced(self, after: Sample) -> Sample:
        zeros_T = np.zeros(len(self.cut_T))
        return replace(
            after,
            tokens_T=self.cut_T,
            logprobs_T=zeros_T,
            entropies_T=None if after.entropies_T is None else zeros_T,
            engine_logprobs_T=None if after.engine_logprobs_T is None else zeros_T,
            experts_TLK=None,
            forced_T=np.ones(len(zeros_T), np.bool_),
        )


@dataclass(slots=True, kw_only=True, eq=False)
class _Row:
    place: tuple[int, int]
    prompt_T: Tokens
    seed: int
    limit: int  # tokens of the next part; 0 when there is none
    parts: list[Sample] = field(default_factory=list)

    @property
    def tokens_T(self) -> Tokens:
        return np.concatenate([part.tokens_T for part in self.parts])

    def request(self) -> SampleRequest:
        """Return the request for the rest of the row, with its own random stream."""
        context_T = np.concatenate([self.prompt_T, self.tokens_T])
        return SampleRequest(prompt_T=context_T, seeds_G=(Seeds(self.seed).derive("thinking", len(context_T)),))

    def sample(self) -> Sample:
        if len(self.parts) == 1:
            return self.parts[0]
        return replace(
            self.parts[-1],
            tokens_T=self.tokens_T,
            logprobs_T=np.concatenate([part.logprobs_T for part in self.parts]),
            entropies_T=joined([part.entropies_T for part in self.parts]),
            engine_logprobs_T=joined([part.engine_logprobs_T for part in self.parts]),
            experts_TLK=joined_experts([p.experts_TLK for p in self.parts], [p.tokens_T for p in self.parts]),
            context_experts_TLK=self.parts[0].context_experts_TLK,
            forced_T=np.concatenate([~part.action_T for part in self.parts]),
            policy_version=min(part.policy_version for part in self.parts),
        )
