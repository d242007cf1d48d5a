"""Continuous batching: the rows to decode next, and the blocks that they own."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from retrain.api import Tokens
from retrain_local.sampling.cache import Blocks, Prefix, PrefixCache
from retrain_local.sampling.rows import Row

HEADROOM = 64  # tokens that every running row must have room for before another one is admitted


class NoRoomError(Exception):
    """The pool cannot hold even the one remaining row."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefill:
    """Tokens to compute, after `past` ones in `blocks`; `copied`: a block to copy first, and its target."""

    tokens_T: Tokens
    past: int
    blocks: list[int]
    copied: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefills:
    """Work before a segment: shared `prompts` first, then the `rest` of each row."""

    prompts: list[Prefill] = field(default_factory=list)
    rest: list[Prefill] = field(default_factory=list)


class Schedule:
    """Runs the oldest rows, as many as there are blocks for.

    Every running row is older than every waiting one. When blocks run out, cached rows of earlier turns are evicted
    first, then prompts without a running row. Then the youngest row is preempted: it keeps its tokens and waits. All
    decisions depend only on the rows and the sizes. `batch_tokens` bounds the number of rows times the longest.
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
    ) -> None:
        self.running: list[Row] = []
        self.waiting = deque(row for row in rows if row.room)
        self.preempted = 0
        self.prompt_tokens = 0  # of all rows started, and how many of these had to be computed
        self.computed_tokens = 0
        self._blocks = blocks
        self._size = block_size
        self._cache = cache
        self._share = share
        self._batch_tokens = batch_tokens
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
            self._cache.add(Prefix(tokens_T=row.prefix_T, blocks=row.blocks[:needed]))
        else:
            self._blocks.release(row.blocks[:needed])
        row.blocks = []
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
            if missing + reserved <= self._blocks.free:
                break
            if not self._evict_one():
                if not is_only:
                    return False
                if not is_shared:
                    raise NoRoomError
                is_shared = False  # without a copy of the partial block
        if is_shared and prompt is None:
            base = self._begin_prompt(row, base, fills)
        self._begin(row, base, count, fills)
        return True

    def _begin_prompt(self, row: Row, base: Prefix | None, fills: Prefills) -> Prefix:
        blocks, copied = self._fork(base, self._count(len(row.prompt_T) - 1))
        past = base.cached if base else 0
        fills.prompts.append(Prefill(tokens_T=row.prompt_T[past:-1], past=past, blocks=blocks, copied=copied))
        self.computed_tokens += len(row.prompt_T) - 1 - past
        prefix = Prefix(tokens_T=row.prompt_T, blocks=blocks)
        self._prompts[row.prompt_key] = prefix
        return prefix

    def _begin(self, row: Row, base: Prefix | None, count: int, fills: Prefills) -> None:
        row.blocks, copied = self._fork(base, count)
        past = base.cached if base else 0
        fills.rest.append(Prefill(tokens_T=row.prefix_T[past:-1], past=past, blocks=row.blocks, copied=copied))
        if not row.tokens:
            self.prompt_tokens += len(row.prompt_T) - 1
            self.computed_tokens += len(row.prompt_T) - 1 - past
        row.rewind()

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
        self._blocks.release(row.blocks)
        row.blocks = []
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
            self._blocks.release(prompt.blocks)

    def _reserved(self, row: Row) -> int:
        return max(0, self._count(row.cached + min(HEADROOM, row.room)) - len(row.blocks))

    def _width(self, rows: Iterable[Row]) -> int:
        return self._size * self._count(max((row.cached + min(HEADROOM, row.room) for row in rows), default=0))

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._size)
