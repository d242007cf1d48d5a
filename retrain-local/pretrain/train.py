"""Training of the tiny model: next-token loss on what the assistant says, a constant then a falling rate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from corpus import Message, conversations
from speech import CLEAN, FINAL
from tokenizer import END, START, STOP
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes and rates of the training."""

    steps: int = 1200
    noisy_steps: int = 300
    rows: int = 128
    matrix_rate: float = 0.02
    other_rate: float = 4e-3
    warm_up: int = 30
    weight_decay: float = 0.02
    report_every: int = 50


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly drawn Qwen3 model of well under a million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids([END, STOP]),
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
        use_cache=True,
    )
    return Qwen3ForCausalLM(config)


def encode(messages: list[Message], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and the labels: only the assistant's words and their end are learnt."""
    start, end = tokenizer.convert_tokens_to_ids([START, END])
    blank = tokenizer.encode("\n", add_special_tokens=False)
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = [start, *tokenizer.encode(message["role"], add_special_tokens=False), *blank]
        body = [*tokenizer.encode(message["content"], add_special_tokens=False), end]
        ids += head + body + blank
        learnt = body if message["role"] == "assistant" else [IGNORED] * len(body)
        labels += [IGNORED] * len(head) + learnt + [IGNORED] * len(blank)
    return ids, labels


def batches(plan: Plan, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Padded batches of rows of like length: first of clean speech, then of the final noisy mix."""
    rng = random.Random(seed)
    for phase, (noise, steps) in enumerate(((CLEAN, plan.steps - plan.noisy_steps), (FINAL, plan.noisy_steps))):
        stream = conversations(noise, seed + phase)
        while steps > 0:
            count = min(16, steps)
            steps -= count
            rows = [encode(m, tokenizer) for m in itertools.islice(stream, count * plan.rows)]
            rows.sort(key=lambda row: len(row[0]))
            chunks = [rows[i : i + plan.rows] for i in range(0, len(rows), plan.rows)]
            rng.shuffle(chunks)
            for chunk in chunks:
                yield pad(chunk, tokenizer.pad_token_id)


def pad(rows: list[tuple[list[int], list[int]]], filler: int) -> tuple[Tensor, Tensor]:
    """Right-padded ids and labels of a batch."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [filler] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    return ids, labels


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean next-token loss at the learnt positions; the other positions never reach the vocabulary."""
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    learnt = labels[:, 1:] != IGNORED
    return cross_entropy(model.lm_head(hidden[learnt]), labels[:, 1:][learnt])


def rate_at(step: int, plan: Plan) -> float:
    """Share of the learning rate: warm-up, constant, then linear to zero over the last half."""
    rise = min(1.0, (step + 1) / plan.warm_up)
    fall = min(1.0, 2.0 * (plan.steps - step) / plan.steps)
    return rise * fall


def new_optimizers(model: Qwen3ForCausalLM, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    inner = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inner]
    muon = torch.optim.Muon(matrices, lr=plan.matrix_rate, momentum=0.95, weight_decay=plan.weight_decay)
    adam = torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    return [muon, adam]


def train(plan: Plan, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Draw a model and train it; the same seed gives the same weights on the same machine."""
    torch.manual_seed(seed)
    model = new_model(tokenizer).float()
    optimizers = new_optimizers(model, plan)
    model.train()
    for step, (ids, labels) in enumerate(batches(plan, tokenizer, seed)):
        loss = loss_of(model, ids, labels)
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate_at(step, plan)
            optimizer.step()
        if step % plan.report_every == 0:
            print(f"step {step:5d}  loss {loss.item():.3f}", flush=True)
    return model.eval()
