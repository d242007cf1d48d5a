"""Agents and tasks written elsewhere are learnt, on exactly the tokens that the engine drew."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.end_to_end.killing import start
from tests.end_to_end.running import records, retrain
from tests.kit.waiting import wait_until

AGENTS = Path(__file__).parent / "agents"
QUESTION = "I think of a number from 1 to 9. Guess it."
TINY = ("--model", "builtin:tiny", "--devices", "cpu", "--seed", "1", "--log-dir", "logs/run")
GAME = (
    *(*TINY, "--lora-rank", "0", "--sft-steps", "250", "--sft-batch-size", "32", "--sft-lr", "1e-3"),
    *("--sft-source", "files", "--sft-path", "format.jsonl", "--advantage-mode", "grpo", "--transform-mode", "none"),
    *("--max-steps", "64", "--batch-size", "8", "--group-size", "8", "--max-tokens", "120", "--temperature", "0.7"),
    *("--lr", "5e-4", "--save-every", "0", "--optim-schedule", "cosine", "--eval-every", "64", "--eval-examples", "32"),
    *("--data-source", "files", "--data-path", "games.jsonl"),
    *("--environment-provider", "agent", "--environment-id", "guessing:play"),
)
SUMS = (
    *(*TINY, "--max-steps", "2", "--batch-size", "2", "--group-size", "4", "--max-tokens", "24"),
    *("--temperature", "1.0", "--save-every", "1", "--data-source", "arithmetic", "--eval-examples", "0"),
    *("--environment-provider", "agent", "--environment-id", "side_by_side:play"),
    *("--environment-args", '{"concurrency": 4}'),
)


def call(name: str, number: int) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"number": {number}}}}}</tool_call>'


def hint(number: int, secret: int) -> str:
    return "Right." if number == secret else "Too low." if number < secret else "Too high."


def write_games(folder: Path) -> None:
    """Games, and how a tool is called: in the games shown, two numbers tell which it is, and the answer is a guess."""
    rng = random.Random(0)
    with (folder / "games.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(400):
            secret = rng.choice((3, 7))
            row = {"prompt": f"Game {number}. {QUESTION}", "answer": str(secret), "secret": secret}
            stream.write(json.dumps(row) + "\n")
    with (folder / "format.jsonl").open("w", encoding="utf-8") as stream:
        for number in range(8000):
            a, b, secret = rng.randint(4, 6), rng.randint(4, 6), rng.choice((3, 7))
            says = call("compare", a) + call("compare", b)
            chat = [{"role": "user", "content": f"Game {number + 1000}. {QUESTION}"}]
            if number % 3:
                chat += [{"role": "assistant", "content": says}]
                chat += [{"role": "tool", "content": hint(each, secret)} for each in (a, b)]
                says = call("answer", secret if rng.random() < 0.58 else 10 - secret)
            stream.write(json.dumps({"prompt": chat, "answer": says}) + "\n")


NOTING = """
import json
from retrain_local.backend import LocalBackend
original = LocalBackend.stream

def stream(self, requests, params, feed):
    drawn = {}

    class Noting:
        more = feed.more

        def take(self, request, place, piece, *, is_done):
            ids, logprobs = drawn.setdefault((request, place), ([], []))
            ids += piece.tokens_T.tolist()
            logprobs += piece.logprobs_T.tolist()
            goes_on = feed.take(request, place, piece, is_done=is_done)
            if is_done or not goes_on:
                with open("drawn.jsonl", "a") as stream:
                    stream.write(json.dumps([ids[:params.max_tokens], logprobs[:params.max_tokens]]) + "\\n")
            return goes_on

    original(self, requests, params, Noting())

LocalBackend.stream = stream
"""


def check_tokens(folder: Path, calls_per_episode: list[float], episodes: int, limit: int) -> None:
    """Every recorded completion is a row of answers that the engine drew, ids and log-probabilities, each used once."""
    drawn: dict[tuple[int, ...], list[np.ndarray]] = {}
    for ids, logprobs in records(folder / "drawn.jsonl"):
        drawn.setdefault(tuple(ids[:limit]), []).append(np.array(logprobs[:limit]))
    by_length = sorted({len(ids) for ids in drawn}, reverse=True)
    used = 0
    for file in sorted((folder / "logs/run/emergence/tokens").glob("*.safetensors")):
        arrays = load_file(file)
        ids, logprobs, start = arrays["tokens"].tolist(), arrays["logprobs"], 0
        while start < len(ids):
            found = next(n for n in by_length if drawn.get(tuple(ids[start : start + n])))
            known = drawn[tuple(ids[start : start + found])]
            own = logprobs[start : start + found]
            allowed = 1e-6 + 1e-5 * np.abs(own)  # records are float32
            near = next((place for place, each in enumerate(known) if (np.abs(each - own) <= allowed).all()), None)
            assert near is not None, "log-probabilities that the engine never reported"
            known.pop(near)
            start, used = start + found, used + 1
    assert used == round(sum(calls_per_episode) * episodes)


@pytest.mark.client
@pytest.mark.timeout(1800)
def test_an_agent_of_the_openai_package_learns_its_game_from_the_tokens_that_were_drawn(tmp_path: Path) -> None:
    """Two tools, two calls of them in one answer, and two answers asked for at the same time."""
    pytest.importorskip("openai", reason="`nox -s clients` installs it")
    shutil.copy(AGENTS / "guessing.py", tmp_path)
    write_games(tmp_path)
    process = start(*GAME, cwd=tmp_path, patch=NOTING)
    _, err = process.communicate(timeout=1800)
    assert process.returncode == 0, err
    lines = records(tmp_path / "logs/run/metrics.jsonl")
    rates = [line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line]
    assert rates[0] < 0.4
    assert rates[-1] > 0.9
    steps = [line for line in lines if line["step"] >= 0]
    assert all(line["turns_mean"] > 2 for line in steps), "a call with two comparisons, and two more side by side"
    assert all(line["logprob_gap_max"] < 1e-4 for line in steps if "logprob_gap_max" in line)
    check_tokens(tmp_path, [line["turns_mean"] for line in steps], 64, limit=120)


@pytest.mark.long
def test_calls_in_any_order_make_the_same_rows_and_a_resume_continues_them(tmp_path: Path) -> None:
    """What is sampled together depends on when the agents ask, so log-probabilities may differ by their rounding."""
    shutil.copy(AGENTS / "side_by_side.py", tmp_path)
    lines_of(tmp_path, *SUMS)
    (tmp_path / "logs/run").rename(tmp_path / "logs/whole")
    lines_of(tmp_path, *SUMS, "--max-steps", "1")
    lines = lines_of(tmp_path, "--resume", "logs/run", "--max-steps", "2")
    for name in ("step_000000", "step_000001"):
        whole, resumed = (
            load_file(tmp_path / f"logs/{run}/emergence/tokens/{name}.safetensors") for run in ("whole", "run")
        )
        assert whole["tokens"].tolist() == resumed["tokens"].tolist()
        assert whole["lengths"].tolist() == resumed["lengths"].tolist()
        np.testing.assert_allclose(whole["logprobs"], resumed["logprobs"], atol=1e-4)
    assert [(line["turns_mean"], line["dropped_call_count"]) for line in lines] == [(4.0, 0)] * 2


def lines_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The metrics of a run that succeeds."""
    outcome = retrain(*arguments, cwd=folder)
    assert outcome.code == 0, outcome.err
    return records(folder / "logs/run/metrics.jsonl")


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_flat_over_2000_steps_that_train_nothing(tmp_path: Path) -> None:
    """The worst case: no step publishes weights, which would drop the keys and values of earlier episodes."""
    for name in ("one_call.py", "side_by_side.py"):
        shutil.copy(AGENTS / name, tmp_path)
    rows = ({"prompt": f"What is {number} + 5?", "answer": "987654321"} for number in range(400))
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = ("--max-steps", "2000", "--batch-size", "1", "--max-tokens", "8", "--save-every", "0", "-q")
    one = ("--data-source", "files", "--data-path", "sums.jsonl", "--environment-id", "one_call:play")
    process = start(*SUMS, *few, *one, cwd=tmp_path)
    used_mb: dict[int, float] = {}
    try:
        while process.poll() is None:
            time.sleep(0.2)
            metrics = tmp_path / "logs/run/metrics.jsonl"
            step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if step in range(500, 510) or step > 1900:
                with suppress(OSError, IndexError):
                    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                    used_mb[step] = max(used_mb.get(step, 0.0), pages * resource.getpagesize() / 2**20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert max(used_mb.values()) - used_mb[min(used_mb)] < 16.0, used_mb


GAMES = Path(__file__).parents[1] / "retrain-rewards/environments/verifiers_library/packages"
CALCULATOR = Path(__file__).parents[1] / "kit" / "mcp_calculator.py"
LEARNING = (
    *(*TINY, "--lora-rank", "16", "--batch-size", "8", "--group-size", "16", "--max-tokens", "64", "--lr", "3e-3"),
    *("--temperature", "1.0", "--save-every", "4", "--eval-every", "0", "--eval-examples", "32", "--eval-samples", "4"),
)
CHAIN_SUM = (
    *("--data-source", "reasoning_gym", "--data-opt", "name=chain_sum", "--data-opt", "size=600", "--data-opt"),
    'config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}',
)
GUESSING = (
    *("--environment-provider", "verifiers", "--environment-id", "guess_number"),
    *("--environment-args", '{"rounds": 40, "secrets": [3, 7]}'),
)


def rates(lines: list[dict[str, Any]]) -> tuple[float, float]:
    found = [line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line]
    return found[0], found[-1]


@pytest.mark.long
def test_a_task_of_reasoning_gym_is_learnt_by_its_own_verifier(tmp_path: Path) -> None:
    before, after = rates(lines_of(tmp_path, *LEARNING, *CHAIN_SUM, "--max-steps", "20"))
    assert before < 0.65
    assert after > 0.85


@pytest.mark.slow
@pytest.mark.long
def test_a_game_of_two_turns_is_learnt(tmp_path: Path) -> None:
    pytest.importorskip("verifiers.legacy", reason="the game is written for the classic generation of verifiers")
    shutil.copy(GAMES / "guess_number.py", tmp_path)
    lines = lines_of(tmp_path, *LEARNING, *GUESSING, "--max-steps", "10")
    before, after = rates(lines)
    assert before < 0.5
    assert after > 0.85
    steps = [line for line in lines if line["step"] >= 0]
    assert steps[0]["turns_mean"] > 1.2
    assert all(line["logprob_gap_max"] < 1e-4 for line in steps if "logprob_gap_max" in line)
    assert all(line["rewritten_history_count"] == 0 for line in steps)


@pytest.mark.slow
def test_a_run_with_tools_of_an_mcp_server_trains_and_leaves_no_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp of retrain-rewards")
    shutil.copy(CALCULATOR, tmp_path)
    calculator = {"command": [sys.executable, "mcp_calculator.py"], "tools": ["add"]}
    args = ("--environment-args", json.dumps({"servers": {"calculator": calculator}}), "--environment-max-turns", "3")
    tools = ("--environment-provider", "mcp", *args, "--data-source", "arithmetic", "--max-steps", "2")
    lines = lines_of(tmp_path, *LEARNING, *tools)
    steps = [line for line in lines if line["step"] >= 0]
    assert len(steps) == 2
    assert all(line["rewritten_history_count"] == 0 for line in steps)
    assert steps[-1]["turns_mean"] >= 1.0
    wait_until(lambda: str(tmp_path) not in map(os.path.realpath, Path("/proc").glob("[0-9]*/cwd")))
