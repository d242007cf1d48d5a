"""The whole command against PRIME-RL's own `train()`: receivers, loss, optimizer, checkpoints and broadcasts are its.

The inference server is the stand-in of the quick tests; the trainer's own `mismatch_kl` says whether what arrives are
the log-probabilities of the policy that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.running import records, retrain
from tests.prime_rl.checkout import NEEDS_CHECKOUT
from tests.prime_rl.their_trainer import LORA, TheirTrainer
from tests.prime_rl_stack.stack import Server, start_server

BF16_KL = 1e-2  # all weights are broadcast in bfloat16, while the trainer here computes with float32

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start_server(tmp_path_factory.mktemp("server"))
    yield running
    running.process.kill()
    running.process.wait()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Callable[..., TheirTrainer]]:
    """Makes trainers whose processes end with the test."""
    opened: list[TheirTrainer] = []

    def make(**options: object) -> TheirTrainer:
        opened.append(TheirTrainer(folder=tmp_path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


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
