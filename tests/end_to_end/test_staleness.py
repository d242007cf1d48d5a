"""Sampling two steps ahead on the built-in model: a killed run is resumed to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.killing import BASE, killed_and_resumed
from tests.end_to_end.running import records, retrain, tiny
from tests.kit.shared import slow_or_long
from tests.kit.tiny_server import tiny_serving

TINY = BUILTIN_MODELS["tiny"]

pytestmark = pytest.mark.timeout(900)

AHEAD = (*BASE, "--devices", "cpu,cpu", "--max-staleness", "2")
# Kills the process at a step, in the thread that samples or in the one that trains.
KILLED = """
from retrain.run.steps.overlapped import Buffered
from retrain_local.training.trainer import Trainer

def at(owner, name, is_time):
    original = getattr(owner, name)
    def call(*args, **more):
        if is_time(*args):
            kill()
        return original(*args, **more)
    setattr(owner, name, call)

at(Buffered, "_sample_with", lambda _, version, planned: {half!r} == "sampling" and planned.step == {step})
at(Trainer, "accumulate", lambda _, batch: {half!r} == "training" and batch.step == {step})
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("half", "step"), slow_or_long([("training", 3), ("sampling", 4), ("sampling", 1), ("training", 5)])
)
def test_a_killed_run_continues_with_the_policies_that_its_steps_are_sampled_with(
    half: str, step: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patch = KILLED.replace("{half!r}", repr(half)).replace("{step}", str(step))
    run = killed_and_resumed(tmp_path_factory, "ahead", tmp_path, patch, *AHEAD)
    steps = [line for line in records(run / "metrics.jsonl") if line["step"] >= 0]
    assert [line["staleness_max"] for line in steps] == [0, 1, 2, 2, 2, 2]
    versions = {(r["step"], r["policy_version"]) for r in records(run / "emergence/generations.jsonl")}
    assert versions == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)}


@pytest.mark.long
@pytest.mark.parametrize("most", ["1", "2", "4"])
def test_it_learns_from_completions_of_older_policies(most: str, tmp_path: Path) -> None:
    flags = ("--devices", "cpu,cpu", "--max-staleness", most, "--max-steps", "40", "--save-every", "0", "--seed", "1")
    tiny(*flags, "--log-dir", "run", cwd=tmp_path)
    last = records(tmp_path / "run/metrics.jsonl")[-1]
    assert last["staleness_max"] == int(most)
    assert last["eval_correct_rate"] > 0.75  # measured: 0.92, 0.92, 0.88; 0.47 before


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
