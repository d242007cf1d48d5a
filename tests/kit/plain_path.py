"""The gradient of a step by its definition: a row at a time, without padding, through transformers and PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain.api import TrainBatch


def plain_model(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return PeftModel.from_pretrained(model, str(adapter), is_trainable=True)


def own_logprobs(model: Any, tokens_T: Tensor, temperature: float = 1.0) -> Tensor:
    """Those of every token but the first, by one forward pass over the whole row."""
    logits_TV = model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits_TV, -1).gather(1, tokens_T[1:, None])[:, 0]


def own_gap(model: Any, batch: TrainBatch) -> float:
    """The largest distance of sampled log-probabilities from the model's own; NaN if one of them is."""
    gaps = []
    for row in batch.rows:
        with torch.no_grad():
            own_T = own_logprobs(model, torch.from_numpy(row.tokens_T)).numpy()
        gaps.append(np.abs(own_T - row.logprobs_T[1:])[row.action_T[1:]].max())
    return float(np.max(gaps))


def plain_gradient(batch: TrainBatch, model: Any, *, on_policy: bool = False) -> dict[str, Tensor]:
    """Of -(1 / N) sum exp(log p now - log p when sampled) A; with `on_policy` the ratios are 1."""
    total = torch.zeros(())
    for row in batch.rows:
        tokens_T = torch.from_numpy(row.tokens_T)
        logp = own_logprobs(model, tokens_T, batch.temperature)
        old = logp.detach() if on_policy else torch.from_numpy(row.logprobs_T)[1:]
        total = total - ((logp - old).exp() * torch.from_numpy(row.advantages_T * row.action_T)[1:]).sum()
    (total / batch.num_actions).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].float().flatten() for name in sorted(gradients)])


def gradient(backend: Any, batch: TrainBatch, max_tokens: int = 0) -> Tensor:
    """The gradient that the backend accumulates, flat in the order of the names, in packs of `max_tokens`."""
    trainer = backend._trainer
    trainer._limits.train_tokens = max_tokens
    trainer.accumulate(batch)
    found = joined({name: p.grad.clone() for name, p in trainer.parameters.items() if p.grad is not None})
    trainer.optimizer.zero_grad()
    trainer._limits.train_tokens = 0
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())
