"""A new user's walk at a terminal: from a file of tasks in an empty folder to a model that transformers loads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.end_to_end.running import SCRIPT
from tests.end_to_end.terminal import converse

MOST_COMMANDS = 8
WALK: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    ("retrain init --model builtin:tiny --data tasks.jsonl --reward match", (), "Wrote retrain.toml"),
    ("retrain --max-steps 8 --batch-size 4", (), "Adapter saved to logs/tasks/adapter/final"),
    ("retrain eval logs/tasks --data other.jsonl", (), "logs/tasks (final)"),
    ("retrain chat logs/tasks --greedy", (("> ", "What is 12 + 30?\n"), ("> ", "/quit\n")), "boxed{"),
    ("retrain export logs/tasks --format transformers --out merged --dtype fp32", (), "logits differ by at most"),
)


def write_tasks(file: Path, count: int, seed: int) -> None:
    draw = random.Random(seed)
    people = ("Anna", "Ben", "Chen", "Dara")
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            a, b = draw.randint(1, 49), draw.randint(1, 49)
            text = f"{draw.choice(people)} has {a} apples and gets {b} more. What is {a} + {b}?"
            stream.write(json.dumps({"question": text, "answer": str(a + b)}) + "\n")


@pytest.mark.slow
def test_from_a_file_of_tasks_to_a_model_that_transformers_loads(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 200, seed=1)
    write_tasks(tmp_path / "other.jsonl", 12, seed=2)
    assert len(WALK) <= MOST_COMMANDS
    written = ""
    for command, exchange, shown in WALK:
        program, *arguments = command.split()
        assert program == SCRIPT.name
        code, printed = converse([str(SCRIPT), *arguments], exchange, cwd=tmp_path)
        assert code == 0, printed
        assert shown in printed, printed
        written += printed
        if arguments[0] == "init":
            as_written = (tmp_path / "retrain.toml").read_text(encoding="utf-8")
    assert (tmp_path / "retrain.toml").read_text(encoding="utf-8") == as_written  # nothing was edited
    for following in ("retrain chat logs/tasks", "retrain eval logs/tasks", "retrain export logs/tasks"):
        assert following in written  # the run itself said how to go on
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    chat = [{"role": "user", "content": "What is 12 + 30?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids)[:5] in written  # as in the chat
