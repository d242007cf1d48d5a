"""Does a policy learn from itself? `python benchmarks/self_distillation.py FOLDER`, ten minutes on two cores.

`builtin:tiny` cannot use a worked solution in its context, so a first run teaches it to repeat one ([sft]). From that
adapter `sdft` learns from demonstrations, and `sdpo` from right completions of its own. The held-out prompts are the
question only.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrain_local

INSTRUCTION = "\nPut your final answer in \\boxed{}."
TRIES, COPIES, PLAIN = 3, 1000, 250
COMMON = """
[model]
model = "builtin:tiny"
{adapter}
[backend]
devices = "cpu"
[data]
{data}
[reward]
type = "match"
[training]
seed = 1
batch_size = 8
group_size = 8
max_tokens = 64
temperature = 0.7
{training}
[eval]
examples = 64
samples = 2
every = 5
[logging]
log_dir = "logs/{name}"
{more}
"""
SFT = '[sft]\nsource = "files"\npath = "copies.jsonl"\nanswer = "worked"\nsteps = 160\nlr = 4e-3'
SHOWN = '[distil]\ntemplate = "{prompt}{solution}"\nsolution_template = "\\n\\nWorked: {solution}"'


def sums() -> list[tuple[str, int]]:
    stream, found = random.Random(1), dict[str, int]()
    while len(found) < 2600:
        sign, left = stream.choice("+-*"), stream.randint(0, 99)
        right = stream.randint(1, 9) if sign == "*" else stream.randint(0, 99)
        value = {"+": left + right, "-": left - right, "*": left * right}[sign]
        found[f"What is {left} {sign} {right}?"] = value
    return list(found.items())


def solved(tasks: Sequence[tuple[str, int]]) -> Iterator[tuple[str, str, str]]:
    """Yield each question with the model's first solution, and the first right one of `TRIES`, or ""."""
    folder = Path(retrain_local.__file__).parent / "tiny"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    for start in range(0, len(tasks), 256):
        some = tasks[start : start + 256]
        chats = [[{"role": "user", "content": question + INSTRUCTION}] for question, _ in some]
        given: Any = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
        inputs = tokenizer.apply_chat_template(chats, **given)
        outputs = model.generate(
            **inputs, max_new_tokens=48, do_sample=True, pad_token_id=0, num_return_sequences=TRIES
        )
        texts = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for at, (question, value) in enumerate(some):
            tries = texts[at * TRIES : (at + 1) * TRIES]
            right = [text for text in tries if text.endswith(f"\\boxed{{{value}}}")]
            yield question, tries[0], (right or [""])[0]


def write(file: Path, rows: Sequence[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tasks, stream = sums(), random.Random(3)
    found = list(solved(tasks))
    worked = [text for _, text, _ in found[:COPIES]]
    # Two of three solutions are of another question, so that they can only be repeated.
    shown = [worked[n] if n % 3 == 0 else stream.choice(worked) for n in range(COPIES)]
    copies = [(f"{question}\n\nWorked: {text}", text) for (question, _), text in zip(tasks, shown, strict=False)]
    copies += [(question, text) for question, text, _ in found[:PLAIN]]
    write(folder / "copies.jsonl", [{"prompt": prompt, "answer": "1", "worked": text} for prompt, text in copies])
    pairs = zip(tasks[COPIES:], found[COPIES:], strict=True)
    rows = [(question, value, text) for (question, value), (_, _, text) in pairs if text]
    shown_rows = [{"prompt": q, "answer": str(v), "privileged": f"Worked: {text}"} for q, v, text in rows]
    write(folder / "tasks.jsonl", shown_rows)
    own = {"adapter": 'adapter = "logs/copies"', "data": 'source = "files"\npath = "tasks.jsonl"'}
    steps = "lr = 2e-3\nmax_steps = 20"
    runs = {
        "copies": {"adapter": "", "data": 'source = "arithmetic"', "training": "lr = 1e-6\nmax_steps = 1", "more": SFT},
        "sdft": {**own, "training": steps, "more": '[algorithm]\nrecipe = "sdft"'},
        "sdpo": {**own, "training": steps, "more": f'[algorithm]\nrecipe = "sdpo"\n{SHOWN}'},
    }
    for name, keys in runs.items():
        (folder / f"{name}.toml").write_text(COMMON.format(name=name, **keys), encoding="utf-8")
        subprocess.run([sys.executable, "-m", "retrain", f"{name}.toml"], cwd=folder, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
