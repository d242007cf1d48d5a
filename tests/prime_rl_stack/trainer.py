"""The training half as a process: takes what the ranks have received, steps on an adapter, broadcasts it.

`python trainer.py MODEL FOLDER --ranks 2 --seq-len 64`. It writes `FOLDER/trainer.jsonl`, one line per step, with the
largest difference between its own log-probabilities and those that came with the batch: it is tiny only if the
sampler had exactly the weights of the step before, and the same temperature.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.prime_rl_stack.wire_check import Row, read, rows_of

POLL_S = 0.02
PEFT_PREFIX = "base_model.model."


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--all-weights", action="store_true", help="broadcast the whole model, not an adapter")
    parser.add_argument("--silent-from", type=int, default=10**9, help="from here on, only once FOLDER/SPEAK is there")
    parser.add_argument("--half-written", type=int, default=-1, help="be slow about the files of this step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    model = base
    if not arguments.all_weights:
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=arguments.lr)
    broadcast(model, arguments.folder, 0, is_slow=False)  # the policy that it starts with
    (arguments.folder / "TRAINER_READY").touch()
    for step in count(1):
        train(model, optimizer, collect(arguments, step), step, arguments.folder)
        while step >= arguments.silent_from and not (arguments.folder / "SPEAK").exists():
            time.sleep(POLL_S)
        broadcast(model, arguments.folder, step, is_slow=step == arguments.half_written)
        shutil.rmtree(arguments.folder / "broadcasts" / f"step_{max(step - 2, 0)}", ignore_errors=True)


def collect(arguments: argparse.Namespace, step: int) -> list[Row]:
    """The rows of all ranks; each rank must have got as many micro-batches as the others."""
    files = [arguments.folder / "inbox" / f"step_{step}_rank_{rank}.bin" for rank in range(arguments.ranks)]
    while not all(file.exists() for file in files):
        time.sleep(POLL_S)
    ranks = [read(file.read_bytes(), seq_len=arguments.seq_len) for file in files]
    if len({len(batches) for batches in ranks}) != 1:
        (arguments.folder / "inbox" / "FAILED").write_text("ranks of different lengths", encoding="utf-8")
        raise SystemExit("ranks of different lengths")
    return [row for batches in ranks for batch in batches for row in rows_of(batch) if any(row.mask)]


def train(model: Any, optimizer: Any, rows: list[Row], step: int, folder: Path) -> None:
    """One policy-gradient step: the mean over all trained tokens of ratio times advantage."""
    total = sum(sum(row.mask) for row in rows)
    optimizer.zero_grad()
    gap, credits_seen = 0.0, set()
    for row in rows:
        tokens, mask = torch.tensor(row.tokens), torch.tensor(row.mask)
        logits = model(input_ids=tokens[None]).logits[0, :-1] / row.temperature
        logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][mask[1:]]
        sampled = torch.tensor(row.logprobs)[mask]
        advantages = torch.tensor(row.advantages)[mask]
        gap = max(gap, float((logprobs.detach() - sampled).abs().max()))
        credits_seen |= {round(float(a), 6) for a in advantages}
        (-((logprobs - sampled).exp() * advantages).sum() / total).backward()
    optimizer.step()
    line = {"step": step, "rows": len(rows), "tokens": total, "gap": gap, "distinct_advantages": len(credits_seen)}
    with (folder / "trainer.jsonl").open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")


def broadcast(model: Any, folder: Path, step: int, *, is_slow: bool) -> None:
    """Write the weights, and `STABLE` last; the names of an adapter's tensors are those of the model, not PEFT's.

    Slowly: half of the file first, for everybody to see.
    """
    target = folder / "broadcasts" / f"step_{step}"
    target.mkdir(parents=True)
    if is_slow:
        (target / "adapter_config.json").write_text("{", encoding="utf-8")
        (target / "adapter_model.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")
        time.sleep(1.0)
    model.save_pretrained(target)
    adapter = target / "adapter_model.safetensors"
    if adapter.exists():
        tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(adapter).items()}
        save_file(tensors, adapter, metadata={"format": "pt"})
    (target / "STABLE").touch()


if __name__ == "__main__":
    main()
