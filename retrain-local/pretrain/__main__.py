"""`python retrain-local/pretrain --out DIR`: learn the tokenizer, train the model, write both, measure them."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import torch
from corpus import TASKS, conversations
from measure import measure
from speech import FINAL
from tokenizer import END, STOP, learn_tokenizer, save_tokenizer
from train import Plan, train
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

CORPUS_FOR_MERGES = 20_000
MEASURED = 1000


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights (stored as bf16, loaded as fp32), configurations and tokenizer."""
    ends = tokenizer.convert_tokens_to_ids([END, STOP])
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[-1], do_sample=False)
    model.config._name_or_path = ""
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def report(folder: Path) -> None:
    """Load the written folder as any user would and print its correct rates."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {size:.2f} MB, {len(tokenizer)} tokens")
    for task in TASKS:
        rates = [
            measure(model, tokenizer, task=task, temperature=temperature, count=MEASURED, seed=1)
            for temperature in (1.0, 0.3)
        ]
        (warm, length), (cool, _) = rates
        print(f"{task:12s} correct {warm:.3f} at temperature 1, {cool:.3f} at 0.3; {length:.1f} tokens")


def main() -> None:
    """Make the model in the given folder."""
    parser = argparse.ArgumentParser(description="Make the tiny model.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    began = time.monotonic()
    sampled = itertools.islice(conversations(FINAL, options.seed), CORPUS_FOR_MERGES)
    tokenizer = learn_tokenizer(f"{m['role']}\n{m['content']}" for messages in sampled for m in messages)
    model = train(Plan(), tokenizer, options.seed)
    save(model, tokenizer, options.out)
    print(f"made in {time.monotonic() - began:.0f} s")
    report(options.out)


if __name__ == "__main__":
    main()
