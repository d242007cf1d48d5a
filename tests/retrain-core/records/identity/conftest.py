"""A project of one file per kind of input, and a run of it that a signal stops."""

import json
import sys

import pytest

REWARD = '''"""Rewards."""
from mine.helpers import first_word


def make(context):
    return Right()


class Right:
    def score(self, example, text):
        from retrain.api import Score
        return Score.of(float(first_word(text) == example.reference))
'''
HELPERS = """def first_word(text):
    return text.split()[0] if text.split() else ""
"""
TRANSFORM = """from retrain.advantages import TransformOutput


def by_length(ctx):
    return TransformOutput(token_advs=[a + 0.0 * u for a, u in zip(ctx.advantages_G, ctx.uncertainties_G)])
"""
ADVANTAGE = """def centred(rewards_G):
    mean = sum(rewards_G) / len(rewards_G)
    return [reward - mean for reward in rewards_G]
"""
STOPPING = """
import os, signal
from pathlib import Path
from retrain.api import hookimpl

@hookimpl
def retrain_groups_scored(groups):
    if groups.step == 2 and Path("stop").exists():
        Path("stop").unlink()
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def project(tmp_path):
    """`mine/`: a reward with a helper, a transform, an advantage; `tasks.jsonl`; `stop`, which stops the next run."""
    (tmp_path / "mine").mkdir()
    files = {"reward": REWARD, "helpers": HELPERS, "transform": TRANSFORM, "advantage": ADVANTAGE}
    for name, source in files.items():
        (tmp_path / "mine" / f"{name}.py").write_text(source)
    rows = ({"prompt": f"what is {a} plus {b} ?", "answer": str(a + b)} for a in range(3) for b in range(4))
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "stop").touch()
    return tmp_path


@pytest.fixture
def run(command, toys, distribution, tokenizer_folder, project):
    """`run("--lr", "1")`: a short run of the project, stopped at step 2 while the file `stop` is there; or a command.

    Each call imports the project anew, as a process of its own would.
    """
    distribution("retrain-stopping", {"stopping": STOPPING})
    base = [
        "--model",
        str(tokenizer_folder),
        "--backend",
        "toy",
        "--data-source",
        "files",
        "--data-path",
        "tasks.jsonl",
    ]
    base += ["--reward-type", "mine.reward.make", "--advantage-mode", "mine.advantage.centred"]
    base += ["--transform-mode", "mine.transform.by_length", "--uncertainty-kind", "toy_nll"]
    base += ["--max-steps", "3", "--batch-size", "2", "--group-size", "4", "--max-tokens", "3", "--seed", "1"]
    base += ["--data-instruction", "", "--temperature", "1.0", "--scoring-audit", "off"]

    def call(*arguments):
        for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
            del sys.modules[name]
        is_new = not arguments or (arguments[0].startswith("-") and "--resume" not in arguments)
        return command(*(base if is_new else ()), *arguments)

    return call
