"""How far an engine's log-probabilities are from those of the model that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.contracts.serving import LogprobRow
from retrain.kernel.types import Floats, Sample, SampleRequest, SamplingParams, Tokens

PROBE_TEXT = (
    "A small town kept its records in a long, cold hall. Every spring the clerk counted 17 boxes, opened 4 of them, "
    "and wrote down what was inside: letters, maps, a broken clock, 250 coins. Then he asked himself: how many are "
    "left, and who will read them? If 3 people read 12 pages a day, the answer is 36; but nobody had ever tried. "
)
NUM_PROBES, SHORTEST, LONGEST = 8, 8, 420  # one prompt longer than the blocks in which servers cache keys and values
PROBE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """|log p_trainer - log p_engine| over `num_tokens` sampled tokens, in nats."""

    mean: float
    p99: float
    max: float
    num_tokens: int

    @classmethod
    def between(cls, ours: Sequence[Floats], theirs: Sequence[Floats]) -> Gap:
        """Over all entries of arrays of equal lengths; at least one entry."""
        sizes_N = np.abs(np.concatenate(ours) - np.concatenate(theirs))
        return cls(
            mean=float(sizes_N.mean()),
            p99=float(np.percentile(sizes_N, 99)),
            max=float(sizes_N.max()),
            num_tokens=len(sizes_N),
        )


def probe_prompts(tokenizer: Any, context_limit: int | None) -> list[Tokens]:
    """Eight prompts of 8 to 420 tokens, shorter where the context is; each leaves room for a few tokens."""
    longest = LONGEST if context_limit is None else max(1, min(LONGEST, context_limit - PROBE_TOKENS))
    ids: list[int] = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    ids *= 1 + longest // len(ids)
    lengths = np.geomspace(min(SHORTEST, longest), longest, NUM_PROBES).astype(int)
    texts = [tokenizer.decode(ids[place : place + length][:longest]) for place, length in enumerate(lengths)]
    # as the tokenizer has them, with what it puts first: some servers take text, and encode it themselves
    return [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]


def measure(backend: Any, tokenizer: Any, temperature: float, *, context_limit: int | None = None) -> Gap | None:
    """Sample eight probes from a backend and ask it for its trainer's log-probabilities of the same tokens.

    None for a backend that has no `logprobs`, or whose trainer is not in this process.
    """
    if not hasattr(backend, "logprobs"):
        return None
    prompts = probe_prompts(tokenizer, context_limit)
    requests = [SampleRequest(prompt_T=prompt_T, seeds_G=(seed,)) for seed, prompt_T in enumerate(prompts)]
    params = SamplingParams(max_tokens=PROBE_TOKENS, temperature=temperature)
    samples: list[Sample] = [group[0] for group in backend.sample(requests, params)]
    rows = [LogprobRow.of(prompt_T, sample.tokens_T) for prompt_T, sample in zip(prompts, samples, strict=True)]
    ours = backend.logprobs(rows, temperature)
    if ours is None:
        return None
    theirs = [s.logprobs_T if s.engine_logprobs_T is None else s.engine_logprobs_T for s in samples]
    return Gap.between([all_T[action_T] for all_T, (_, action_T) in zip(ours, rows, strict=True)], theirs)
