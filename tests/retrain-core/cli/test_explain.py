"""`retrain explain` and `retrain plugins`: what would run, where each value comes from, and what is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
DOCUMENTED_FIELDS = {
    *("mode", "config", "model", "backend", "backend_options", "backend_capabilities", "condition", "algorithm_mode"),
    *("advantage_mode", "transform_mode", "max_steps", "batch_size", "group_size", "datums_per_step", "total_datums"),
    *("max_tokens", "temperature", "lr", "seed", "lora_rank", "lora_alpha", "data", "reward_type", "log_dir"),
    *("adapter_path", "wandb_project", "warnings"),
}


def explained(command: Command, *arguments: str) -> dict[str, Any]:
    result = command("explain", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_the_documented_fields_and_their_arithmetic(command: Command, tmp_path: Path) -> None:
    content = explained(command, "--batch-size", "3", "--group-size", "5", "--max-steps", "7", "--lora-rank", "4")
    assert set(content) >= DOCUMENTED_FIELDS
    assert (content["datums_per_step"], content["total_datums"]) == (15, 105)
    assert (content["lora_alpha"], content["lora_scale"]) == (8, 2.0)
    assert (content["mode"], content["wandb_project"]) == ("single", "(disabled)")
    assert content["adapter_path"] == "logs/train/adapter"
    assert content["backend_capabilities"]["preserves_token_advantages"] is True
    assert list(tmp_path.iterdir()) == []


def test_origins_name_file_environment_and_flag(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.toml").write_text("\n[lora]\nalpha = 5\n[resume]\nfrom = ''\n")
    monkeypatch.setenv("RETRAIN__TRAINING__SEED", "3")
    content = explained(command, "my.toml", "--lr", "1e-3")
    assert content["origins"] == {
        "lora.alpha": {"value": 5, "origin": "my.toml:3"},
        "resume.from": {"value": "", "origin": "my.toml:5"},
        "training.lr": {"value": 0.001, "origin": "--lr"},
        "training.seed": {"value": 3, "origin": "RETRAIN__TRAINING__SEED"},
    }
    text = command("explain", "my.toml", "--lr", "1e-3").out
    assert all(part in text for part in ("lora.alpha", "(my.toml:3)", "lora_alpha"))


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--group-size", "1"), "a group of one has no advantage"),
        (("--save-every", "0"), "only the last adapter is saved"),
        (("--temperature", "2.5"), "close to noise"),
        (("--lr", "1e-6"), "full fine-tuning"),
        (("--minibatches", "9"), "minibatches = 9, batch_size = 8: a step has 8 groups at most"),
    ],
)
def test_legal_but_odd_values_are_warned_of(arguments: tuple[str, ...], fragment: str, command: Command) -> None:
    assert any(fragment in warning for warning in explained(command, *arguments)["warnings"])
    assert fragment in command("explain", *arguments).out


def test_truncated_completions_and_further_rounds(command: Command) -> None:
    plain = explained(command, "--max-tokens", "64", "--batch-size", "4", "--group-size", "8")
    assert not {"truncated", "soft_overlong", "refill"} & set(plain)
    chosen = ("--overlong", "mask", "--soft-overlong", "16", "--refill", "3")
    content = explained(command, "--max-tokens", "64", "--batch-size", "4", "--group-size", "8", *chosen)
    assert content["truncated"] == "left out of the loss"
    assert content["soft_overlong"] == "the reward falls by up to 1 over the last 16 of 64 tokens"
    assert content["refill"] == "up to 3 further rounds of 4 prompts until 4 groups can teach"
    assert content["max_tokens_per_step"] == 4 * plain["max_tokens_per_step"]
    assert content["datums_per_step"] == plain["datums_per_step"]  # what is trained stays


def test_the_loss_is_told_with_the_keys_about_it(command: Command) -> None:
    assert explained(command, "--seed", "1")["loss"] == "importance_sampling"
    content = explained(command, "--recipe", "dapo", "--clip-eps-high", "0.3")
    assert content["loss"] == "ppo, clip_eps = 0.2, clip_eps_high = 0.3, aggregation = token_mean"
    prime = ("--backend", "prime_rl", "--backend-opt", "output_dir=x", "--inference-engine", "vllm")
    assert "loss" not in explained(command, *prime, "--max-tokens", "512")


def test_updates_and_the_course_of_the_learning_rate(command: Command) -> None:
    plain = explained(command, "--seed", "1")
    assert (plain["updates_per_step"], plain["lr_schedule"], plain["warnings"]) == (1, "constant", [])
    course = ("--optim-schedule", "cosine", "--optim-warmup-steps", "5", "--optim-min-lr-ratio", "0.1")
    content = explained(command, "--lr", "1e-3", "--max-steps", "20", "--minibatches", "4", "--epochs", "2", *course)
    assert content["updates_per_step"] == 8
    assert content["lr_schedule"] == "cosine, from 0.001 down to 0.0001 within 20 steps, after 5 steps of warm-up"
    endless = explained(command, "--max-steps", "4", *course)["warnings"]
    assert endless == ["warmup_steps = 5, max_steps = 4: the learning rate never reaches lr"]
    cut = explained(command, "--minibatches", "50", "--epochs", "2", "--lora-rank", "0", "--lr", "1e-6")
    assert cut["updates_per_step"] == 16  # of 8 groups there are 8 minibatches at most
    assert not [warning for warning in cut["warnings"] if "LoRA" in warning]
    floor = command("explain", "--optim-min-lr-ratio", "0.1")
    assert (floor.code, "--optim-min-lr-ratio [optimizer]" in floor.err) == (2, True)
    prime = command("explain", "--backend", "prime_rl", "--backend-opt", "output_dir=x", *course)
    assert all(f"[optimizer] {key}" in prime.err for key in ("schedule", "warmup_steps", "min_lr_ratio"))
