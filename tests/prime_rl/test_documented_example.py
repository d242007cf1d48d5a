"""The example of docs/pages/backends.md as it is, received by PRIME-RL's own `DataLoader` of each of its ranks.

Only where things are is set on the command line: the folder, the server, and a model and data that are on this machine.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.end_to_end.killing import finish, start
from tests.end_to_end.running import records
from tests.prime_rl.checkout import NEEDS_CHECKOUT, theirs
from tests.prime_rl_stack.stack import MODEL, start_server, wait_until
from tests.prime_rl_stack.trainer import broadcast

pytestmark = [pytest.mark.server, NEEDS_CHECKOUT]
PAGE = Path(__file__).parents[2] / "docs/pages/backends.md"
SEQ_LEN, RANKS = 8192, 4  # of the example
SMALL = ("--max-steps", "1", "--batch-size", "3", "--group-size", "4", "--eval-examples", "0")


def test_the_example_is_received_by_every_rank(tmp_path, monkeypatch):
    blocks = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    example = next(block for block in blocks if 'backend = "prime_rl"' in block)
    (tmp_path / "prime_rl.toml").write_text(example, encoding="utf-8")
    out, server = tmp_path / "out", start_server(tmp_path)
    settings = {
        "model.model": "builtin:tiny",
        "data.source": "arithmetic",
        "reward.type": "match",
        "inference.url": server.url,
        "backend.options.output_dir": str(out),
    }
    places = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), LoraConfig(target_modules="all-linear")
    )
    broadcast(model, out, 0, is_slow=False)
    run = start("prime_rl.toml", *SMALL, *places, cwd=tmp_path)
    try:
        ranks = [received(out, rank, monkeypatch, run) for rank in range(RANKS)]
        broadcast(model, out, 1, is_slow=False)
        code, _, err = finish(run)
    finally:
        server.process.kill()
        server.process.wait()
    assert code == 0, err
    (line,) = records(next(tmp_path.rglob("metrics.jsonl")))
    assert line["prime_rl_step"] == 1
    assert len({len(batches) for batches in ranks}) == 1
    parts = [part for batches in ranks for part in batches]
    assert all(part["input_ids"].shape == part["advantages"].shape for part in parts)
    assert all(part["input_ids"].shape[1] == int(part["seq_lens"].sum()) <= SEQ_LEN for part in parts)
    assert sum(int(part["loss_mask"].sum()) for part in parts) > 0


def received(out: Path, rank: int, monkeypatch: Any, run: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The first step of a rank, from where its trainer begins to read."""
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", RANKS), ("LOCAL_WORLD_SIZE", RANKS)):
        monkeypatch.setitem(os.environ, name, str(value))
    theirs("prime_rl.trainer.world").reset_world()
    first = theirs("prime_rl.trainer.ckpt").Progress().step
    config = theirs("prime_rl.configs.shared").FileSystemTransportConfig()
    loader = theirs("prime_rl.trainer.rl.data").DataLoader(out, first, RANKS, config)
    wait_until(loader.receiver.can_receive, run)
    return list(loader.get_batch())
