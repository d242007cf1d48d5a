"""The whole command with an engine that is a server: a real process, a real model, real HTTP, and its faults."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.killing import BASE
from tests.end_to_end.running import SCRIPT, records, retrain
from tests.kit.tiny_server import start, tiny_serving
from tests.kit.waiting import wait_until

TINY = BUILTIN_MODELS["tiny"]
FEW = ("--batch-size", "2", "--group-size", "4", "--eval-examples", "0", "--save-every", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    return tmp_path


def through(url: str, *arguments: str) -> tuple[str, ...]:
    return ("--inference-engine", "vllm", "--inference-url", url, *FEW, *arguments)


def test_training_through_a_server_is_exact_at_every_step(folder: Path) -> None:
    with tiny_serving(TINY) as url:
        done = retrain(*through(url, "--max-steps", "3", "--temperature", "0.7"), cwd=folder)
    assert done.code == 0, done.err
    assert "vllm at http://127.0.0.1" in done.out
    assert "with this backend or engine the same seed does not give the same run" in done.out
    lines = records(folder / "logs/tiny/metrics.jsonl")
    assert len(lines) == 3
    for line in lines:
        assert line["probe_gap_max"] < 1e-4
        assert line["inference_retries"] == 0
    trained = [line for line in lines if line["loss"] is not None]
    assert trained
    for line in trained:
        assert line["logprob_gap_max"] < 1e-4
        assert line["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.long
def test_a_server_before_temperature_is_refused_or_recomputed(folder: Path) -> None:
    with tiny_serving(TINY, "--raw") as url:
        refused = retrain(*through(url, "--max-steps", "2", "--temperature", "0.7"), cwd=folder)
        assert refused.code == 2
        assert "--logprobs-mode processed_logprobs" in refused.err
        assert "Traceback" not in refused.err
        assert not (folder / "logs").exists()
        run = through(url, "--max-steps", "2", "--temperature", "0.7", "--inference-logprobs", "trainer")
        done = retrain(*run, cwd=folder)
    assert done.code == 0, done.err
    for line in records(folder / "logs/tiny/metrics.jsonl"):
        assert 0 < line["engine_gap_max"] < 1e-4
        assert line.get("logprob_gap_max", 0.0) < 1e-4


@pytest.mark.long
def test_the_importance_weight_is_that_of_the_engine(folder: Path) -> None:
    with tiny_serving(TINY) as url:
        run = ("--inference-logprobs", "trainer", "--tis-cap", "2.0", "--temperature", "0.7")
        done = retrain(*through(url, "--max-steps", "2", *run), cwd=folder)
    assert done.code == 0, done.err
    assert all(0 < line["engine_gap_mean"] < 1e-4 for line in records(folder / "logs/tiny/metrics.jsonl"))


@pytest.mark.slow
def test_a_run_recovers_from_all_passing_faults_and_trains_on_none(folder: Path) -> None:
    with tiny_serving(TINY, "--fault", "mixed", "--every", "5") as url:
        done = retrain(*through(url, "--max-steps", "4"), cwd=folder)
    assert done.code == 0, done.err
    lines = records(folder / "logs/tiny/metrics.jsonl")
    assert sum(line["inference_retries"] for line in lines) >= 6
    for line in lines:
        assert line.get("logprob_gap_max", 0.0) < 1e-4


def steps_done(folder: Path) -> int:
    file = folder / "logs/tiny/metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


@pytest.mark.long
def test_a_server_killed_and_started_again_in_the_middle_of_a_run(folder: Path) -> None:
    process, port = start(TINY)
    try:
        command = [str(SCRIPT), *through(f"http://127.0.0.1:{port}", "--max-steps", "6", "--inference-retry-s", "120")]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: steps_done(folder) >= 2)
        process.kill()
        process.wait()
        process, _ = start(TINY, port=port)
        _, told = run.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert run.returncode == 0, told
    lines = records(folder / "logs/tiny/metrics.jsonl")
    assert len(lines) == 6
    for line in lines:
        assert line.get("logprob_gap_max", 0.0) < 1e-4
        assert line["probe_gap_max"] < 1e-4


@pytest.mark.long
def test_a_server_that_dies_for_good_leaves_a_valid_checkpoint(folder: Path) -> None:
    process, port = start(TINY)
    run = through(f"http://127.0.0.1:{port}", "--max-steps", "50", "--inference-retry-s", "2")
    trainer = subprocess.Popen(
        [str(SCRIPT), *run], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: steps_done(folder) >= 2)
    finally:
        process.kill()
        process.wait()
    _, told = trainer.communicate(timeout=120)
    assert trainer.returncode == 1
    assert "Traceback" not in told
    assert "[inference] retry_s = 2 ended it" in told
    done = steps_done(folder)
    with tiny_serving(TINY) as url:  # another port: where the server is, is free on resume
        resumed = retrain(
            *through(url, "--max-steps", str(done + 2), "--resume", str(folder / "logs/tiny")), cwd=folder
        )
    assert resumed.code == 0, resumed.err
    lines = records(folder / "logs/tiny/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(done + 2))
    for line in lines:
        assert line.get("logprob_gap_max", 0.0) < 1e-4


@pytest.mark.long
def test_a_signal_during_a_hanging_request_saves_and_says_resume_me(folder: Path) -> None:
    process, port = start(TINY)
    try:
        command = [str(SCRIPT), *through(f"http://127.0.0.1:{port}", "--max-steps", "500")]
        run = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        wait_until(lambda: steps_done(folder) >= 2)
        os.kill(process.pid, signal.SIGSTOP)  # from now on it answers nothing
        time.sleep(1.0)
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert run.returncode == 75, told
    assert list((folder / "logs/tiny/adapter").glob("checkpoint_step_*"))


@pytest.mark.long
@pytest.mark.parametrize("most", [1, 2, 4])
def test_a_server_samples_ahead_and_every_completion_names_the_version_that_drew_it(most: int, tmp_path: Path) -> None:
    """What each checkpoint's adapter makes, in PEFT, of the tokens that a version is said to have drawn."""
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    with tiny_serving(TINY) as url:
        arguments = ("--inference-engine", "vllm", "--inference-url", url, "--max-staleness", str(most))
        plain = ("--lr", "5e-3", "--temperature", "1.0", "--data-instruction", "")
        done = retrain(*BASE, *arguments, *plain, cwd=tmp_path)
    assert done.code == 0, done.err
    run = tmp_path / "logs/tiny"
    steps = [line for line in records(run / "metrics.jsonl") if line["step"] >= 0]
    assert [line["step"] for line in steps] == list(range(6))
    assert 1 <= max(line["staleness_max"] for line in steps) <= most
    for step in (2, 4):
        gaps = {version: gap_to(run, step, version) for version in range(1, step + 1)}
        drawn_by = {r["policy_version"] for r in records(run / "emergence/generations.jsonl") if r["step"] == step}
        assert len(drawn_by) == 1
        assert [version for version, gap in gaps.items() if gap < 1e-4] == sorted(drawn_by), gaps


def gap_to(run: Path, step: int, version: int) -> float:
    """Largest |log p now - log p when sampled| of a step's completions, now being the adapter after `version` steps."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(run / f"adapter/checkpoint_step_{version}")).eval()
    drawn = load_file(run / f"emergence/tokens/step_{step:06d}.safetensors")
    lengths = drawn["lengths"].tolist()
    lines = [line for line in records(run / "emergence/generations.jsonl") if line["step"] == step]
    rows = zip(lines, drawn["tokens"].split(lengths), drawn["logprobs"].split(lengths), strict=True)
    largest = 0.0
    for line, tokens_T, logprobs_T in rows:
        prompt = [{"role": "user", "content": line["prompt"]}]
        prompt_T = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids_T = torch.cat([prompt_T["input_ids"][0], tokens_T.long()])
        with torch.inference_mode():
            logits = model(input_ids=ids_T[None]).logits[0, -len(tokens_T) - 1 : -1]
        now_T = torch.log_softmax(logits, -1).gather(1, tokens_T.long()[:, None])[:, 0]
        largest = max(largest, float((now_T - logprobs_T).abs().max()))
    return largest
