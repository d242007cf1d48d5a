"""What was trained goes on: to a merged folder, to MLX, to a conversation, as one policy by each of its names."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from retrain.kernel.errors import BackendError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import LogprobRow, SampleRequest, SamplingParams
from retrain.run.opened import Opened, opened
from retrain.run.subject import find_subject
from tests.end_to_end.running import SCRIPT, records, retrain
from tests.end_to_end.terminal import converse

# A new user's commands at a terminal, in an empty folder with a file of tasks: keys pressed, and text awaited.
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
    written = ""
    for command, exchange, shown in WALK:
        _, *arguments = command.split()
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


RUN = Path(__file__).with_name("stopped_run")


def drawn(policy: Opened) -> list[bytes]:
    """Ids and log-probabilities of four samples, which the trainer must give as well."""
    prompt_T = np.array(policy.tokenizer.encode("What is 12 + 30?"))
    params = SamplingParams(max_tokens=12, temperature=1.0)
    (samples,) = policy.backend.sample([SampleRequest(prompt_T=prompt_T, seeds_G=(1, 2, 3, 4))], params)
    for sample in samples:
        (logprobs_T,) = policy.backend.logprobs([LogprobRow.of(prompt_T, sample.tokens_T)], params.temperature)
        np.testing.assert_allclose(logprobs_T[len(prompt_T) :], sample.logprobs_T, atol=1e-4)
    return [sample.tokens_T.tobytes() + sample.logprobs_T.tobytes() for sample in samples]


def test_a_run_its_checkpoint_and_its_adapter_alone_are_one_policy_and_its_base_another(tmp_path: Path) -> None:
    plugins, alone = load_plugins(), tmp_path / "adapter"
    shutil.copytree(RUN / "adapter" / "checkpoint_step_5", alone)
    for file in alone.iterdir():
        if not file.name.startswith("adapter_"):
            file.unlink()
    with opened(find_subject(RUN), plugins) as policy:
        of_run = drawn(policy)
        policy.use(None)
        of_base = drawn(policy)
        with pytest.raises(BackendError, match="nowhere"):
            policy.use(tmp_path / "nowhere")
        assert drawn(policy) == of_base
        policy.use(alone)
        assert drawn(policy) == of_run
    with opened(find_subject(alone), plugins) as policy:
        assert drawn(policy) == of_run
    with opened(find_subject("builtin:tiny"), plugins) as policy:
        assert drawn(policy) == of_base
    assert of_run != of_base


SMALL = (
    *("--model", "builtin:tiny", "--data-source", "arithmetic", "--batch-size", "4", "--group-size", "4"),
    *("--max-tokens", "48", "--eval-examples", "24", "--eval-every", "2", "--seed", "3", "--lr", "1e-2", "-q"),
)


@pytest.mark.long
@pytest.mark.parametrize("rank", ["8", "0"])
def test_a_merged_folder_trains_on_and_is_evaluated_as_the_run_was(tmp_path: Path, rank: str) -> None:
    rate = ("--lr", "1e-3") if rank == "0" else ()
    first = retrain(*SMALL, "--lora-rank", rank, *rate, "--max-steps", "2", "--log-dir", "first", cwd=tmp_path)
    assert first.code == 0, first.err
    merged = retrain(
        *("export", "first", "--format", "transformers", "--out", "merged", "--dtype", "fp32", "--json"), cwd=tmp_path
    )
    assert merged.code == 0, merged.err
    assert json.loads(merged.out)["logit_gap"] < 1e-4
    second = retrain(
        *SMALL, "--model", "merged", "--lora-rank", "8", "--max-steps", "1", "--log-dir", "second", cwd=tmp_path
    )
    assert second.code == 0, second.err
    before, *_, last = records(tmp_path / "first/metrics.jsonl")
    begun = records(tmp_path / "second/metrics.jsonl")[0]
    assert begun["step"] == -1
    for name in ("eval_correct_rate", "eval_mean_reward", "eval_examples", "eval_pass_at_4"):
        assert begun[name] == last[name], name
    assert before["eval_correct_rate"] != last["eval_correct_rate"]  # training changed what is compared


@pytest.mark.client
def test_mlx_reads_what_its_converter_made(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    out = tmp_path / "mlx"
    done = retrain("export", "builtin:tiny", "--format", "mlx", "--out", str(out), "--dtype", "fp32", cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"mlx_lm.chat --model {out}" in done.out
    import mlx.core as mx
    import torch
    from mlx_lm import load
    from transformers import AutoModelForCausalLM

    from retrain_local.plugin import BUILTIN_MODELS

    ids = [5, 9, 300, 17, 2, 41]
    model, _ = load(str(out))
    theirs = torch.tensor(model(mx.array([ids]))[0].tolist())
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(BUILTIN_MODELS["tiny"], dtype=torch.float32)
        ours = plain(input_ids=torch.tensor([ids])).logits[0]
    assert float((theirs - ours).abs().max()) < 1e-3
    assert [path.name for path in tmp_path.iterdir()] == ["mlx"]
