"""Engine `pytorch`: samples all completions of a step in one continuous batch, from the trained weights."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrain.api import (
    Deliver,
    Feed,
    NonFiniteError,
    OutOfMemoryError,
    PhaseProgress,
    PluginContext,
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
)
from retrain_local.attention.pages import shared_heads
from retrain_local.decoder import Decoder, Shape
from retrain_local.memory.limits import free_memory, is_out_of_memory
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.model.pair import LocalPolicy
from retrain_local.model.states import Mixed, StepMix
from retrain_local.sampling.cache import KEPT_ROWS, Cache, budget_slots, budget_tokens
from retrain_local.sampling.decode import Batch, Graphs, PagedAttention, bucket, decode_step
from retrain_local.sampling.draw import draw_for, draw_tokens
from retrain_local.sampling.gathered_decoding import GatheredDecoding
from retrain_local.sampling.schedule import NoRoomError, Prefill, Row, Schedule, enough_tokens, new_rows

if TYPE_CHECKING:
    from retrain_local.attention.select_kernels import Kernels
    from retrain_local.sampling.plain_decoding import PlainDecoding


LOG = logging.getLogger("retrain")
HandOver = Callable[[Row], None]
AfterSegment = Callable[[Schedule], None]
# Tokens decoded between two checks for finished rows: a check waits for the GPU, and a finished row is computed until
# then.
SEGMENT = 8


def create_engine(context: PluginContext, policy: LocalPolicy) -> PytorchEngine:
    """Create the engine; finished rows stay in the prefix cache where an environment may continue them."""
    from retrain_local.attention.select_kernels import kernels_for

    config, sampler = context.config, policy.sampler
    given = float(config.backend.options.get("cache_gb", 0.0))  # `context.params` are the engine's
    share = config.inference.prefix_caching
    return PytorchEngine(
        policy,
        kernels_for(config, policy.device, sampler.dtype, sampler.shape, exact=False),  # no backward pass here
        prefix_caching=share,
        keep_rows=share and bool(config.environment.provider),
        cache_dtype=config.inference.kv_cache_dtype,
        cache_bytes=int(given * 2**30) or None,
        check_stop=context.check_stop,
        progress=context.sampling_progress,
    )


@dataclass(slots=True)
class EngineCounters:
    """Counts since the last call of `metrics`."""

    steps: int = 0
    row_steps: int = 0
    preempted: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0


class PytorchEngine:
    """Continuous batching over a pool of keys and values, with an inverse-distribution draw per token.

    A completion depends only on its prompt, its seed and the weights, not on the rest of its batch (up to rounding of
    batched matrix products). The composition of batches depends on the requests since the last `publish` and on the
    size of the pool, a part of checkpoints. Rows that outgrow the pool are preempted and resumed later; each time
    memory runs out, the pool is halved. Kernels read a pool that is allocated at once, no larger than a call needs.
    """

    delivers_early = True

    def __init__(
        self,
        policy: LocalPolicy,
        kernels: Kernels,
        *,
        prefix_caching: bool = True,
        keep_rows: bool = False,
        cache_dtype: str = "auto",
        cache_bytes: int | None = None,
        check_stop: Callable[[], None] = lambda: None,
        progress: PhaseProgress | None = None,
    ) -> None:
        self._policy, self._kernels = policy, kernels
        self._decoder: Decoder = policy.sampler
        shape = self._decoder.shape
        sharing = (shared_heads(size.value_size) * size.kv_heads // shape.heads for size in shape.key_sizes)
        self._most_sharing = min(sharing, default=1)
        self._share, self._keep_rows, self._cache_dtype = prefix_caching, keep_rows, cache_dtype
        self._check_stop, self._progress = check_stop, progress or PhaseProgress()
        self._cache_bytes = cache_bytes
        self._cache: Cache | None = None
        # A mixer allocates tensors at every step, but a graph needs fixed addresses.
        self._graphs = Graphs(policy.device, records=not self._decoder.mixers)
        self._draw = draw_for(policy.device, self._decoder.dtype, self._decoder.shape.vocabulary)
        self._batches: dict[tuple[int, int], tuple[Batch, PagedAttention]] = {}
        self._gathered = _decoding(self._decoder, policy.device)
        # A stored state must end with the row's last token, so no step goes past it.
        has_state = bool(self._decoder.mixers) or self._decoder.tier == "plain"
        self._steps = 1 if has_state and keep_rows else SEGMENT
        self._batch_size = BatchSize(rows=0, width=0, drawn=0)
        self._counters = EngineCounters()

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """Return one list per request, one sample per seed; BackendError when the model yields non-finite logits."""
        policy = self._policy
        self.choose_pool()
        rows = new_rows(requests, params, policy.context_limit, self._decoder.shape.vocabulary)
        if self._cache is not None and not any(self._cache.prefixes.longest(request.prompt_T) for request in requests):
            # new episodes: a resumed run has not sampled the earlier ones, so its cache is empty too
            self._cache.prefixes.keep_youngest(0)
        if self._kernels.paged is not None and rows:
            limits, options = policy.limits, {"share": self._share, "keep_rows": self._keep_rows}
            limits.pool_tokens = enough_tokens(rows, limits.pool_tokens, **options)
            limits.pool_slots = max(limits.pool_slots, (1 + self._keep_rows) * (len(rows) + len(requests)))
        hand_over = partial(_hand_over, deliver, policy.version, params.entropy)
        while any(row.room for row in rows):
            self._finish(rows, params, hand_over, lambda schedule: None)
        samples: list[list[Sample]] = [[] for _ in requests]
        for row in rows:
            samples[row.request].append(row.sample(policy.version, entropy=params.entropy))
        return samples

    def stream(self, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed) -> None:
        policy, vocabulary = self._policy, self._decoder.shape.vocabulary
        self.choose_pool()
        rows = new_rows(requests, params, policy.context_limit, vocabulary)
        # The rows to come are unknown, so the pool is as large as memory permits.
        policy.limits.pool_tokens, policy.limits.pool_slots = policy.limits.cache_tokens, policy.limits.cache_slots
        # Agents continue older rows. A server that trains nothing never publishes, so nothing else bounds their number.
        if self._cache is not None:
            self._cache.prefixes.keep_youngest(KEPT_ROWS)
        known, sent = len(requests), Counter[Row]()

        def after(schedule: Schedule) -> None:
            nonlocal known
            for row in schedule.running:
                piece = row.sample(policy.version, entropy=params.entropy, since=sent[row])
                sent[row] = len(row.tokens)
                if not feed.take(row.request, row.place, piece, is_done=not row.room):
                    row.room = 0
            arrived = feed.more()
            added = new_rows(arrived, params, policy.context_limit, vocabulary, first=known)
            known += len(arrived)
            rows.extend(added)
            schedule.add(added)

        while any(row.room for row in rows):
            self._finish(rows, params, lambda row: None, after)

    def choose_pool(self) -> None:
        """Choose the pool's size at the first call, when a teacher and a reference have been loaded."""
        limits, given = self._policy.limits, self._cache_bytes
        if not limits.cache_tokens:
            is_copied = self._kernels.paged is None
            limits.cache_tokens = budget_tokens(self._decoder, self._cache_dtype, given, is_copied=is_copied)
        limits.cache_slots = limits.cache_slots or budget_slots(self._decoder, given)

    def publish(self) -> None:
        """Drop keys and values of finished rows: new weights make them invalid."""
        if self._cache is not None:
            self._cache.prefixes.keep_youngest(0)

    def free_cache(self) -> None:
        self._forget()
        free_memory(self._policy.device)

    def metrics(self) -> Mapping[str, float]:
        """Return the plugin's `METRICS` since the last call; nothing when nothing was sampled."""
        counted, self._counters = self._counters, EngineCounters()
        if not counted.steps:
            return {}
        return {
            "engine_prompt_reuse": 1.0 - counted.computed_tokens / max(1, counted.prompt_tokens),
            "engine_rows_put_aside": float(counted.preempted),
            "engine_live_rows_mean": counted.row_steps / counted.steps,
        }

    def close(self) -> None:
        self._forget()
        self._gathered.close()
        del self._decoder, self._gathered  # the model, which whoever holds a closed engine should not hold

    def _finish(self, rows: list[Row], params: SamplingParams, hand_over: HandOver, after: AfterSegment) -> None:
        """Finish all rows; some stay unfinished when the pool had to be halved."""
        self._batch_size = BatchSize(rows=0, width=0, drawn=0)
        is_done = False
        try:
            with torch.inference_mode():
                self._decode(self._opened(), rows, params, hand_over, after)
            is_done = True
            return
        except NoRoomError:
            width = max(row.cached for row in rows if row.room) + SEGMENT
            self._batch_size = BatchSize(rows=1, width=width, drawn=max(len(row.tokens) for row in rows) + SEGMENT)
            raise pool_too_small(self._policy.limits.cache_tokens, self._batch_size, self._policy.device) from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tokens = self._pool_tokens
            # A CPU commits the pool lazily, so halve the memory in use, not the memory reserved.
            if self._batch_size.rows and self._policy.device.type == "cpu":
                tokens = min(tokens, self._batch_size.rows * self._batch_size.width)
            tokens //= 2
            if tokens < max(BLOCK_SIZE, self._batch_size.width):
                decoder = self._decoder
                raise too_big_to_sample(self._batch_size, decoder.shape, decoder.dtype, decoder.device) from error
        finally:
            if not is_done:
                # The rows still own their blocks after an error.
                self._forget()
        # outside the except block, since the error keeps alive the tensors of every frame it passed through
        free_memory(self._policy.device)
        limits = self._policy.limits
        limits.cache_tokens = tokens
        if self._decoder.mixers:
            limits.cache_slots = max(2, min(limits.cache_slots, 2 * self._batch_size.rows) // 2)
        LOG.warning(
            "Out of memory in sampling, with %s on %s. At most %d tokens are kept from now on; completions that do "
            "not fit wait.",
            self._batch_size,
            self._policy.device,
            tokens,
        )

    def _forget(self) -> None:
        self._cache = None
        self._gathered.forget()
        self._batches.clear()
        self._graphs.forget()

    def _opened(self) -> Cache:
        limits = self._policy.limits
        slots = limits.cache_slots if self._kernels.paged is None else min(limits.cache_slots, limits.pool_slots)
        if self._cache is not None and (self._cache.tokens, self._cache.num_slots) != (self._pool_tokens, slots):
            self.free_cache()
        if self._cache is None:
            self._cache = Cache(self._decoder, self._pool_tokens, self._cache_dtype, slots)
        return self._cache

    @property
    def _pool_tokens(self) -> int:
        limits = self._policy.limits
        return limits.cache_tokens if self._kernels.paged is None else min(limits.cache_tokens, limits.pool_tokens)

    def _decode(
        self, cache: Cache, rows: list[Row], params: SamplingParams, hand_over: HandOver, after: AfterSegment
    ) -> None:
        schedule = Schedule(
            rows,
            cache.blocks,
            BLOCK_SIZE,
            cache=cache.prefixes if self._keep_rows else None,
            share=self._share,
            batch_tokens=None if self._kernels.paged else cache.tokens,
            slots=cache.slots,
        )
        while schedule.running or schedule.waiting:
            self._check_stop()
            fills = schedule.advance(self._steps)
            for part in (fills.prompts, fills.rest):
                self._gathered.fill(part, cache, self._kernels.packed, note=self._note)
            self._segment(cache, schedule.running, params)
            after(schedule)
            for row in [row for row in schedule.running if not row.room]:
                if self._keep_rows:
                    self._gathered.keep(cache, row)
                schedule.retire(row)
                hand_over(row)
        self._gathered.forget()
        self._counters.preempted += schedule.preempted
        self._counters.prompt_tokens += schedule.prompt_tokens
        self._counters.computed_tokens += schedule.computed_tokens

    def _note(self, fills: Sequence[Prefill]) -> None:
        self._batch_size = BatchSize(rows=len(fills), width=max(f.past + len(f.tokens_T) for f in fills), drawn=SEGMENT)

    def _segment(self, cache: Cache, rows: Sequence[Row], params: SamplingParams) -> None:
        steps = min(self._steps, max(row.room for row in rows))
        width = max(row.cached for row in rows) + steps
        self._batch_size = BatchSize(rows=len(rows), width=width, drawn=max(len(row.tokens) for row in rows) + steps)
        if self._kernels.paged is None or self._decoder.tier == "plain":
            decoded = self._gathered.segment(cache, rows, params, steps)
        else:
            decoded = [(rows, self._steps_paged(cache, rows, params, steps, width))]
        before = sum(len(row.tokens) for row in rows)
        for part, batch in decoded:
            tokens, logprobs, *entropies = batch.drawn(len(part), steps, entropy=params.entropy)
            experts: Any = [()] * len(part)
            if self._decoder.routers:
                experts = batch.experts_SBLK[:steps, : len(part)].transpose(0, 1).cpu().numpy()
            for place, row in enumerate(part):
                drawn = entropies[0][place] if entropies else []
                row.take(tokens[place], logprobs[place], drawn, experts[place], stop=self._policy.stop_ids)
                _refuse_non_finite(row, steps)
        self._counters.steps += steps
        count = sum(len(row.tokens) for row in rows) - before
        self._counters.row_steps += count
        self._progress.add(drawn=count)

    def _steps_paged(self, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int, width: int) -> Batch:
        """Decode in tensors at fixed addresses and of few different sizes, so that CUDA graphs can be reused."""
        assert self._kernels.paged is not None
        size, blocks = bucket(len(rows)), 1 << (-(-width // BLOCK_SIZE) - 1).bit_length()
        if (size, blocks) not in self._batches:
            batch = Batch.allocate(size, blocks, SEGMENT, self._policy.device, self._decoder.routers)
            self._batches[size, blocks] = batch, PagedAttention(cache.pool, batch, self._kernels.paged)
        batch, attend = self._batches[size, blocks]
        attend.is_sharing = batch.load(rows, params.temperature, steps, BLOCK_SIZE, most_sharing=self._most_sharing)
        draw = partial(draw_tokens, greedy=True) if params.greedy else self._draw
        mix = None
        if cache.states is not None:
            # Padding rows use the scratch slot.
            mix = StepMix(cache.states, [*(row.slot for row in rows), *([0] * (size - len(rows)))])
        given = attend if mix is None else Mixed(attend, mix)
        step = partial(decode_step, self._decoder, given, batch, entropy=params.entropy, draw_tokens=draw)
        for _ in range(steps):
            self._graphs.run((size, blocks, params.entropy, params.greedy, attend.is_sharing), step, batch.advanced)
        if mix is not None:
            mix.finish()
        return batch


def _decoding(decoder: Any, device: torch.device) -> GatheredDecoding | PlainDecoding:
    if decoder.tier != "plain":
        return GatheredDecoding(decoder, device)
    # Imported here, because transformers takes seconds; a plain decoder has imported it already.
    from retrain_local.sampling.plain_decoding import PlainDecoding

    return PlainDecoding(decoder)


def _hand_over(deliver: Deliver | None, version: int, entropy: bool, row: Row) -> None:
    if deliver is not None and not row.is_delivered:
        row.is_delivered = True
        deliver(row.request, row.place, row.sample(version, entropy=entropy))


def _refuse_non_finite(row: Row, last: int) -> None:
    # log-probabilities normalise over all logits, so a single NaN or +inf among them shows here
    if not np.isfinite(row.logprobs[-last:]).all():
        place = int(np.flatnonzero(~np.isfinite(row.logprobs))[0])
        what = f"the model gave non-finite logits at token {place} of a completion of prompt {row.request}"
        why = "its weights have diverged or are broken"
        fix = "lower [training] lr or set [optimizer] grad_clip_norm, and start from the last good checkpoint"
        raise NonFiniteError(Problem(code="run.non-finite-logits", what=what, why=why, fix=fix))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """`rows` of at most `width` tokens each; the longest completion has `drawn` tokens."""

    rows: int
    width: int
    drawn: int

    def __str__(self) -> str:
        if not self.rows:
            return "only keys and values"
        return f"one row of {self.width} tokens" if self.rows == 1 else f"{self.rows} rows of {self.width} tokens"


def too_big_to_sample(batch: BatchSize, shape: Shape, dtype: torch.dtype, device: torch.device) -> OutOfMemoryError:
    """Return the error when the batch does not fit and a pool of half the size could not hold one of its rows."""
    size = [2, shape.layers, batch.rows, shape.kv_heads, batch.width, shape.head_size]
    mebibytes = math.prod(size) * dtype.itemsize / 2**20
    what = f"sampling ran out of memory on {device} with {batch}"
    why = f"the biggest tensors: keys and values {size}, {mebibytes:.1f} MiB"
    fix = f"lower [training] max_tokens to {max(1, batch.drawn // 2)}, or use a smaller [model] model"
    return OutOfMemoryError(Problem(code="memory.batch-too-large", where="sampling", what=what, why=why, fix=fix))


def pool_too_small(tokens: int, batch: BatchSize, device: torch.device) -> OutOfMemoryError:
    """Return the error when a pool of `tokens` tokens cannot hold the one remaining row."""
    what = f"sampling ran out of memory on {device}: keys and values of {tokens} tokens fit, and {batch} is too long"
    smaller = f"lower [training] max_tokens to {max(1, batch.drawn // 2)}"
    fix = f"raise [backend.options] cache_gb, {smaller}, or use a device with more memory"
    return OutOfMemoryError(Problem(code="memory.cache-too-small", where="sampling", what=what, fix=fix))
