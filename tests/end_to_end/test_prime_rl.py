"""The whole command with backend `prime_rl`: a trainer made from the description trains on what we send.

The trainer compares its own log-probabilities with those that arrive. They agree only if the server had exactly the
weights of the step before, at the same temperature, for the very tokens that are trained.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrain.records.checkpoints import newest_valid
from tests.end_to_end.killing import check_nothing_is_half_written, finish, start
from tests.end_to_end.running import records, retrain
from tests.prime_rl_stack.stack import Server, Stack, making, serving, wait_until

GAP = 1e-3  # nats; float32 on both sides gives 1e-5, a policy one step old 1e-2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    with making(Stack, tmp_path) as make:
        yield make


def check_on_policy(stack: Stack, steps: int) -> None:
    """The trainer did these steps, each once and in order, on samples of the policy that it had."""
    assert not stack.complaint()
    trained = stack.trained()
    assert [line["step"] for line in trained] == list(range(1, steps + 1))
    assert max(line["gap"] for line in trained) < GAP
    assert all(line["distinct_advantages"] > line["rows"] for line in trained)  # credit per token arrives


@pytest.mark.long
def test_files_carry_the_steps_and_a_half_written_broadcast_is_waited_for(stack, server):
    made = stack()
    made.write_toml(server)
    for rank in range(2):
        made.start_rank(rank)
    made.start_trainer("--half-written", "2")
    server.refuse(404, 503)  # the adapter has not reached the server's disk, then the server is busy
    outcome = retrain(cwd=made.folder)
    assert outcome.code == 0, outcome.err
    check_on_policy(made, 3)
    lines = records(made.folder / "logs" / "train" / "metrics.jsonl")
    assert [line["prime_rl_policy_lag"] for line in lines] == [0] * 3
    assert all(line["loss_is_placeholder"] and "grad_norm" not in line for line in lines)
    loads = [body for path, body in server.calls() if path.endswith("load_lora_adapter") and "unload" not in path]
    names = [body["lora_name"] for body in loads if str(made.output_dir) in body["lora_path"]]
    assert len(set(names)) == 3  # a new name for each version
    assert "(placeholder)" in outcome.out + outcome.err


@pytest.mark.long
def test_sockets_carry_the_steps_while_ranks_join_late_and_one_is_restarted(stack, server):
    made = stack(transport="zmq")
    made.write_toml(server)
    made.start_trainer()
    first = made.start_rank(0)
    run = start(cwd=made.folder)
    inbox = made.output_dir / "inbox"
    second: list[subprocess.Popen[bytes]] = []
    threading.Timer(3.0, lambda: second.append(made.start_rank(1))).start()
    wait_until((inbox / "step_1_rank_0.bin").exists, run)
    (made.output_dir / "HANG").touch()
    wait_until((inbox / "hanging_0").exists, run)  # it has received a step and will never pass it on
    first.kill()
    first.wait()
    (made.output_dir / "HANG").unlink()
    made.start_rank(0)
    if (inbox / "hanging_1").exists():  # its own step came while the switch was on
        second[0].kill()
        made.start_rank(1)
    code, out, err = finish(run)
    assert code == 0, out + err
    check_on_policy(made, 3)
    assert "Data rank 0 was restarted" in out + err


@pytest.mark.slow
@pytest.mark.long
def test_a_broadcast_that_never_comes_ends_the_run_and_a_resume_goes_on_without_a_hole(stack, server):
    made = stack()
    made.write_toml(server, options="sync_poll_s = 0.05")
    for rank in range(2):
        made.start_rank(rank)
    made.start_trainer("--silent-from", "2")
    short = ("--backend-opt", "sync_wait_s=15")
    outcome = retrain(*short, cwd=made.folder)
    assert outcome.code == 1
    assert "no weights with 2 steps in them within sync_wait_s = 15 s" in outcome.err
    assert "Traceback" not in outcome.err
    run = made.folder / "logs" / "train"
    check_nothing_is_half_written(run)
    checkpoint, damaged = newest_valid(run / "adapter")
    assert (checkpoint.next_step, damaged) == (1, [])
    (made.output_dir / "SPEAK").touch()  # somebody has looked after the trainer
    outcome = retrain("--resume", str(run), *short, cwd=made.folder)
    assert outcome.code == 0, outcome.err
    check_on_policy(made, len(made.trained()))
    assert "ahead of this checkpoint" in outcome.out + outcome.err
    assert [line["step"] for line in records(run / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.long
def test_all_weights_are_replaced_between_pause_and_resume(stack, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("own")) as server:  # its base model changes
        made = stack(ranks=1)
        # the same prompts again and again, so that keys and values kept from older weights would show
        made.write_toml(server, training="max_examples = 4")
        made.start_rank(0)
        made.start_trainer("--all-weights", "--lr", "3e-4")
        server.refuse(404)
        outcome = retrain(cwd=made.folder)
        assert outcome.code == 0, outcome.err
        check_on_policy(made, 3)
        pause, update, resume = "/pause?mode=keep&clear_cache=false", "/update_weights", "/resume"
        assert [path for path, _ in server.calls()] == [pause, update, update, resume] + [pause, update, resume] * 2
