"""A user's own parts, in every form the documentation shows, selected from TOML through the installed script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.running import SMALL, records, retrain, tiny
from tests.kit.shared import slow_or_long

README = Path(__file__).parents[2] / "README.md"
QUICK = (*SMALL, "--save-every", "0")


def test_the_readme_transform_runs_as_written(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (tmp_path / "my_transforms.py").write_text(next(block for block in blocks if "make_transform_spec" in block))
    tiny(*QUICK, "--transform-mode", "my_transforms.make_transform_spec", "--max-steps", "1", cwd=tmp_path)
    assert records(tmp_path / "logs/tiny/metrics.jsonl")[-1]["condition"] == "maxrl+entropy_shift"


MINE = (
    "from retrain.advantages import TransformOutput\n"
    "def centred(rewards):\n    return [r - sum(rewards) / len(rewards) for r in rewards]\n"
    "def scaled(rewards, params):\n    return [params['scale'] * a for a in centred(rewards)]\n"
    "def seen(ctx):\n    return ctx.rewards_G - ctx.rewards_G.mean()\n"
    "def first_token_only(ctx):\n"
    "    advs = [[a if t == 0 else 0.0 for t in range(len(lp))]"
    " for a, lp in zip(ctx.advantages_G, ctx.logprobs_G)]\n"
    "    return TransformOutput(token_advs=advs, metrics={'mine': 1.0})\n"
    "def squared(ctx):\n    return [lp * lp for lp in ctx.logprobs_T]\n"
)
LADDER = {
    "function": ("--advantage-mode", "mine.centred", "--transform-mode", "none"),
    "parameters": ("--advantage-mode", "mine.scaled", "--advantage-param", "scale=2.0"),
    "view": (
        *("--advantage-mode", "mine.seen", "--transform-mode", "mine.first_token_only"),
        *("--uncertainty-kind", "mine.squared"),
    ),
    "algorithm": ("--algorithm-mode", "mine.first_token_only"),
}


@pytest.mark.long
@pytest.mark.parametrize("rung", slow_or_long(LADDER, "view"))
def test_one_file_plugins_of_the_whole_ladder(rung: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    tiny(*QUICK, *LADDER[rung], "--max-steps", "1", cwd=tmp_path)
    line = records(tmp_path / "logs/tiny/metrics.jsonl")[-1]
    if rung == "view":
        assert line["mine"] == 1.0
    if rung == "algorithm":
        assert line["condition"] == "mine.first_token_only"


@pytest.mark.slow
def test_credit_of_a_run_is_what_was_trained_and_can_be_recomputed(tmp_path: Path) -> None:
    tiny(*QUICK, "--sepa-delay-steps", "0", "--sepa-correct-rate-gate", "0.0", cwd=tmp_path)
    shown = retrain("credit", "logs/tiny", "--json", cwd=tmp_path)
    assert shown.code == 0, shown.err
    content = json.loads(shown.out)
    assert content["flows"] == ["maxrl+gtpo_sepa"]
    assert content["sepa_lambda"] == records(tmp_path / "logs/tiny/metrics.jsonl")[-1]["sepa_lambda"] > 0.0

    from retrain.records.stored_tokens import read_tokens

    stored = read_tokens(tmp_path / "logs/tiny", content["step"])
    trained = [c for c in content["completions"] if c["trained"]]
    assert trained
    for completion in trained:
        record = stored[completion["group"] * 4 + completion["index"]]
        assert completion["credit"][0] == pytest.approx(record.advantages_T.tolist(), abs=2e-6)
        assert len(completion["tokens"]) == len(record.tokens_T)

    both = retrain(
        "credit", "logs/tiny", "--transform", "none", "--transform", "gtpo_hicra", "--html", "c.html", cwd=tmp_path
    )
    assert both.code == 0, both.err
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "maxrl+none" in page
    assert "maxrl+gtpo_hicra" in page
    text = retrain("credit", "logs/tiny", "--advantage", "grpo", "--most", "1", cwd=tmp_path)
    assert "grpo+gtpo_sepa" in text.out
    assert "more completions" in text.out
