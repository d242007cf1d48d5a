"""The whole command against PRIME-RL's own `train()`: receivers, loss, optimizer, checkpoints and broadcasts are its.

The inference server is the stand-in of the quick tests; the trainer's own `mismatch_kl` says whether what arrives are
the log-probabilities of the policy that it had.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest

from tests.end_to_end.killing import finish, start
from tests.end_to_end.running import records, retrain
from tests.prime_rl.checkout import NEEDS_CHECKOUT
from tests.prime_rl.their_trainer import LORA, TheirTrainer
from tests.prime_rl_stack.stack import wait_until

BF16_KL = 1e-2  # all weights are broadcast in bfloat16, while the trainer here computes with float32

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]


@pytest.mark.parametrize("lora", [LORA, ""], ids=["lora", "all-weights"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transport", ["filesystem", "zmq"])
def test_three_steps(trainer, server, transport, ranks, lora):
    made = trainer(transport=transport, ranks=ranks, lora=lora)
    made.write_toml(server)
    made.start_trainer()
    outcome = retrain(cwd=made.folder)
    assert outcome.code == 0, outcome.err
    trained = made.trained()
    assert [line["step"] for line in trained] == [1, 2, 3]
    assert max(line["mismatch_kl/all/max"] for line in trained) < (1e-6 if lora else BF16_KL)
    lines = records(made.folder / "logs" / "train" / "metrics.jsonl")
    assert [line["prime_rl_policy_lag"] for line in lines] == [0] * 3


def metrics(made: TheirTrainer) -> list[dict[str, Any]]:
    return records(made.folder / "logs" / "train" / "metrics.jsonl")


def resumed(made: TheirTrainer, *arguments: str) -> None:
    outcome = retrain("--resume", "logs/train", *arguments, cwd=made.folder)
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("transport", ["filesystem", "zmq"])
def test_a_run_that_is_killed_goes_on_with_the_trainer_where_it_is(trainer, server, transport):
    made = trainer(transport=transport, ranks=1)
    made.write_toml(server)
    made.start_trainer()
    run = start(cwd=made.folder)
    wait_until((made.output_dir / "broadcasts" / "step_2" / "STABLE").exists, run)
    os.kill(run.pid, signal.SIGKILL)
    finish(run)
    resumed(made)
    steps = [line["step"] for line in made.trained()]
    assert steps == list(range(1, len(steps) + 1))
    assert [line["step"] for line in metrics(made)] == [0, 1, 2]


def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint_and_reads_the_batches_since_then_again(trainer, server):
    made = trainer(ranks=1)
    made.write_toml(server)
    made.start_trainer("[ckpt]\ninterval = 2")
    run = start("--max-steps", "4", "--backend-opt", "sync_wait_s=300", cwd=made.folder)
    wait_until((made.output_dir / "rollouts" / "step_4").exists, run)  # it has steps 1 to 3, and a checkpoint of 2
    made.stop_trainer()
    made.start_trainer("[ckpt]\ninterval = 2\n[resume]")
    code, out, err = finish(run)
    assert code == 0, out + err
    steps = [line["step"] for line in made.trained()]
    assert steps[:3] == [1, 2, 3]
    assert steps[-2:] == [3, 4]
    assert [line["prime_rl_policy_lag"] for line in metrics(made)] == [0] * 4


@pytest.mark.parametrize("transport", ["filesystem", "zmq"])
def test_a_trainer_that_is_put_back_goes_on_with_first_step(trainer, server, transport):
    made = trainer(transport=transport, ranks=1)
    made.write_toml(server)
    made.start_trainer()
    assert retrain(cwd=made.folder).code == 0
    made.stop_trainer()
    made.start_trainer("[resume]\nstep = 1")
    outcome = retrain("--resume", "logs/train", "--max-steps", "4", cwd=made.folder)
    assert outcome.code != 0
    assert "put back to step 1" in outcome.err
    for folder in ("rollouts", "broadcasts"):
        for step in (2, 3):
            shutil.rmtree(made.output_dir / folder / f"step_{step}", ignore_errors=True)
    resumed(made, "--max-steps", "4", "--set", "backend.options.first_step=2")
    assert made.trained()[-1]["step"] == 2
    assert metrics(made)[-1]["prime_rl_step"] == 2
