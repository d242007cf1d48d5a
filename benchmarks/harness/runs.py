"""A run of `retrain` as its user starts it: a configuration file, tasks and a reward, and the command."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

QUESTION = "What is {} + {}?\nPut your final answer in \\boxed{{}}."
PLAIN_PROMPT = 25  # tokens of a question with its chat template
LINES = "run/metrics.jsonl"
REWARD = '''"""Half of all answers are right, whatever they say: every group can teach something, at no cost."""

import zlib


def score(response, reference):
    return zlib.crc32(response.encode()) % 2
'''


def questions(count: int, prompt: int = PLAIN_PROMPT, seed: int = 0) -> list[dict[str, str]]:
    """Different sums of the kind that the built-in model knows, each of `prompt` tokens as its tokenizer counts.

    Digits in front make them longer: every digit is a token.
    """
    fill = "".join(str(at % 10) for at in range(prompt - PLAIN_PROMPT - 1))
    front = f"{fill} " if prompt > PLAIN_PROMPT else ""
    pairs = random.Random(seed).sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count)
    return [{"prompt": front + QUESTION.format(a, b), "answer": str(a + b)} for a, b in pairs]


def write_tasks(folder: Path, tasks: Sequence[Mapping[str, str]]) -> None:
    """Tasks and reward, which every contender reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    (folder / "half_right.py").write_text(REWARD, encoding="utf-8")


def write_config(file: Path, tasks: Path, device: str, tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A configuration with the tasks in folder `tasks`, and `tables` over it; returns the command to train with it."""
    content: dict[str, dict[str, Any]] = {
        "backend": {"backend": "local", "devices": "cpu" if device == "cpu" else "gpu:0"},
        "algorithm": {"advantage_mode": "grpo", "transform_mode": "none", "loss": "ppo"},
        "training": {"seed": 1, "temperature": 1.0, "lr": 1e-5, "save_every": 0},
        "data": {
            "source": "files",
            "path": str(tasks / "tasks.jsonl"),
            "prompt_key": "prompt",
            "answer_key": "answer",
            "instruction": "",
        },
        "reward": {"type": "custom", "custom_module": str(tasks / "half_right.py")},
        "scoring": {"audit": "off"},  # the reward is no verifier, and says so
        "logging": {"log_dir": "run"},
    }
    for name, table in tables.items():
        content[name] = content.get(name, {}) | dict(table)
    file.write_text(tomli_w.dumps(content), encoding="utf-8")
    return [sys.executable, "-m", "retrain", str(file)]
