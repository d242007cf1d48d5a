"""Continuous batching: the completions being sampled, the running ones, and the blocks that they own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

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
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.sampling.cache import Blocks, Prefix, PrefixCache


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """One completion: its prompt, its stream of uniforms, and the tokens sampled so far.

    `request` and `place` are the indices of its request and of its seed. `prompt_key` is equal for equal prompts.
    `room` is the number of tokens it may still get. Each token consumes one number of the stream, in order, so a
    preempted row continues exactly where it stopped. `blocks` of the pool hold every token of a running row except the
    last, the next one to read; `slot` holds the state after these, if the model has any.
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
    experts: list[NDArray[np.int16]] = field(default_factory=list)  # [L, K] for each token of a mixture
    blocks: list[int] = field(default_factory=list)
    slot: int = 0
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
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        entropies: Sequence[float],
        experts: Iterable[NDArray[np.int16]] = (),
        *,
        stop: Collection[int],
    ) -> None:
        used = min(len(tokens), self.room)
        end = next((i for i in range(used) if tokens[i] in stop), None)
        if end is not None:
            used, self.ended_by_room = end + 1, False
        self.tokens += tokens[:used]
        self.logprobs += logprobs[:used]
        self.entropies += entropies[:used]
        self.experts += islice(experts, used)
        self.room = 0 if end is not None else self.room - used

    def sample(self, version: int, *, entropy: bool, since: int = 0) -> Sample:
        return Sample(
            tokens_T=np.asarray(self.tokens[since:], dtype=np.int64),
            logprobs_T=np.asarray(self.logprobs[since:], dtype=np.float64),
            stop_reason=StopReason.LENGTH if self.ended_by_room else StopReason.EOS,
            policy_version=version,
            entropies_T=np.asarray(self.entropies[since:], dtype=np.float64) if entropy else None,
            experts_TLK=np.reshape(self.experts[since:], (-1, *self.experts[0].shape)) if self.experts else None,
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
        what, fix = f"prompt {index} must be a non-empty row of token ids", "correct the source that made it"
        raise BackendError(Problem(code="data.empty-prompt", what=what, fix=fix))
    if prompt_T.min() < 0 or prompt_T.max() >= vocabulary:
        what = f"prompt {index} holds a token id that is not among the model's {vocabulary}"
        fix = "use the tokenizer that belongs to the model"
        raise BackendError(Problem(code="model.other-tokenizer", what=what, fix=fix))
    if limit is not None and len(prompt_T) >= limit:
        what = f"prompt {index} has {len(prompt_T)} tokens, and the model's context of {limit} leaves no room to answer"
        fix = "use shorter prompts or a model with a longer context"
        raise ConfigError(Problem(code="data.prompt-too-long", where="[data]", what=what, fix=fix))


# A row is admitted only if all running ones have room for this many more tokens: preempting it would compute its prompt
# a second time.
HEADROOM = 64


class NoRoomError(Exception):
    """The pool cannot hold even the one remaining row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """Tokens to compute, after `past` ones in `blocks`; `copied`: a block to copy first, and its target.

    The slot `source` holds the state of the past ones; the state of all goes to `slot`.
    """

    tokens_T: Tokens
    past: int
    blocks: list[int]
    copied: tuple[int, int] | None = None
    source: int = 0
    slot: int = 0

    @classmethod
    def after(
        cls, base: Prefix | None, tokens_T: Tokens, blocks: list[int], slot: int, copied: tuple[int, int] | None
    ) -> Prefill:
        """Create the work for all tokens but the last, except the tokens of `base`."""
        past, source = (base.cached, base.slot) if base else (0, 0)
        return cls(tokens_T=tokens_T[past:-1], past=past, blocks=blocks, copied=copied, source=source, slot=slot)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefills:
    """Work before a segment: shared `prompts` first, then the `rest` of each row."""

    prompts: list[Prefill] = field(default_factory=list)
    rest: list[Prefill] = field(default_factory=list)


class Schedule:
    """Runs the oldest rows, as many as there are blocks for.

    Every running row is older than every waiting one. When blocks run out, cached rows of earlier turns are evicted
    first, then prompts without a running row. Then the youngest row is preempted: it keeps its tokens and waits. All
    decisions depend only on the rows and the sizes. `batch_tokens` bounds the number of rows times the longest. With
    `slots` every running row and every shared prompt holds one.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        blocks: Blocks,
        block_size: int,
        *,
        cache: PrefixCache | None,
        share: bool,
        batch_tokens: int | None = None,
        slots: Blocks | None = None,
    ) -> None:
        self.running: list[Row] = []
        self.waiting = deque(row for row in rows if row.room)
        # `computed_tokens` are the part of `prompt_tokens` that was not in the cache.
        self.preempted = self.prompt_tokens = self.computed_tokens = 0
        self._blocks, self._slots, self._size, self._cache = blocks, slots, block_size, cache
        self._share, self._batch_tokens = share, batch_tokens
        self._prompts: dict[bytes, Prefix] = {}
        self._unfinished = Counter(row.prompt_key for row in self.waiting if share)

    def advance(self, steps: int) -> Prefills:
        """Make room for `steps` more tokens in every running row, then admit as many waiting rows as fit.

        NoRoomError when not even the oldest row fits.
        """
        self._reserve(steps)
        fills = Prefills()
        if not self.waiting:
            return fills
        reserved = sum(self._reserved(row) for row in self.running)
        width = self._width(self.running)
        while self.waiting:
            row = self.waiting[0]
            width = max(width, self._width([row]))
            too_wide = self._batch_tokens is not None and width * (len(self.running) + 1) > self._batch_tokens
            if (self.running and too_wide) or not self._admit(row, steps, reserved, fills):
                break
            self.running.append(self.waiting.popleft())
            reserved += self._reserved(row)
        return fills

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.waiting.append(row)
            if self._share:
                self._unfinished[row.prompt_key] += 1

    def retire(self, row: Row) -> None:
        """Remove a finished row; its blocks go to the prefix cache, or become free."""
        self.running.remove(row)
        needed = self._count(row.cached)
        self._blocks.release(row.blocks[needed:])
        if self._cache is not None:
            self._cache.add(Prefix(tokens_T=row.prefix_T, blocks=row.blocks[:needed], slot=row.slot))
        else:
            self._release(row.blocks[:needed], row.slot)
        row.blocks, row.slot = [], 0
        self._unfinished[row.prompt_key] -= 1
        if self._unfinished[row.prompt_key] <= 0:
            self._forget(row.prompt_key)

    def _reserve(self, steps: int) -> None:
        if self._batch_tokens is not None:
            while len(self.running) > 1 and self._width(self.running) * len(self.running) > self._batch_tokens:
                self._preempt()
        place = 0
        while place < len(self.running):
            row = self.running[place]
            missing = self._count(row.cached + min(steps, row.room)) - len(row.blocks)
            if missing <= 0:
                place += 1
            elif missing <= self._blocks.free:
                row.blocks += self._blocks.take(missing)
            elif not self._evict_one():
                if len(self.running) > 1:
                    self._preempt()  # possibly this row itself
                elif self._prompts:
                    self._forget(next(iter(self._prompts)))
                else:
                    raise NoRoomError

    def _admit(self, row: Row, steps: int, reserved: int, fills: Prefills) -> bool:
        """Allocate the blocks of a row, leaving `reserved` for the running ones; False when it does not fit."""
        is_only = not self.running
        count = self._count(row.cached + min(steps if is_only else HEADROOM, row.room))
        before_last = len(row.prompt_T) - 1
        is_shared = self._unfinished[row.prompt_key] > 1
        while True:
            prompt = self._prompts.get(row.prompt_key)
            base = prompt or (self._cache.longest(row.prompt_T) if self._cache is not None else None)
            missing = count - (base.cached // self._size if base else 0)
            if is_shared and prompt is None:
                # the prompt gets its own blocks; the row shares all of them except the last, partial one
                missing += self._count(before_last) - before_last // self._size
            has_slots = self._slots is None or 1 + (is_shared and prompt is None) <= self._slots.free
            if missing + reserved <= self._blocks.free and has_slots:
                break
            if not self._evict_one():
                if not is_only:
                    return False
                if not is_shared:
                    raise NoRoomError
                is_shared = False  # without a copy of the partial block
        if is_shared and prompt is None:
            base = self._begin_prompt(row, base, fills)
        row.blocks, copied = self._fork(base, count)
        row.slot = self._take_slot()
        past = base.cached if base else 0
        fills.rest.append(Prefill.after(base, row.prefix_T, row.blocks, row.slot, copied))
        if not row.tokens:
            self.prompt_tokens += before_last
            self.computed_tokens += before_last - past
        row.rewind()
        return True

    def _begin_prompt(self, row: Row, base: Prefix | None, fills: Prefills) -> Prefix:
        blocks, copied = self._fork(base, self._count(len(row.prompt_T) - 1))
        past, slot = base.cached if base else 0, self._take_slot()
        fills.prompts.append(Prefill.after(base, row.prompt_T, blocks, slot, copied))
        self.computed_tokens += len(row.prompt_T) - 1 - past
        prefix = Prefix(tokens_T=row.prompt_T, blocks=blocks, slot=slot)
        self._prompts[row.prompt_key] = prefix
        return prefix

    def _fork(self, base: Prefix | None, count: int) -> tuple[list[int], tuple[int, int] | None]:
        """Take `count` blocks with the prefix `base`: its full blocks are shared, its partial last one is copied."""
        if base is None:
            return self._blocks.take(count), None
        whole = base.cached // self._size
        fresh = self._blocks.take(count - whole)
        self._blocks.share(base.blocks[:whole])
        copied = (base.blocks[whole], fresh[0]) if base.cached % self._size else None
        return [*base.blocks[:whole], *fresh], copied

    def _preempt(self) -> None:
        row = self.running.pop()
        self._release(row.blocks, row.slot)
        row.blocks, row.slot = [], 0
        self.waiting.appendleft(row)
        self.preempted += 1

    def _evict_one(self) -> bool:
        if self._cache is not None and self._cache.drop_oldest():
            return True
        used = {row.prompt_key for row in self.running}
        idle = next((key for key in self._prompts if key not in used), None)
        if idle is not None:
            self._forget(idle)
        return idle is not None

    def _forget(self, key: bytes) -> None:
        prompt = self._prompts.pop(key, None)
        if prompt is not None:
            self._release(prompt.blocks, prompt.slot)

    def _take_slot(self) -> int:
        return self._slots.take(1)[0] if self._slots is not None else 0

    def _release(self, blocks: Iterable[int], slot: int) -> None:
        self._blocks.release(blocks)
        if self._slots is not None:
            self._slots.release([slot])

    def _reserved(self, row: Row) -> int:
        return max(0, self._count(row.cached + min(HEADROOM, row.room)) - len(row.blocks))

    def _width(self, rows: Iterable[Row]) -> int:
        return self._size * self._count(max((row.cached + min(HEADROOM, row.room) for row in rows), default=0))

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._size)


def enough_tokens(rows: Sequence[Row], pool_tokens: int, *, share: bool, keep_rows: bool) -> int:
    """Return the size of a pool in which these rows run at once to their full length: `pool_tokens` if it is enough.

    Another pool means recording every CUDA graph again. A new one has room for all rows at the length of the longest,
    and for the partial last block of each prompt: 128 rows of 256 + 1,024 tokens of a 4B model take 24 GB where 80 % of
    a free H100 are 57. As groups share their prompts, that leaves room for the longer prompts of later steps. Rows of
    episodes grow from turn to turn, so their pool is twice as large.
    """
    groups = Counter(row.prompt_key for row in rows)
    shared = {key: share and count > 1 for key, count in groups.items()}
    prompts = {row.prompt_key: len(row.prompt_T) - 1 for row in rows}
    needed = sum(_blocks(prompts[key]) for key in groups if shared[key])
    for row in rows:
        needed += _blocks(row.cached + row.room) - shared[row.prompt_key] * (prompts[row.prompt_key] // BLOCK_SIZE)
    if needed * BLOCK_SIZE <= pool_tokens:
        return pool_tokens
    longest = max(row.cached + row.room for row in rows)
    return (1 + keep_rows) * (len(rows) * _blocks(longest) + len(groups)) * BLOCK_SIZE


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
