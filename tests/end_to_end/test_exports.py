"""What a run trained goes on elsewhere: a merged folder trains and is evaluated, MLX's converter reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.running import retrain

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
    last = json.loads((tmp_path / "first/metrics.jsonl").read_text().splitlines()[-1])
    begun = json.loads((tmp_path / "second/metrics.jsonl").read_text().splitlines()[0])
    assert begun["step"] == -1
    for name in ("eval_correct_rate", "eval_mean_reward", "eval_examples", "eval_pass_at_4"):
        assert begun[name] == last[name], name
    before = json.loads((tmp_path / "first/metrics.jsonl").read_text().splitlines()[0])
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
