"""Runs whose policy teaches itself: they learn the average again after a resume, to the byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.end_to_end.running import tiny, untimed

TOML = """
[model]
model = "builtin:tiny"
[backend]
devices = "cpu"
[data]
source = "arithmetic"
[algorithm]
recipe = "sdpo"
[distil]
mode = "{mode}"
[training]
seed = 1
batch_size = 4
group_size = 4
max_tokens = 32
lr = 3e-3
save_every = 1
"""


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sampled_token", "topk"])
def test_a_resumed_run_has_the_same_average_and_the_same_steps(mode: str, tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text(TOML.format(mode=mode), encoding="utf-8")
    tiny("--max-steps", "3", "--log-dir", "a", cwd=tmp_path)
    tiny("--max-steps", "2", "--log-dir", "b", cwd=tmp_path)
    tiny("--resume", "b", "--max-steps", "3", cwd=tmp_path)
    assert untimed(tmp_path / "b/metrics.jsonl") == untimed(tmp_path / "a/metrics.jsonl")
    line = json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[-1])
    assert 0.0 < line["teacher_rate"] <= 1.0
    assert line["teacher_kl_mean"] > 0.0
    assert line["condition"].startswith("sdpo")
    (file,) = {path.name: path for path in tmp_path.glob("a/**/teacher_average.safetensors")}.values()
    own = load_file(file.with_name("adapter_model.safetensors"))
    average = load_file(file)
    # A twentieth of the way: B began at 0, so the average has not arrived.
    for name, values in average.items():
        if "lora_B" in name:
            theirs = own[name.replace(".default.", ".")]
            assert abs(values).max() < 0.2 * abs(theirs).max()
