"""Correct rates of a tiny model: batched sampling at a temperature and exact scoring of the last box."""

from __future__ import annotations

import random
import re

import torch
from corpus import TASKS, Message
from problems import INSTRUCTION
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM, prompts: list[list[int]], *, temperature: float, limit: int, ends: list[int], seed: int
) -> list[list[int]]:
    """One completion per prompt, the end token included; prompts are padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    ids = torch.tensor([[ends[-1]] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache = DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    drawn: list[Tensor] = []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(limit):
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
        probabilities = (out.logits[:, -1].float() / temperature).softmax(-1)
        ids = torch.multinomial(probabilities, 1, generator=generator)
        drawn.append(ids[:, 0])
        done |= torch.isin(ids[:, 0], torch.tensor(ends))
        if bool(done.all()):
            break
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = positions[:, -1:] + 1
    return [_cut(row, ends) for row in torch.stack(drawn, dim=1).tolist()]


def _cut(row: list[int], ends: list[int]) -> list[int]:
    """The row up to and including its first end token."""
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row


def last_box(text: str) -> str:
    """What stands in the last `\\boxed{}` of a text, or nothing."""
    found = BOXED.findall(text)
    return found[-1].strip() if found else ""


def prompt_ids(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, task: str, temperature: float, count: int, seed: int
) -> tuple[float, float]:
    """Correct rate and mean completion length on fresh problems of a task, half of them with the instruction."""
    rng = random.Random(f"{task}-{seed}")
    problems = [TASKS[task](rng) for _ in range(count)]
    texts = [p.question + ("\n" + INSTRUCTION) * (i % 2) for i, p in enumerate(problems)]
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in texts]
    ends = list(model.generation_config.eos_token_id)
    rows = sample(model, prompts, temperature=temperature, limit=96, ends=ends, seed=seed)
    right = [last_box(tokenizer.decode(r)) == str(p.answer) for r, p in zip(rows, problems, strict=True)]
    return sum(right) / count, sum(map(len, rows)) / count
