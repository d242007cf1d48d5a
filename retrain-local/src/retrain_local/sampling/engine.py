"""Engine `pytorch`: samples every completion of a step together, from the weights that are trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from retrain.api import Deliver, NonFiniteError, PluginContext, Problem, Sample, SampleRequest, SamplingParams
from retrain_local.decoder import Decoder
from retrain_local.memory import free_memory, is_out_of_memory
from retrain_local.options import LocalOptions
from retrain_local.policy import LocalPolicy
from retrain_local.sampling.attends import Paged
from retrain_local.sampling.cache import Cache, budget_tokens
from retrain_local.sampling.copied import COLUMNS, Copied
from retrain_local.sampling.decode import Batch, decode_step
from retrain_local.sampling.fill import fill
from retrain_local.sampling.graphs import Graphs, bucket
from retrain_local.sampling.measured import Measured
from retrain_local.sampling.rows import Row, new_rows
from retrain_local.sampling.schedule import Fill, NoRoomError, Schedule
from retrain_local.sampling.shortage import Load, pool_too_small, too_big_to_sample
from retrain_local.sizes import BLOCK_SIZE, PREFILL_TOKENS

if TYPE_CHECKING:
    from retrain_local.attention.choose import Kernels

LOG = logging.getLogger("retrain")
HandOver = Callable[[Row], None]
SEGMENT = 8  # tokens between two looks at which rows have ended


def create_engine(context: PluginContext, policy: LocalPolicy) -> PytorchEngine:
    """The engine for this policy, by `[inference]` and `[backend.options] cache_gb`.

    Rows that have ended are kept where an environment may continue them.
    """
    from retrain_local.attention.choose import kernels_for

    config, sampler = context.config, policy.sampler
    given = context.params.cache_gb if isinstance(context.params, LocalOptions) else 0.0
    share = config.value("inference.prefix_caching", True)
    return PytorchEngine(
        policy,
        kernels_for(config, policy.device, sampler.dtype, sampler.shape, exact=False),  # nothing goes backward here
        prefix_caching=share,
        keep_rows=share and bool(config.value("environment.provider", "")),
        cache_dtype=config.value("inference.kv_cache_dtype", "auto"),
        cache_bytes=int(given * 2**30) or None,
        check_stop=context.check_stop,
    )


class PytorchEngine:
    """Continuous batching over a pool of keys and values, with an inverse-distribution draw per token.

    A completion depends on its prompt, its seed and the weights alone, whatever shares the batch with it (up to
    floating-point rounding of batched matrix products). What is batched when depends on the requests since the last
    `publish` and on the size of the pool, which is part of checkpoints. Rows that outgrow the pool wait with their
    tokens and are taken up again; each time that memory runs out, the pool is halved.
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
    ) -> None:
        self._policy = policy
        self._decoder: Decoder = policy.sampler
        self._kernels = kernels
        self._share = prefix_caching
        self._keep_rows = keep_rows
        self._cache_dtype = cache_dtype
        self._check_stop = check_stop
        self._budget = budget_tokens(self._decoder, cache_dtype, cache_bytes, is_copied=kernels.paged is None)
        policy.limits.cache_tokens = policy.limits.cache_tokens or self._budget
        self._cache: Cache | None = None
        self._graphs = Graphs(policy.device)
        self._batches: dict[tuple[int, int], tuple[Batch, Paged]] = {}
        self._copied: Copied | None = None
        self._load = Load(rows=0, width=0, drawn=0)
        self._measured = Measured()

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """One list per request, one sample per seed; BackendError when the model yields non-finite logits."""
        policy = self._policy
        rows = new_rows(requests, params, policy.context_limit, self._decoder.shape.vocabulary)
        if self._cache is not None and not any(self._cache.kept.longest(request.prompt_T) for request in requests):
            self._cache.kept.clear()  # other episodes; a resumed run, which never saw the earlier ones, has none either
        hand_over = partial(_hand_over, deliver, policy.version, params.entropy)
        while any(row.room for row in rows):
            self._finish(rows, params, hand_over)
        samples: list[list[Sample]] = [[] for _ in requests]
        for row in rows:
            samples[row.request].append(row.sample(policy.version, entropy=params.entropy))
        return samples

    def publish(self) -> None:
        """Other weights have other keys and values: forget those of rows that have ended."""
        if self._cache is not None:
            self._cache.kept.clear()

    def make_room(self) -> None:
        """Give the pool's memory back; the next `sample` makes one of the same size."""
        self._forget()
        free_memory(self._policy.device)

    def metrics(self) -> Mapping[str, float]:
        """See `retrain_local.sampling.measured`."""
        measured, self._measured = self._measured, Measured()
        return measured.fields()

    def close(self) -> None:
        """Let go of the pool."""
        self._forget()

    def _finish(self, rows: list[Row], params: SamplingParams, hand_over: HandOver) -> None:
        """Finish all rows, or leave some unfinished because the pool had to be halved."""
        self._load = Load(rows=0, width=0, drawn=0)
        is_done = False
        try:
            with torch.inference_mode():
                self._decode(self._opened(), rows, params, hand_over)
            is_done = True
            return
        except NoRoomError:
            width = max(row.cached for row in rows if row.room) + SEGMENT
            self._load = Load(rows=1, width=width, drawn=max(len(row.tokens) for row in rows) + SEGMENT)
            raise pool_too_small(self._policy.limits.cache_tokens, self._load, self._policy.device) from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tokens = self._halved()
            if tokens < max(BLOCK_SIZE, self._load.width):
                raise self._too_big() from error
        finally:
            if not is_done:
                self._forget()  # whatever ended this early, its rows still own their blocks
        # out of the except block: its error keeps alive the tensors of every frame that it passed
        free_memory(self._policy.device)
        self._policy.limits.cache_tokens = tokens
        LOG.warning(
            "Out of memory in sampling, with %s on %s. At most %d tokens are kept from now on; completions that do "
            "not fit wait.",
            self._load,
            self._policy.device,
            tokens,
        )

    def _forget(self) -> None:
        self._cache = None
        self._copied = None
        self._batches.clear()
        self._graphs.forget()

    def _opened(self) -> Cache:
        limits = self._policy.limits
        limits.cache_tokens = limits.cache_tokens or self._budget  # a checkpoint of old may know none
        if self._cache is not None and self._cache.tokens != limits.cache_tokens:
            self.make_room()
        if self._cache is None:
            self._cache = Cache(self._decoder, limits.cache_tokens, self._cache_dtype)
        return self._cache

    def _halved(self) -> int:
        """Half the tokens that are in memory: the pool's, or on a CPU, where that is only promised, the batch's."""
        tokens = self._policy.limits.cache_tokens
        if self._load.rows and self._policy.device.type == "cpu":
            tokens = min(tokens, self._load.tokens)
        return tokens // 2

    def _too_big(self) -> Exception:
        return too_big_to_sample(self._load, self._decoder.shape, self._decoder.dtype, self._policy.device)

    def _decode(self, cache: Cache, rows: list[Row], params: SamplingParams, hand_over: HandOver) -> None:
        schedule = Schedule(
            rows,
            cache.blocks,
            BLOCK_SIZE,
            kept=cache.kept if self._keep_rows else None,
            share=self._share,
            batch_tokens=None if self._kernels.paged else cache.tokens,
        )
        while schedule.running or schedule.waiting:
            self._check_stop()
            fills = schedule.advance(SEGMENT)
            for part in (fills.prompts, fills.rest):
                most_tokens = min(PREFILL_TOKENS, cache.tokens)
                fill(part, self._decoder, cache.pool, self._kernels.packed, most_tokens=most_tokens, note=self._note)
            self._segment(cache, schedule.running, params)
            for row in [row for row in schedule.running if not row.room]:
                schedule.retire(row)
                hand_over(row)
        self._copied = None
        self._measured.add(schedule)

    def _note(self, fills: Sequence[Fill]) -> None:
        self._load = Load(rows=len(fills), width=max(f.past + len(f.tokens_T) for f in fills), drawn=SEGMENT)

    def _segment(self, cache: Cache, rows: Sequence[Row], params: SamplingParams) -> None:
        """Draw up to `SEGMENT` tokens for every row and hand them over."""
        steps = min(SEGMENT, max(row.room for row in rows))
        width = max(row.cached for row in rows) + steps
        self._load = Load(rows=len(rows), width=width, drawn=max(len(row.tokens) for row in rows) + steps)
        if self._kernels.paged is None:
            batch = self._step_by_copy(cache, rows, params, steps, width)
        else:
            batch = self._step_by_graph(cache, rows, params, steps, width)
        found = [batch.tokens_SB, batch.logprobs_SB, *([batch.entropies_SB] if params.entropy else [])]
        tokens, logprobs, *entropies = (drawn_SB[:steps, : len(rows)].T.tolist() for drawn_SB in found)
        before = sum(len(row.tokens) for row in rows)
        for place, row in enumerate(rows):
            drawn = entropies[0][place] if entropies else []
            row.take(tokens[place], logprobs[place], drawn, stop=self._policy.stop_ids)
            _refuse_non_finite(row, steps)
        self._measured.steps += steps
        self._measured.row_steps += sum(len(row.tokens) for row in rows) - before

    def _step_by_copy(self, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int, width: int) -> Batch:
        batch = Batch.allocate(len(rows), -(-width // BLOCK_SIZE), steps, self._policy.device)
        batch.load(rows, params.temperature, steps, BLOCK_SIZE)
        if self._copied is None or not self._copied.continues(rows, steps):
            self._copied = None  # its memory, before the next one's is taken
            self._copied = Copied(cache.pool, rows, batch, max(steps, min(COLUMNS, max(row.room for row in rows))))
        for _ in range(steps):
            decode_step(self._decoder, self._copied, batch, entropy=params.entropy)
        self._copied.finish(batch.slots_SB)
        return batch

    def _step_by_graph(
        self, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int, width: int
    ) -> Batch:
        """In tensors that stay where they are, of few different sizes."""
        assert self._kernels.paged is not None
        size, blocks = bucket(len(rows)), 1 << (-(-width // BLOCK_SIZE) - 1).bit_length()
        if (size, blocks) not in self._batches:
            batch = Batch.allocate(size, blocks, SEGMENT, self._policy.device)
            self._batches[size, blocks] = batch, Paged(cache.pool, batch, self._kernels.paged)
        batch, attend = self._batches[size, blocks]
        batch.load(rows, params.temperature, steps, BLOCK_SIZE)
        step = partial(decode_step, self._decoder, attend, batch, entropy=params.entropy)
        for _ in range(steps):
            self._graphs.run((size, blocks, params.entropy), step, batch.advanced)
        return batch


def _hand_over(deliver: Deliver | None, version: int, entropy: bool, row: Row) -> None:
    """Hand a row that has ended to `deliver`, once."""
    if deliver is not None and not row.is_delivered:
        row.is_delivered = True
        deliver(row.request, row.place, row.sample(version, entropy=entropy))


def _refuse_non_finite(row: Row, last: int) -> None:
    # log-probabilities are taken from the whole row of logits: one NaN or +inf among them shows here
    if not np.isfinite(row.logprobs[-last:]).all():
        place = int(np.flatnonzero(~np.isfinite(row.logprobs))[0])
        raise NonFiniteError(
            Problem(
                what=f"the model gave non-finite logits at token {place} of a completion of prompt {row.request}",
                why="its weights have diverged or are broken",
                fix="lower [training] lr or set [optimizer] grad_clip_norm, and start from the last good checkpoint",
            )
        )
