"""One optimizer step on the adapter."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.api import (
    ActionRow,
    BackendError,
    Config,
    Floats,
    NonFiniteError,
    Problem,
    TrainBatch,
    TrainReport,
    TrainRow,
)
from retrain_local.head import LogitsAt
from retrain_local.lora import trainable
from retrain_local.loss import LossSettings, policy_loss, selected_logprobs
from retrain_local.memory import Load, MemoryLimits, free_memory, is_out_of_memory, too_big_to_train
from retrain_local.microbatch import MicroBatch, check_rows, last_action, micro_batches

LOG = logging.getLogger("retrain")
T = TypeVar("T")


class Trainer:
    """AdamW on the LoRA parameters with the loss of `[algorithm]`.

    `parts` forces a number of micro-batches. `recompute` trades time for memory by keeping one activation per layer
    and computing the others again in the backward pass; it does not change the gradient. A micro-batch that does not
    fit in memory is halved, and the step begins again, once per run; `limits` keeps that for later steps.
    """

    def __init__(
        self,
        peft: PeftModel,
        config: Config,
        device: torch.device,
        *,
        parts: int | None = None,
        recompute: bool = False,
        check_stop: Callable[[], None] = lambda: None,
        micro_batch_tokens: int = 0,
        limits: MemoryLimits | None = None,
    ) -> None:
        self._check_stop = check_stop
        self._micro_batch_tokens = micro_batch_tokens
        self._limits = limits or MemoryLimits()
        self._load = Load(rows=0, width=0, actions=0)
        self._fitting_tokens = 0
        self._device = device
        self._parts = parts
        self._model = peft.get_base_model()
        self._logits_at = LogitsAt(self._model)
        self.parameters = trainable(peft)
        self._loss = LossSettings.of(config)
        self._clip = config.optimizer.grad_clip_norm
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=config.training.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
            weight_decay=config.training.weight_decay,
        )
        if recompute:
            _recompute_activations(self._model)

    def step(self, batch: TrainBatch) -> TrainReport:
        """Gradient over all rows, then one update; BackendError, with nothing changed, on a non-finite number."""
        try:
            with _deterministic(self._device):
                loss, clipped, gaps_N = self._in_memory(partial(self.accumulate, batch))
                grad_norm = self._update(loss)
        except torch.OutOfMemoryError as error:
            what = f"the optimizer's update ran out of memory on {self._device}"
            raise BackendError(Problem(where="training", what=what, fix="lower [model] lora_rank")) from error
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return TrainReport.measured(loss=loss, grad_norm=grad_norm, gaps_N=gaps_N, clipped=clipped)

    def accumulate(self, batch: TrainBatch) -> tuple[float, int, Floats]:
        """Add the gradient of the step's loss to the parameters.

        Returns the loss, the number of clipped tokens and log rho = logp_trainer - logp_sampler of every action token.
        """
        vocabulary = self._model.get_input_embeddings().num_embeddings
        check_rows(batch.rows, vocabulary)
        if not batch.num_actions:
            what = "nothing to train on: no row of the batch has an action token"
            raise BackendError(Problem(what=what, fix="give at least one row with a token that the policy sampled"))
        loss, clipped, gaps = 0.0, 0, []
        for part in self._cut(batch.rows, vocabulary):
            self._load = Load(rows=part.ids_BT.shape[0], width=part.ids_BT.shape[1], actions=len(part.tokens_N))
            new_N = self._logprobs(part, batch.temperature)
            given = part.old_logprobs_N, part.advantages_N, batch.num_actions, self._loss, part.engine_logprobs_N
            part_loss, part_clipped = policy_loss(new_N, *given)
            part_loss.backward()
            loss += part_loss.item()
            self._fitting_tokens = max(self._fitting_tokens, self._load.tokens)
            clipped += int(part_clipped)
            self._check_stop()  # nothing has changed yet: the gradient is dropped by whoever catches it
            gaps.append((new_N.detach() - part.old_logprobs_N).double().cpu().numpy())
        return loss, clipped, np.concatenate(gaps)

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Log-probabilities of the action tokens as the loss would see them now, 0 elsewhere; no gradient is kept."""
        vocabulary = self._model.get_input_embeddings().num_embeddings
        found = [np.zeros(len(row.tokens_T)) for row in rows]
        asked = [_unscored(row) for row in rows]
        check_rows(asked, vocabulary)
        places = [place for place, row in enumerate(asked) if row.action_T.any()]
        places.sort(key=lambda place: last_action(asked[place]), reverse=True)  # as `micro_batches` does
        values_N = self._in_memory(partial(self._all_logprobs, asked, vocabulary, temperature))
        at = 0
        for place in places:
            action_T = asked[place].action_T
            count = int(np.count_nonzero(action_T))
            found[place][action_T] = values_N[at : at + count]
            at += count
        return found

    def _in_memory(self, work: Callable[[], T]) -> T:
        """Work on micro-batches, begun again once in half the memory; BackendError when that is not enough."""
        while True:
            try:
                return work()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self._limits.train_tokens or self._load.rows < 2:
                    raise too_big_to_train(self._load, self._fitting_tokens, self._model, self._device) from error
            # out of the except block: its error keeps alive the tensors of every frame that it passed
            self.optimizer.zero_grad(set_to_none=True)
            free_memory(self._device)
            self._halve()

    def _halve(self) -> None:
        load = self._load
        vocabulary = self._model.get_input_embeddings().num_embeddings
        self._limits.train_tokens = max(1, load.tokens // 2)
        self._limits.train_logits = max(1, load.actions // 2) * vocabulary
        LOG.warning(
            "Out of memory in training, with a micro-batch of %d rows of %d tokens on %s. Micro-batches hold %d tokens "
            "from now on, and the step is done again; the gradient is the same.",
            load.rows,
            load.width,
            self._device,
            self._limits.train_tokens,
        )

    def _cut(self, rows: Sequence[TrainRow], vocabulary: int) -> list[MicroBatch]:
        tokens, logits = self._limits.train_tokens or self._micro_batch_tokens, self._limits.train_logits
        sizes = {"max_tokens": tokens, "max_logits": logits}
        return micro_batches(rows, device=self._device, vocabulary=vocabulary, parts=self._parts, **sizes)

    def _all_logprobs(self, rows: Sequence[TrainRow], vocabulary: int, temperature: float) -> Floats:
        """Of all action tokens, in the order of the micro-batches."""
        found = [np.zeros(0)]
        with torch.inference_mode():
            for part in self._cut(rows, vocabulary):
                self._load = Load(rows=part.ids_BT.shape[0], width=part.ids_BT.shape[1], actions=len(part.tokens_N))
                found.append(self._logprobs(part, temperature).double().cpu().numpy())
        return np.concatenate(found)

    def _logprobs(self, part: MicroBatch, temperature: float) -> Tensor:
        # no attention mask: padding stands to the right, where a causal model never looks
        logits_NV = self._logits_at(part.rows_N, part.columns_N, input_ids=part.ids_BT, use_cache=False)
        return selected_logprobs(logits_NV, part.tokens_N, temperature)

    def _update(self, loss: float) -> float:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._diverged(loss)
        if self._clip > 0.0:
            torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clip, norm)
        self.optimizer.step()
        return grad_norm

    def _diverged(self, loss: float) -> NonFiniteError:
        what = f"the loss is {loss}"
        for name, p in self.parameters.items():
            if math.isfinite(loss) and p.grad is not None and not torch.isfinite(p.grad).all():
                what = f"the gradient of {name} is not finite"
                break
        why = "weights and optimizer are left as they were"
        return NonFiniteError(Problem(what=what, why=why, fix="lower [training] lr or set [optimizer] grad_clip_norm"))


def _unscored(row: ActionRow) -> TrainRow:
    zeros_T = np.zeros(len(row.tokens_T))
    return TrainRow(tokens_T=row.tokens_T, action_T=row.action_T, logprobs_T=zeros_T, advantages_T=zeros_T)


def _recompute_activations(model: Any) -> None:
    # the first name is that of recent versions of transformers, the second is older
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # it asks for this flag; its children stay in evaluation mode, without dropout


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On CUDA attention's backward pass adds in any order unless told not to; the CPU needs no telling."""
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
