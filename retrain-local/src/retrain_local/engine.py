"""Engine `pytorch`: samples every completion of a step together, from the weights that are trained."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.api import Deliver, NonFiniteError, PluginContext, Problem, Sample, SampleRequest, SamplingParams
from retrain_local.draw import draw_tokens
from retrain_local.head import LogitsAt, last_positions
from retrain_local.kv_cache import keep_rows, new_cache, right_align
from retrain_local.memory import Load, cache_shape, free_memory, is_out_of_memory, too_big_to_sample
from retrain_local.policy import LocalPolicy
from retrain_local.rows import Row, new_rows, uniforms

LOG = logging.getLogger("retrain")
HandOver = Callable[[Row], None]
SEGMENT = 8  # tokens between two looks at which rows have ended
COMPACT_BELOW = 0.75  # live share of a batch under which its dead rows are dropped
PREFILL_TOKENS = 2**16  # prompt tokens, padding included, read in one forward
CPU_CACHE_BYTES = 2**32
GPU_CACHE_SHARE = 0.6  # of the memory that the weights leave free


def create_engine(context: PluginContext, policy: LocalPolicy) -> PytorchEngine:
    """The engine for this policy; `[inference] prefix_caching` = false reads the prompt once per completion."""
    return PytorchEngine(policy, prefix_caching=context.config.value("inference.prefix_caching", True))


class PytorchEngine:
    """Batched decoding with an inverse-distribution draw per token.

    A completion depends on its prompt, its seed and the weights alone, whatever shares the batch with it (up to
    floating-point rounding of batched matrix products). When the keys and values of all rows outgrow `cache_bytes`,
    the last rows are put aside with their tokens and taken up again later; the same happens, with half the cache from
    then on, the first time that memory runs out.
    """

    def __init__(self, policy: LocalPolicy, *, prefix_caching: bool = True, cache_bytes: int | None = None) -> None:
        self._policy = policy
        self._share = prefix_caching
        self._logits_at = LogitsAt(policy.sampler)
        self._takes_positions = "position_ids" in inspect.signature(policy.sampler.forward).parameters
        self._load = Load(rows=0, width=0, actions=0)
        self._budget_tokens = (cache_bytes or _cache_budget(policy.device)) // _bytes_per_token(policy.sampler)

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        """One list per request, one sample per seed; BackendError when the model yields non-finite logits."""
        policy = self._policy
        vocabulary = policy.sampler.get_input_embeddings().num_embeddings
        rows = new_rows(requests, params, policy.context_limit, vocabulary)
        hand_over = partial(_hand_over, deliver, policy.version, params.entropy)
        while any(row.room for row in rows):
            self._finish(rows, params, hand_over)
        samples: list[list[Sample]] = [[] for _ in requests]
        for row in rows:
            samples[row.request].append(row.sample(policy.version, entropy=params.entropy))
        return samples

    def close(self) -> None:
        """Nothing is held beside the policy's own weights."""

    @property
    def _cache_tokens(self) -> int:
        return self._policy.limits.cache_tokens or self._budget_tokens

    def _finish(self, rows: list[Row], params: SamplingParams, hand_over: HandOver) -> None:
        """Finish all rows, or leave some unfinished because the cache had to be halved."""
        pending = deque(row for row in rows if row.room)
        try:
            with torch.inference_mode():
                while pending:
                    put_aside = self._decode(self._admit(pending), params, hand_over)
                    pending.extendleft(reversed(put_aside))
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._policy.limits.cache_tokens or self._load.rows < 2:
                raise too_big_to_sample(self._load, self._policy.sampler, self._policy.device) from error
        # out of the except block: its error keeps alive the tensors of every frame that it passed
        free_memory(self._policy.device)
        load, limits = self._load, self._policy.limits
        limits.cache_tokens = max(1, load.tokens // 2)
        LOG.warning(
            "Out of memory in sampling, with %d completions of %d tokens on %s. At most %d tokens are kept from now "
            "on; completions that do not fit wait.",
            load.rows,
            load.width,
            self._policy.device,
            limits.cache_tokens,
        )

    def _admit(self, pending: deque[Row]) -> list[Row]:
        """Take rows while their prompts fit one forward and a first stretch of tokens fits the cache; at least one."""
        wave: list[Row] = []
        prefixes: set[object] = set()
        longest = 0
        while pending:
            row = pending[0]
            longest = max(longest, len(row.prompt_T) + len(row.tokens))
            prefixes.add(self._prefix_key(row))
            crowded = (len(wave) + 1) * (longest + SEGMENT) > self._cache_tokens
            if wave and (crowded or len(prefixes) * longest > PREFILL_TOKENS):
                break
            row.rewind()
            wave.append(pending.popleft())
        return wave

    def _prefix_key(self, row: Row) -> object:
        return row.request if self._share and not row.tokens else id(row)

    def _decode(self, rows: list[Row], params: SamplingParams, hand_over: HandOver) -> list[Row]:
        """Finish these rows, except those that had to be put aside for want of memory, which are returned."""
        self._note_load(rows, max(len(row.prompt_T) + len(row.tokens) for row in rows))
        batch = _Batch(rows, *self._prefill(rows))
        put_aside: list[Row] = []
        while True:
            live = [i for i, row in enumerate(batch.rows) if row.room]
            fitting = max(1, self._cache_tokens // (batch.length + SEGMENT))
            put_aside = [*(batch.rows[i] for i in live[fitting:]), *put_aside]
            live = live[:fitting]
            if not live:
                return put_aside
            if len(live) <= COMPACT_BELOW * len(batch.rows) or fitting < len(batch.rows):
                batch.keep(live)
            self._note_load(batch.rows, batch.length)
            self._segment(batch, params)
            for row in batch.rows:
                hand_over(row)

    def _note_load(self, rows: list[Row], length: int) -> None:
        drawn = max(len(row.tokens) for row in rows) + SEGMENT
        self._load = Load(rows=len(rows), width=length + SEGMENT, actions=drawn)

    def _prefill(self, rows: list[Row]) -> tuple[Tensor, Any, Tensor]:
        """Read every distinct prefix once, right-padded, so that causality alone keeps padding out of sight.

        Returns the logits after each row's prefix, the cache with one left-padded row for each, and the padding.
        """
        firsts: dict[object, int] = {}
        for index, row in enumerate(rows):
            firsts.setdefault(self._prefix_key(row), index)
        order = {key: place for place, key in enumerate(firsts)}
        prefixes = [rows[index].prefix_T for index in firsts.values()]
        lengths = np.array([len(prefix_T) for prefix_T in prefixes])
        ids = np.zeros((len(prefixes), lengths.max()), dtype=np.int64)
        for place, prefix_T in enumerate(prefixes):
            ids[place, : len(prefix_T)] = prefix_T
        device = self._policy.device
        lengths_B, cache = torch.from_numpy(lengths).to(device), new_cache()
        inputs = {"input_ids": torch.from_numpy(ids).to(device), "past_key_values": cache, "use_cache": True}
        logits_BV = self._logits_at(*last_positions(lengths_B), **inputs)
        sources_R = torch.tensor([order[self._prefix_key(row)] for row in rows], device=device)
        pads_R = int(lengths.max()) - lengths_B[sources_R]
        right_align(cache, sources_R, pads_R)
        return logits_BV[sources_R], cache, pads_R

    def _segment(self, batch: _Batch, params: SamplingParams) -> None:
        """Draw up to `SEGMENT` tokens for every row and hand them over."""
        steps = min(SEGMENT, max(row.room for row in batch.rows))
        uniforms_BS = torch.from_numpy(uniforms(batch.rows, steps)).to(self._policy.device)
        draws = []
        for step in range(steps):
            if batch.last_B is not None:
                batch.logits_BV = self._forward(batch, batch.last_B)
            draw = draw_tokens(batch.logits_BV, params.temperature, uniforms_BS[:, step], entropy=params.entropy)
            batch.last_B = draw.tokens_B
            draws.append(draw)
        tokens = torch.stack([draw.tokens_B for draw in draws], dim=1).tolist()
        logprobs = torch.stack([draw.logprobs_B for draw in draws], dim=1).tolist()
        entropies = [draw.entropies_B for draw in draws if draw.entropies_B is not None]
        entropy_lists = torch.stack(entropies, dim=1).tolist() if entropies else [[] for _ in batch.rows]
        for row, *drawn in zip(batch.rows, tokens, logprobs, entropy_lists, strict=True):
            if row.room:
                row.take(*drawn, stop=self._policy.stop_ids)
                _refuse_non_finite(row)

    def _forward(self, batch: _Batch, tokens_B: Tensor) -> Tensor:
        """Logits after one more token in every row."""
        inputs: dict[str, Any] = {}
        if batch.padded:
            columns = torch.arange(batch.length + 1, device=tokens_B.device)
            inputs["attention_mask"] = (columns >= batch.pads_B[:, None]).long()
        if self._takes_positions:
            # rows that have ended ride along until the next compaction, perhaps past the last position there is
            limit = self._policy.context_limit or batch.length + 1
            inputs["position_ids"] = (batch.length - batch.pads_B)[:, None].clamp(max=limit - 1)
        model = self._policy.sampler
        output = model(
            input_ids=tokens_B[:, None], past_key_values=batch.cache, use_cache=True, return_dict=True, **inputs
        )
        return output.logits[:, -1]


class _Batch:
    """Rows that decode together: left-padded caches of one length, and the token each was given last."""

    def __init__(self, rows: list[Row], logits_BV: Tensor, cache: Any, pads_B: Tensor) -> None:
        self.rows = rows
        self.logits_BV = logits_BV
        self.cache = cache
        self.pads_B = pads_B
        self.padded = bool(pads_B.any())
        self.last_B: Tensor | None = None

    @property
    def length(self) -> int:
        """Cached positions per row, padding included."""
        return int(self.cache.get_seq_length())

    def keep(self, indices: list[int]) -> None:
        """Drop every row but these."""
        index_R = torch.tensor(indices, device=self.pads_B.device)
        keep_rows(self.cache, index_R)
        self.rows = [self.rows[i] for i in indices]
        self.logits_BV, self.pads_B = self.logits_BV[index_R], self.pads_B[index_R]
        self.last_B = None if self.last_B is None else self.last_B[index_R]


def _hand_over(deliver: Deliver | None, version: int, entropy: bool, row: Row) -> None:
    """Deliver a row that has ended, once."""
    if deliver is not None and not row.room and not row.is_delivered:
        row.is_delivered = True
        deliver(row.request, row.place, row.sample(version, entropy=entropy))


def _refuse_non_finite(row: Row) -> None:
    # log-probabilities are taken from the whole row of logits: one NaN or +inf among them shows here
    if not np.isfinite(row.logprobs).all():
        place = int(np.flatnonzero(~np.isfinite(row.logprobs))[0])
        raise NonFiniteError(
            Problem(
                what=f"the model gave non-finite logits at token {place} of a completion of prompt {row.request}",
                why="its weights have diverged or are broken",
                fix="lower [training] lr or set [optimizer] grad_clip_norm, and start from the last good checkpoint",
            )
        )


def _bytes_per_token(model: Any) -> int:
    layers, heads, size = cache_shape(model)
    return int(2 * layers * heads * size * model.dtype.itemsize)


def _cache_budget(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_CACHE_BYTES
    # from the card's size and not from what happens to be free now: the same run batches the same way again
    total = torch.cuda.get_device_properties(device).total_memory
    return int(GPU_CACHE_SHARE * (total - torch.cuda.memory_allocated(device)))
