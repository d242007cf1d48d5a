"""Plain training with transformers and PEFT: `python padded.py SETTINGS.json`; a line per step in `calls.jsonl`.

Rows are padded on the right to the longest of their pass, the logits of all positions are made, and the
log-probability of each completion token is taken from their softmax: what a loop of one page does. A pass that does
not fit is halved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from meter import Meter
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

IGNORED = -100


def main() -> None:
    """Load, attach the adapter, train on the same batch again and again."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    trainer = Padded(settings)
    meter = Meter("calls.jsonl", settings["device"])
    rows = settings["rows"]
    trainer.step(rows[: settings["warm_rows"]])
    for _ in range(settings["calls"]):
        meter.measure(lambda: trainer.step(rows), rows_per_pass=trainer.rows_per_pass)


class Padded:
    """A model with an adapter on every linear layer, and AdamW."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rows_per_pass = settings["rows_per_pass"]
        self._device = settings["device"]
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).to(self._device)
        if settings["recompute"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rank = settings["rank"]
        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        self._model = get_peft_model(model, adapter).train()  # activations are checkpointed in this mode only
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95))

    def step(self, rows: list[Any]) -> None:
        """One optimizer step on rows of (tokens, number of prompt tokens)."""
        while True:
            try:
                self._accumulate(rows)
                break
            except torch.OutOfMemoryError:
                if self.rows_per_pass == 1:
                    raise
                self.rows_per_pass //= 2
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _accumulate(self, rows: list[Any]) -> None:
        total = sum(len(tokens) - num_prompt for tokens, num_prompt in rows)
        for start in range(0, len(rows), self.rows_per_pass):
            part = rows[start : start + self.rows_per_pass]
            width = max(len(tokens) for tokens, _ in part)
            ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in part], device=self._device)
            labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
            for row, (tokens, num_prompt) in enumerate(part):
                labels[row, num_prompt : len(tokens)] = ids[row, num_prompt : len(tokens)]
                mask[row, : len(tokens)] = 1
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float()
            logprobs = torch.log_softmax(logits[:, :-1], dim=-1)
            wanted = labels[:, 1:]
            chosen = logprobs.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
            numbers = torch.arange(start, start + len(part), device=self._device)
            advantages = torch.where(numbers % 2 == 1, 1.0, -1.0)[:, None]
            ratios = (chosen - chosen.detach()).exp()
            ((ratios * advantages * (wanted != IGNORED)).sum() / -total).backward()


if __name__ == "__main__":
    main()
