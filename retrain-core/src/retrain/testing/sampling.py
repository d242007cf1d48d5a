"""The suite of inference engines, shared by backends: right shapes, true numbers, and one completion per seed.

An engine runs inside the backend `local`, or with a toy policy if that is not installed. An engine that cannot
reproduce a seed declares `EngineTraits(determinism=Determinism.NONE)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from retrain.kernel.types import Sample, SamplingParams, StopReason
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_unchanged
from retrain.testing.subjects import MAX_TOKENS, open_subject, requests
from retrain.text.tokenizer import context_length

# Nats by which half-precision arithmetic may exceed zero.
ROUNDING = 1e-3
# Nats between two ways of batching the same completion.
GAP = 1e-3
# Tokens, or half of the context limit.
LONG_PROMPT = 400
COOL, HOT = 0.2, 2.0


def samples_one_completion_per_seed(bench: Bench) -> None:
    """One list per request and one sample per seed, each with 1 to `max_tokens` token ids and a number for each."""
    asked = requests(bench)
    for sample in _flat(open_subject(bench).sample(asked)):
        tokens_T = np.asarray(sample.tokens_T)
        expect(
            tokens_T.ndim == 1 and tokens_T.dtype.kind in "iu" and 1 <= tokens_T.size <= MAX_TOKENS,
            f"tokens_T is {tokens_T.dtype} of shape {tokens_T.shape} with max_tokens = {MAX_TOKENS}",
            why="these very ids are trained on",
            fix="return the sampled ids as a one-dimensional integer array, the end-of-sequence token included",
        )
        why, fix = "there is no such token", "return ids of the vocabulary"
        expect(tokens_T.min() >= 0, f"a token id is {tokens_T.min()}", why=why, fix=fix)


def gives_log_probabilities(bench: Bench) -> None:
    """`logprobs_T` are finite natural logarithms, none above zero, and not all zero."""
    samples = _flat(open_subject(bench).sample(requests(bench)))
    largest = max(float(np.max(sample.logprobs_T)) for sample in samples)
    why = "the ratio of trainer and sampler is exp of their difference"
    fix = "return the natural logarithm of the probability, under the distribution that was sampled from"
    expect(largest <= ROUNDING, f"a log-probability is {largest:g}", why=why, fix=fix)
    expect(
        any(np.any(np.asarray(sample.logprobs_T) < 0) for sample in samples),
        "all log-probabilities are 0",
        why="that says every token was certain; the importance ratio would be wrong for all of them",
        fix="return the log-probability that the sampler used",
    )


def ends_where_it_says(bench: Bench) -> None:
    """EOS: the end token is kept and nothing follows it. LENGTH: `max_tokens` were sampled, none an end token."""
    subject, end = open_subject(bench), bench.tokenizer.eos_token_id
    asked = requests(bench, (8, 8, 8))
    # Short completions are mostly truncated and long ones mostly end, so both reasons are seen.
    samples = [s for n in (4, 48) for s in _flat(subject.sample(asked, SamplingParams(max_tokens=n, temperature=1.0)))]
    inner = {int(token) for sample in samples for token in sample.tokens_T[:-1]}
    ends = {end} - {None}
    for sample in samples:
        if sample.stop_reason is StopReason.EOS and (last := int(sample.tokens_T[-1])) not in ends:
            expect(
                last not in inner,
                f"a completion with stop_reason 'eos' ends with token {last}, but others have it in their middle",
                why="the end token is sampled and must be trained, or the policy never learns to stop",
                fix="keep the end token in tokens_T, with its log-probability",
            )
            # A model may have several end tokens, and the tokenizer knows one of them.
            ends.add(last)
    for sample in samples:
        tokens, reason = [int(token) for token in sample.tokens_T], sample.stop_reason
        why, fix = "truncated answers are counted, and masks go by it", "use retrain.api.StopReason.EOS or LENGTH"
        expect(reason in (StopReason.EOS, StopReason.LENGTH), f"stop_reason is {reason!r}", why=why, fix=fix)
        why = "nothing exists after the end of a sequence; it would be trained"
        fix = "cut each completion after its first end token"
        expect(not ends & set(tokens[:-1]), f"tokens follow the end token: {tokens[-8:]}", why=why, fix=fix)
        expect(
            (reason is StopReason.EOS) == (tokens[-1] in ends),
            f"stop_reason is {reason.value!r}, and the last token is {tokens[-1]} (end tokens seen: {sorted(ends)})",
            why="an answer that ended by itself is not truncated",
            fix="say EOS exactly when the last token is an end token",
        )


def cuts_at_max_tokens(bench: Bench) -> None:
    """With `max_tokens` = 1 each completion is one token, and truncated unless that is the end token."""
    subject = open_subject(bench)
    for sample in _flat(subject.sample(requests(bench), SamplingParams(max_tokens=1, temperature=1.0))):
        why, fix = "max_tokens bounds memory and time", "count new tokens only, the end token included"
        expect(len(sample.tokens_T) == 1, f"{len(sample.tokens_T)} tokens with max_tokens = 1", why=why, fix=fix)


def tells_the_policy_version(bench: Bench) -> None:
    """Every sample has the version of the published policy that it came from; 0 before any training."""
    subject = open_subject(bench)
    versions = {sample.policy_version for sample in _flat(subject.sample(requests(bench)))}
    expect(
        versions == {subject.version},
        f"policy_version is {sorted(versions)}, published is {subject.version}",
        why="stale samples are found by it",
        fix="set it to what publish() returned last",
    )


def repeats_a_seed(bench: Bench) -> None:
    """A seed reproduces its completion, as declared: in any order, and with or without other prompts."""
    subject = open_subject(bench)
    if not subject.is_repeatable:
        return
    asked = requests(bench)
    together = subject.sample(asked)
    backwards = [replace(request, seeds_G=request.seeds_G[::-1]) for request in reversed(asked)]
    other = [list(reversed(group)) for group in reversed(subject.sample(backwards))]
    # One seed at a time: an engine with one generator per batch gives other completions then.
    single = [[s for seed in r.seeds_G for s in subject.sample([replace(r, seeds_G=(seed,))])[0]] for r in asked]
    for how, again in (("sampled in another order", other), ("sampled by itself", single)):
        for first, second in zip(_flat(together), _flat(again), strict=True):
            expect(
                _is_same(first, second),
                f"{how}, a completion is {_shown(second)}; it was {_shown(first)}",
                why="a completion must depend only on its prompt and seed, or batch size changes the experiment",
                fix="sample each completion with a generator seeded for it, or declare determinism none",
            )


def draws_by_the_seed(bench: Bench) -> None:
    """Different seeds give different completions."""
    samples = _flat(open_subject(bench).sample(requests(bench, (16,)), SamplingParams(max_tokens=24, temperature=2.0)))
    expect(
        len({tuple(map(int, sample.tokens_T)) for sample in samples}) > 1,
        f"16 seeds at temperature 2 returned one completion, {_shown(samples[0])}",
        why="a group of equal completions teaches nothing",
        fix="use the seeds of the request",
    )


def heeds_the_temperature(bench: Bench) -> None:
    """Sampling at a lower temperature yields likelier tokens."""
    subject, asked = open_subject(bench), requests(bench, (8, 8, 8))
    cool, hot = (
        np.mean(np.concatenate([s.logprobs_T for s in _flat(subject.sample(asked, params))]))
        for params in (SamplingParams(max_tokens=MAX_TOKENS, temperature=t) for t in (COOL, HOT))
    )
    expect(
        cool >= hot - GAP,
        f"the mean log-probability is {cool:.3f} at temperature {COOL} and {hot:.3f} at {HOT}",
        why="the trainer divides its logits by the same temperature",
        fix="divide the logits by params.temperature before drawing, and take log-probabilities after that",
    )


def gives_entropies_when_asked(bench: Bench) -> None:
    """With `entropy` each token has the entropy of its distribution, in nats, if the backend declares that."""
    subject = open_subject(bench)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, entropy=True)
    for sample in _flat(subject.sample(requests(bench), params)):
        if sample.entropies_T is None:
            expect(
                not subject.provides_entropy,
                "entropies_T is None although provides_entropy is declared",
                why="uncertainty kinds that need entropies are allowed because of it",
                fix="return them when params.entropy is set, or declare provides_entropy = False",
            )
            continue
        lowest = float(np.min(sample.entropies_T))
        expect(
            lowest >= -ROUNDING, f"an entropy is {lowest:g}", why="entropies are not negative", fix="use -sum p ln p"
        )


def takes_an_empty_list(bench: Bench) -> None:
    """No requests, no samples."""
    samples = open_subject(bench).sample([])
    expect(samples == [], f"sample([]) is {samples!r:.100}", why="a step may need none", fix="return []")


def takes_a_long_prompt(bench: Bench) -> None:
    """A prompt of several hundred tokens works like a short one."""
    limit = context_length(bench.config, bench.plugins)
    wanted = min(LONG_PROMPT, limit // 2) if limit else LONG_PROMPT
    (request,) = requests(bench, (2,))
    long_T = np.resize(request.prompt_T, wanted)
    samples = open_subject(bench).sample(
        [replace(request, prompt_T=long_T)], SamplingParams(max_tokens=4, temperature=1.0)
    )
    expect(
        len(samples[0]) == 2 and all(len(s.tokens_T) for s in samples[0]),
        f"a prompt of {wanted} tokens got {samples!r:.200}",
        why="prompts differ in length",
        fix="read the whole prompt",
    )


def leaves_requests_alone(bench: Bench) -> None:
    """Sampling does not modify prompts."""
    asked, before = requests(bench), requests(bench)
    open_subject(bench).sample(asked)
    is_same = all(np.array_equal(a.prompt_T, b.prompt_T) for a, b in zip(asked, before, strict=True))
    expect_unchanged(is_same, "a prompt", why="the same array is sampled from again and trained on")


def delivers_what_it_returns(bench: Bench) -> None:
    """With `delivers_early`, each sample is delivered at most once, and equals the one returned."""
    delivered: dict[tuple[int, int], Sample] = {}

    def deliver(request: int, place: int, sample: Sample) -> None:
        expect(
            (request, place) not in delivered,
            f"sample {place} of request {request} was delivered twice",
            why="it would be scored twice",
            fix="deliver when a sample is finished, once",
        )
        delivered[request, place] = sample

    returned = open_subject(bench).sample(requests(bench), None, deliver)
    for (request, place), sample in delivered.items():
        is_there = 0 <= request < len(returned) and 0 <= place < len(returned[request])
        expect(
            is_there and _is_same(sample, returned[request][place], gap=0.0),
            f"delivered sample {place} of request {request} is not the one returned there",
            why="it is scored as delivered and trained as returned",
            fix="call deliver(number of the request, number of the seed, the finished sample)",
        )


def can_be_closed_twice(bench: Bench) -> None:
    """A second `close` does nothing."""
    subject = open_subject(bench)
    subject.part.close()
    subject.part.close()


def _flat(groups: Iterable[Iterable[Sample]]) -> list[Sample]:
    return [sample for group in groups for sample in group]


def _is_same(first: Sample, second: Sample, gap: float = GAP) -> bool:
    return np.array_equal(first.tokens_T, second.tokens_T) and np.allclose(
        first.logprobs_T, second.logprobs_T, rtol=0.0, atol=gap
    )


def _shown(sample: Sample) -> str:
    tokens: Sequence[int] = [int(token) for token in sample.tokens_T[:8]]
    numbers = [round(float(value), 4) for value in sample.logprobs_T[:4]]
    return f"{tokens} with log-probabilities {numbers}"
