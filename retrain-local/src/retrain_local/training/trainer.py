"""One optimizer step on the trained parameters, over packs of rows and over ranks."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from retrain.api import (
    ActionRow,
    BackendError,
    Config,
    Floats,
    NonFiniteError,
    PhaseProgress,
    Problem,
    Seeds,
    TopLogprobs,
    TrainBatch,
    TrainReport,
    TrainRow,
)
from retrain_local.attention.packed import MakeAttend, PaddedAttend, Spans
from retrain_local.decoder import TrainedDecoder, within
from retrain_local.devices.group import ALONE, Group, own_part
from retrain_local.devices.torch_devices import deterministic, pack_workers, packs_at_a_time
from retrain_local.memory.limits import MemoryLimits, free_memory, is_out_of_memory
from retrain_local.model.experts import ROUTING, Routing, count_experts, expert_metrics, fitted
from retrain_local.options import LocalOptions
from retrain_local.training import budget
from retrain_local.training.adamw import AdamW, add_gradients
from retrain_local.training.distil import SelfTeacher, distilled
from retrain_local.training.head import (
    logprobs_and_entropies,
    ranked_logprobs,
    selected_logprobs,
    softmax_of,
    squared_probs,
)
from retrain_local.training.packs import Pack, check_rows, lengths_of, pack_rows, share_rows, split_by_row, untrained
from retrain_local.training.regularisers import Marked, columns_of
from retrain_local.training.step_loss import NAMED, PolicyLoss

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PackResult:
    """Loss, clipping and gradients of one pack; `gradients` are in the order of the parameters."""

    loss: Tensor
    clipped: Tensor
    gaps_M: Tensor
    gradients: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    """One rank's part of a step: loss and gaps of its rows, the parameters that got a gradient, its limits."""

    loss: float
    clipped: int
    gaps_N: Floats
    experts: NDArray[np.int64] | int
    with_gradient: tuple[bool, ...]
    limits: MemoryLimits


class Trainer:
    """AdamW on the trained parameters with the loss of `[algorithm]`.

    Rows are packed without padding, with the prompt of a group stored once. Free memory decides how many tokens a pack
    holds and whether activations are recomputed in the backward pass; neither changes the gradient. When a pack does
    not fit, the step starts over, first with recomputation, then once with half the tokens; `limits` keeps that for
    later steps and for a resumed run. Unless `is_ordered`, a step on CUDA runs in PyTorch's slow deterministic mode.
    Each rank of `group` computes a share of the rows, and returns the same. With `replays_experts` the tokens of a
    mixture go to the experts of the rows, where these are known.
    """

    def __init__(
        self,
        decoder: TrainedDecoder,
        parameters: Mapping[str, nn.Parameter],
        config: Config,
        *,
        loss: PolicyLoss,
        options: LocalOptions | None = None,
        check_stop: Callable[[], None] = lambda: None,
        progress: PhaseProgress | None = None,
        limits: MemoryLimits | None = None,
        attend: MakeAttend = PaddedAttend,
        is_ordered: bool = False,
        replays_experts: bool = False,
        seeds: Seeds | None = None,
        group: Group = ALONE,
    ) -> None:
        self.parameters = dict(parameters)
        sizes = decoder.shape.parameters, decoder.device
        self._at_a_time = packs_at_a_time(*sizes)
        self._group = group
        # FSDP gathers one layer at a time, so all ranks have to compute the same layer.
        self._workers = pack_workers(*sizes) if decoder.is_reentrant and not group.shards else 1
        # FSDP keeps gathered weights for later passes, where inference tensors are not allowed.
        self._no_gradient = torch.no_grad if group.shards else torch.inference_mode
        self._options = options or LocalOptions()
        self._decoder = decoder
        self._check_stop = check_stop
        self._progress = progress or PhaseProgress()
        self._limits = limits or MemoryLimits()
        self._attend = attend
        self._softmax = softmax_of(decoder.device, decoder.dtype, decoder.shape.vocabulary)
        self._is_ordered = is_ordered or decoder.device.type == "cpu"
        self._failed_pack = budget.PackSize()
        self._fitting_tokens = 0
        self._experts: NDArray[np.int64] | int = 0
        self._counted: list[Tensor] = []  # by pack
        self._replays_experts = replays_experts and bool(decoder.routers) and decoder.routers.can_replay
        self._loss = loss
        self._seeds = seeds or Seeds(0)
        self.teacher = SelfTeacher(config.distil, decoder, self.parameters) if config.distil.teacher else None
        self._clip, self._rank = config.optimizer.grad_clip_norm, config.model.lora_rank
        self.optimizer = AdamW(
            self.parameters.values(),
            lr=config.training.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            decay=config.training.weight_decay,
        )

    def step(self, batch: TrainBatch) -> TrainReport:
        """Update once by the gradient over all rows; NonFiniteError, with nothing changed, on a non-finite number."""
        try:
            with nullcontext() if self._is_ordered else _deterministic():
                loss, clipped, gaps_N = self.accumulate(batch)
                grad_norm, lr = self._update(loss, batch.lr)
            if self.teacher is not None and not batch.loss:
                self.teacher.update()
        except torch.OutOfMemoryError as error:
            what = f"the optimizer's update ran out of memory on {self._decoder.device}"
            smaller = "lower [model] lora_rank" if self._rank else "train an adapter ([model] lora_rank = 32)"
            fix = f"{smaller}, or name a smaller model"
            raise BackendError(Problem(code="memory.update-too-large", where="training", what=what, fix=fix)) from error
        finally:
            self.optimizer.zero_grad()
        return TrainReport.measured(loss=loss, grad_norm=grad_norm, gaps_N=gaps_N, clipped=clipped, lr=lr)

    def accumulate(self, batch: TrainBatch) -> tuple[float, int, Floats]:
        """Add the gradient of the step's loss, over the rows of all ranks, to the parameters.

        Returns the loss, the number of clipped tokens and log rho = logp_trainer - logp_sampler of every action token.
        """
        batch = self._checked(batch)
        if batch.loss and batch.loss not in NAMED:
            what, fix = f"unknown loss {batch.loss!r} for a batch", f"use one of: {', '.join(NAMED)}"
            raise BackendError(Problem(code="backend.unknown-loss", what=what, fix=fix))
        if not batch.num_actions:
            what = "nothing to train on: no row of the batch has an action token"
            fix = "give at least one row with a token that the policy sampled"
            raise BackendError(Problem(code="backend.no-actions", what=what, fix=fix))
        marked, own = self._marked(batch), self._own(batch.rows)
        shares = self._shared(partial(self._accumulate_own, batch, marked, own))
        if self._group.size > 1:
            self._add_up(shares)
            self._limits.tighten(share.limits for share in shares)
        loss, clipped = sum(share.loss for share in shares), sum(share.clipped for share in shares)
        self._experts += sum(share.experts for share in shares)
        return loss, clipped, np.concatenate([share.gaps_N for share in shares])

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the experts since the last call; nothing for other models."""
        counts, self._experts = self._experts, 0
        return expert_metrics(counts, self._decoder.routers) if isinstance(counts, np.ndarray) else {}

    def gradient(
        self, batch: TrainBatch, rows: Sequence[int], loss: PolicyLoss
    ) -> tuple[NDArray[np.float32], float, int]:
        """Return the share of these rows in the gradient of the step's loss, flat, their loss and clipped tokens.

        Nothing changes. The shares of all rows add up to the gradient of the step. All rows at once, under the loss of
        the run, are computed in the packs of `step`, so they give its gradient bit by bit.
        """
        batch = self._checked(batch)
        own, self._loss = self._loss, loss
        try:
            with nullcontext() if self._is_ordered else _deterministic():
                share = self._retry_smaller(partial(self._accumulate_own, batch, self._marked(batch), rows))
            parts = (p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters.values())
            return np.concatenate([part.float().cpu().numpy().ravel() for part in parts]), share.loss, share.clipped
        finally:
            self._loss = own
            self.optimizer.zero_grad()

    def _checked(self, batch: TrainBatch) -> TrainBatch:
        shape = self._decoder.shape
        check_rows(batch.rows, shape.vocabulary)
        return replace(batch, rows=fitted(batch.rows, self._decoder.routers, shape.layers))

    def _own(self, rows: Sequence[TrainRow]) -> Sequence[int]:
        return range(len(rows)) if self._group.size == 1 else share_rows(rows, self._group.size)[self._group.rank]

    def _shared(self, work: Callable[[], T]) -> list[T]:
        """Return the results of `work` on every rank, for its rows."""
        if not self._group.shards:
            return self._group.gathered(lambda: self._retry_smaller(work))
        with self._group.in_step():
            own = self._retry_smaller(work)
        return self._group.gathered(lambda: own)

    def _rounds(self, packs: int) -> int:
        """Return the number of packs that this rank computes; with sharded weights the most of any rank."""
        return max(self._group.gathered(lambda: packs)) if self._group.shards else packs

    def _idle(self, *, is_trained: bool) -> None:
        """Pass one token without changing a gradient, for ranks that need this one's part of the weights."""
        token = torch.zeros(1, dtype=torch.int64, device=self._decoder.device)
        attend = self._attend(Spans.apart((1,)), self._decoder.device)
        with torch.set_grad_enabled(is_trained):
            logits = self._decoder.logits(self._decoder.hidden(token, token, attend))
            if is_trained:
                (logits.float().sum() * 0.0).backward()

    def _stop_between(self) -> None:
        """Let a stop take effect, with sharded weights on all ranks after the same pack."""
        if self._group.shards:
            self._group.gathered(self._check_stop)
        else:
            self._check_stop()

    def _accumulate_own(self, batch: TrainBatch, marked: Marked, own: Sequence[int]) -> _Share:
        rows = [batch.rows[number] for number in own]
        # Before the packs of the rows, because the weights change within it.
        given = partial(self._of_packs, of_pack=lambda pack: self._hidden(pack).float())
        taught = self.teacher.hidden(rows, given) if self.teacher is not None and not batch.loss else {}
        packs, losses, gaps, clipped = self._packs(rows), list[Tensor](), list[Tensor](), list[Tensor]()
        rounds, self._counted = self._rounds(len(packs)), []
        # The other updates of the step are expected to have as many packs as this one.
        if batch.update == 0:
            self._progress.begin("packs", len(packs) * batch.updates)
        else:
            self._progress.total = self._progress.done + len(packs) * (batch.updates - batch.update)
        gradients = partial(self._gradients, batch, rows, marked.of(own), taught)
        for pack, part in zip(packs, self._each(packs, gradients), strict=True):
            if not self._group.shards:
                add_gradients(self.parameters.values(), part.gradients)
            losses.append(part.loss)
            clipped.append(part.clipped)
            gaps.append(part.gaps_M)
            self._progress.add(1, tokens=pack.spans.num_tokens)
            # A stop between packs is safe: `step` drops the gradient, and nothing else has changed.
            self._stop_between()
        for _ in range(rounds - len(packs)):
            self._idle(is_trained=True)
            self._stop_between()
        return _Share(
            loss=float(torch.stack(losses).sum()) if losses else 0.0,
            clipped=int(torch.stack(clipped).sum()) if clipped else 0,
            gaps_N=torch.cat(gaps).cpu().numpy() if gaps else np.zeros(0),
            experts=torch.stack(self._counted).sum(0).cpu().numpy() if self._counted else 0,
            with_gradient=tuple(p.grad is not None for p in self.parameters.values()),
            limits=self._limits,
        )

    def _add_up(self, shares: Sequence[_Share]) -> None:
        """Give every rank the sum of all gradients; a parameter without one on any rank keeps none."""
        wanted = [any(found) for found in zip(*(share.with_gradient for share in shares), strict=True)]
        sums: list[Tensor] = []
        for p, is_wanted in zip(self.parameters.values(), wanted, strict=True):
            if is_wanted and p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad is not None:
                sums.append(p.grad)
        if not self._group.shards:
            self._group.add(sums)

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Return the log-probabilities of the action tokens, as the loss computes them; 0 for others, no gradient."""
        return self._of_actions(rows, lambda pack: self._logprobs(pack, temperature).double())

    def top_logprobs(self, rows: Sequence[ActionRow], temperature: float, top: int) -> list[TopLogprobs]:
        given = self._decoder.logits, self._decoder.shape.vocabulary, temperature, top

        def tops(pack: Pack) -> Tensor:
            return ranked_logprobs(self._hidden(pack), pack.tokens_M, *given)

        found = self._of_actions(rows, tops, width=1 + 2 * top)
        return [
            TopLogprobs(
                logprobs_T=values_TF[:, 0],
                top_logprobs_TK=values_TF[:, 1 : 1 + top],
                top_ids_TK=np.where(row.action_T[:, None], values_TF[:, 1 + top :], -1).astype(np.int64),
            )
            for row, values_TF in zip(rows, found, strict=True)
        ]

    def squared_probs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        given = self._decoder.logits, self._decoder.shape.vocabulary, temperature
        return self._of_actions(rows, lambda pack: squared_probs(self._hidden(pack), *given))

    def _of_actions(
        self, rows: Sequence[ActionRow], of_pack: Callable[[Pack], Tensor], *, width: int = 0
    ) -> list[Floats]:
        """Return the results of `of_pack` by row, `width` numbers for each action token (0: one); 0 for others."""
        found = [np.zeros((len(row.tokens_T), width) if width else len(row.tokens_T)) for row in rows]
        plain = untrained(rows)
        check_rows(plain, self._decoder.shape.vocabulary)
        for share in self._shared(partial(self._of_packs, plain, self._own(plain), of_pack)):
            for numbers, values_M in share:
                for number, values in zip(numbers, split_by_row(values_M, [rows[n] for n in numbers]), strict=True):
                    found[number][rows[number].action_T] = values
        return found

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Return the `logprobs` of the model that training began with; an adapter's base is not held twice."""
        with self._decoder.as_reference():
            return self.logprobs(rows, temperature)

    def _of_packs(
        self, rows: Sequence[TrainRow], own: Sequence[int], of_pack: Callable[[Pack], Tensor]
    ) -> list[tuple[list[int], Floats]]:
        """Return the row indices and the result of `of_pack` for each pack of this rank's share; no gradient."""

        def values(pack: Pack) -> Floats:
            with self._no_gradient():
                found: Floats = of_pack(pack).cpu().numpy()
            return found

        packs = self._packs([rows[number] for number in own])
        rounds = self._rounds(len(packs))
        numbers = ([own[number] for number in pack.rows] for pack in packs)
        found = list(zip(numbers, self._each(packs, values), strict=True))
        for _ in range(rounds - len(packs)):
            self._idle(is_trained=False)
        return found

    def _each(self, packs: Sequence[Pack], work: Callable[[Pack], T]) -> Iterator[T]:
        """Yield the result of `work` for every pack, in order; several packs run concurrently where that pays."""
        tracked = partial(self._tracked, work)
        if self._workers == 1 or len(packs) == 1:
            yield from map(tracked, packs)
            return
        with ThreadPoolExecutor(self._workers, thread_name_prefix="pack") as pool:
            try:
                yield from pool.map(tracked, packs)
            finally:
                pool.shutdown(cancel_futures=True)

    def _tracked(self, work: Callable[[Pack], T], pack: Pack) -> T:
        size = budget.PackSize(rows=len(pack.rows), tokens=pack.spans.num_tokens, longest=pack.longest)
        try:
            done = work(pack)
        except RuntimeError:
            self._failed_pack = size
            raise
        self._fitting_tokens = max(self._fitting_tokens, size.tokens)
        return done

    def _marked(self, batch: TrainBatch) -> Marked:
        policy = self._loss_of(batch)
        if not policy.has_marks:
            return Marked()
        # Before the first update a covariance takes the policy for the one that sampled. A loss that drops tokens looks
        # at their difference, unless a weight of the mismatch has taken it out of the ratio.
        is_moved = batch.update > 0 or (policy.spec.drops is not None and policy.mismatch is None)
        now = self.logprobs(batch.rows, batch.temperature) if is_moved else [row.logprobs_T for row in batch.rows]
        return policy.marked(batch, now, self._seeds)

    def _gradients(
        self, batch: TrainBatch, rows: Sequence[TrainRow], marked: Marked, taught: Mapping[int, Floats], pack: Pack
    ) -> _PackResult:
        policy, entropies_M, divergences_M, routers = self._loss_of(batch), None, None, self._decoder.routers
        given_NLK = pack.experts_NLK if self._replays_experts else None
        with within(ROUTING, routing := Routing(given_NLK=given_NLK) if routers else None):
            given = self._decoder.logits, self._decoder.shape.vocabulary, batch.temperature
            if self.teacher is not None and taught:
                new_M, divergences_M = self.teacher.compared(self._hidden(pack), taught, pack, *given)
            elif policy.regularisers.entropy:
                new_M, entropies_M = logprobs_and_entropies(self._hidden(pack), pack.tokens_M, *given)
            else:
                new_M = self._logprobs(pack, batch.temperature)
        if routing is not None:
            # Later updates of a step train another policy than the one that sampled.
            sampled_NLK = None if batch.update else pack.experts_NLK
            self._counted.append(count_experts(routers, routing, sampled_NLK, pack.sources.index_M))
        is_fixed = policy.is_fixed(batch)
        columns, denominator = columns_of(rows, pack, marked), policy.denominator(batch)
        loss, clipped = policy.of_pack(
            new_M, pack, denominator, columns=columns, entropies_M=entropies_M, is_fixed=is_fixed
        )
        if (table := policy.distil) is not None:
            own = distilled(table, new_M, pack, rows, divergences_M) / policy.sequences(batch)
            # Nothing of the policy loss at weight 1, even if it is not finite.
            loss = own if table.weight == 1.0 else torch.lerp(loss, own, table.weight)
        gradients: tuple[Tensor | None, ...] = ()
        if self._group.shards:
            # FSDP takes the mean over the ranks, and the loss is a sum over them.
            (loss * self._group.size).backward()
        else:
            gradients = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        sampler_M = pack.engine_logprobs_M if is_fixed else pack.behaviour_logprobs_M
        gaps_M = (new_M.detach() - sampler_M).double()
        return _PackResult(loss=loss.detach().double(), clipped=clipped, gaps_M=gaps_M, gradients=gradients)

    def _loss_of(self, batch: TrainBatch) -> PolicyLoss:
        return NAMED[batch.loss] if batch.loss else self._loss

    def _packs(self, rows: Sequence[TrainRow]) -> list[Pack]:
        decoder, limits = self._decoder, self._limits
        limits.packs_at_a_time = limits.packs_at_a_time or self._at_a_time
        # Chosen at the first step and kept, by a resumed run as well, so that packs and rounding stay the same.
        if not limits.pack_tokens:
            option, sizes = self._options.gradient_checkpointing, (decoder.shape, decoder.dtype, decoder.device)
            given = lengths_of(rows), self._workers
            plan = budget.plan_packs(*sizes, *given, checkpointing=option)
            limits.recompute, limits.pack_tokens, limits.kept_tokens = plan.recompute, plan.tokens, plan.kept_tokens
        max_tokens = limits.train_tokens or self._options.micro_batch_tokens or limits.pack_tokens
        packs = pack_rows(rows, device=decoder.device, max_tokens=max_tokens, multiple=limits.packs_at_a_time)
        largest = max((pack.spans.num_tokens for pack in packs), default=0)
        decoder.recompute = limits.recompute or 0 < limits.kept_tokens < largest
        return packs

    def _logprobs(self, pack: Pack, temperature: float) -> Tensor:
        given = self._decoder.logits, self._decoder.shape.vocabulary, temperature, self._softmax
        return selected_logprobs(self._hidden(pack), pack.tokens_M, *given, self._decoder.head_parameters)

    def _hidden(self, pack: Pack) -> Tensor:
        """Return the hidden states that the action tokens are predicted from, [M, hidden]."""
        attend = self._attend(pack.spans, self._decoder.device)
        return pack.sources.of(self._decoder.hidden(pack.ids_N, pack.positions_N, attend))

    def _retry_smaller(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, repeated with less when memory runs out; OutOfMemoryError at the end."""
        device = self._decoder.device
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # With shards the other ranks wait within the pack that failed, so this rank cannot start over.
                shards = self._group.shards
                is_auto = self._options.gradient_checkpointing == "auto"
                can_recompute = is_auto and not self._limits.recompute and not shards
                if not can_recompute and (shards or self._limits.train_tokens or self._failed_pack.rows < 2):
                    sizes = self._decoder.shape, self._decoder.dtype, device
                    raise budget.too_big_to_train(self._failed_pack, self._fitting_tokens, *sizes) from error
            # outside the except block, since the error keeps alive the tensors of every frame it passed through
            self.optimizer.zero_grad()
            free_memory(device)
            budget.shrink(self._limits, self._failed_pack, device, recompute=can_recompute)

    def _update(self, loss: float, lr: float | None) -> tuple[float, float]:
        gradients = [own_part(p.grad) for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._group.shards:
            squares = self._group.gathered(lambda: float(norm.double().square()))
            norm = torch.tensor(math.sqrt(sum(squares)), dtype=norm.dtype, device=norm.device)
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._diverged(loss)
        if self._clip > 0.0 and self._group.shards:
            torch._foreach_mul_(gradients, min(1.0, self._clip / (grad_norm + 1e-6)))
        elif self._clip > 0.0:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clip, norm)
        return grad_norm, self.optimizer.step(lr)

    def _diverged(self, loss: float) -> NonFiniteError:
        why, fix = "weights and optimizer are unchanged", "lower [training] lr or set [optimizer] grad_clip_norm"
        for name, p in self.parameters.items() if math.isfinite(loss) else ():
            if p.grad is not None and not torch.isfinite(own_part(p.grad)).all():
                what = f"the gradient of {name} is not finite"
                return NonFiniteError(Problem(code="run.non-finite-gradient", what=what, why=why, fix=fix))
        return NonFiniteError(Problem(code="run.non-finite-loss", what=f"the loss is {loss}", why=why, fix=fix))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Turn on PyTorch's deterministic mode, without a warning for each operation that has no such form."""
    # Without it PyTorch warns at every matrix product of this mode.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        with deterministic(warn_only=True):
            yield
