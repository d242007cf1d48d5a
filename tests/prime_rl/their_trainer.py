"""Starts PRIME-RL's own trainer, on CPU processes, beside the inference server of the quick tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.prime_rl_stack.stack import MODEL, ROOT, Stack, two_free_ports, wait_until

LORA = "[model.lora]\nrank = 8\nalpha = 16\n"
TOML = """
output_dir = "{output_dir}"
[model]
name = "{model}"
seq_len = {seq_len}
{lora}
[optim]
lr = 2e-3
[rollout_transport]
type = "{transport}"
{port}
[log]
level = "debug"
"""
WAITING = "Waiting for training batch"


@dataclass
class TheirTrainer(Stack):
    """`train()` of the checkout, one process per rank, on one output folder; `max_steps` stays unset."""

    lora: str = LORA
    toml: str = ""  # its whole file, if it is not to be made from the fields
    checkpoints: str = "[ckpt]\ninterval = 1"
    starts: int = 0

    def start_trainer(self, *options: str) -> subprocess.Popen[bytes]:
        """All ranks; returns when they wait for a batch. `options` are lines of the trainer's TOML."""
        self.port = self.port or two_free_ports()
        self.output_dir.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        file = self.folder / "trainer.toml"
        port = f"port = {self.port}" if self.transport == "zmq" else ""
        settings = {"output_dir": self.output_dir, "model": MODEL, "seq_len": self.seq_len, "lora": self.lora}
        text = self.toml or TOML.format(**settings, transport=self.transport, port=port)
        if "[ckpt]" not in "\n".join((self.toml, *options)):
            options = (self.checkpoints, *options)
        file.write_text(text + "\n".join(options), encoding="utf-8")
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(two_free_ports()), "OMP_NUM_THREADS": "1"}
        for rank in range(self.ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "LOCAL_WORLD_SIZE": self.ranks}
            command = [sys.executable, "-m", "tests.prime_rl.trainer_process", str(file)]
            with self.log(rank).open("wb") as log:
                environ = {**os.environ, **address, **{name: str(value) for name, value in names.items()}}
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)
                )
        wait_until(lambda: WAITING in self.log(0).read_text("utf-8"), self.processes[-self.ranks])
        return self.processes[-self.ranks]

    def stop_trainer(self) -> None:
        """Kill every rank."""
        self.close()
        self.processes.clear()

    def log(self, rank: int) -> Path:
        """What a rank has printed since it was last started."""
        return self.folder / f"trainer_{self.starts}_rank_{rank}.log"

    def trained(self) -> list[dict[str, Any]]:
        """The trainer's own metrics of its steps, in the order in which they were done, once it waits for another."""
        log = self.log(0)
        wait_until(lambda: WAITING in log.read_text("utf-8").rpartition("Saving weights")[2], self.processes[-1])
        lines = (self.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [found for line in lines if "loss/mean" in (found := json.loads(line))]
