"""Keys and parts of a valid configuration that do something else than their author may expect: each is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
CLIPPED = 'grpo advantage, importance sampling without clipping; the clipped algorithm is `recipe = "grpo"`'
PARTS = """
from retrain.advantages import AdvantageSpec

def by_group(rewards):
    return rewards - rewards.mean()

BY_TOKEN = AdvantageSpec(name="by_token", compute_tokens=lambda ctx: ctx.token_rewards_G)

def whole(ctx):
    return [0.0 * u for u in ctx.uncertainties_G]
"""


@pytest.fixture
def explained(command: Command, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`explained("--kl-where", "reward")`: the JSON of an explanation; `own_parts.py` is in the folder."""
    (tmp_path / "own_parts.py").write_text(PARTS)

    def explain(*arguments: str) -> dict[str, Any]:
        done = command("explain", "--json", *arguments)
        assert done.code == 0, done.err
        content: dict[str, Any] = json.loads(done.out)
        return content

    return explain


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--advantage-mode", "grpo"), CLIPPED),
        (("--advantage-mode", "grpo", "--transform-mode", "none"), CLIPPED),
        (("--advantage-mode", "dr_grpo"), CLIPPED.replace("grpo", "dr_grpo")),
        (("--advantage-mode", "grpo", "--loss", "ppo"), None),
        (("--recipe", "grpo"), None),
        (("--advantage-mode", "rloo"), None),  # its recipe does not clip either
        (("--advantage-mode", "maxrl"), None),
        (("--advantage-mode", "own_parts.by_group"), None),
        (("--algorithm-mode", "grpo_none"), None),
    ],
)
def test_a_loss_that_does_not_clip_is_said_where_its_recipe_does(
    explained: Callable[..., dict[str, Any]], arguments: tuple[str, ...], line: str | None
) -> None:
    assert explained(*arguments).get("clipping") == line


def test_a_run_says_it_before_anything_loads(command: Command, toy_arguments: list[str]) -> None:
    done = command(*toy_arguments, "--max-steps", "1", "--kl-where", "reward", "--eval-every", "3")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Loading"))
    assert CLIPPED[1:] in "\n".join(lines[:first])
    assert "[kl] where: no effect with the default [kl] coef" in lines[:first]
    assert "[eval] every: no effect with the default [eval] examples and [eval] sets" in lines[:first]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("--advantage-mode", "own_parts.by_group"), "transform_mode = 'gtpo_sepa' (the default) changes it token by"),
        (("--advantage-mode", "own_parts.BY_TOKEN", "--transform-mode", "gtpo"), "transform_mode = 'gtpo' changes it"),
        (("--advantage-mode", "own_parts.by_group", "--algorithm-mode", "maxrl_none"), "'maxrl_none' replaces it"),
        (("--transform-mode", "none", "--algorithm-mode", "own_parts.whole"), "'own_parts.whole' replaces it"),
        (("--transform-mode", "none", "--sepa-steps", "3"), "[sepa] steps: no effect without controller sepa"),
        (("--transform-mode", "none", "--gtpo-beta", "0.3"), "[gtpo] beta: no effect without stage gtpo"),
        (("--hicra-alpha", "0.3"), "[hicra] alpha: no effect without stage hicra"),
        (
            ("--transform-mode", "gtpo", "--strategic-grams", "so"),
            "[logging] strategic_grams: no effect without planning",
        ),
        (("--algorithm-mode", "own_parts.whole", "--batch-norm", "true"), "[algorithm] batch_norm: no effect without"),
        (("--algorithm-param", "a=1"), "[algorithm] params: no effect with the default [algorithm] algorithm_mode"),
        (("--planning-threshold", "0.5"), "[planning] threshold: no effect with the default [planning] detector"),
        (("--base-url", "http://localhost:1"), "[model] base_url: no effect with the default [backend] backend"),
        (("--reward-judge-retries", "1"), "[reward] judge_retries: no effect without reward judge"),
        (("--reward-strict", "false"), "[reward] strict: no effect without reward math"),
        (("--bp-min-batch-size", "2"), "[backpressure] min_batch_size: no effect with the default [backpressure] en"),
        (("--sft-lr", "1e-3"), "[sft] lr: no effect with the default [sft] steps"),
        (("--inference-url", "http://localhost:1"), "[inference] url: no effect with the default [inference] engine"),
        (("--wandb-tags", "a"), "[logging] wandb_tags: no effect without recorder wandb"),
        (("--entropy-clip-cov-low", "2"), "[entropy] clip_cov_low: no effect with the default [entropy] clip_cov"),
    ],
)
def test_what_has_no_effect_is_said(
    explained: Callable[..., dict[str, Any]], arguments: tuple[str, ...], fragment: str
) -> None:
    assert any(fragment in warning for warning in explained(*arguments)["warnings"]), explained(*arguments)["warnings"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--advantage-mode", "own_parts.by_group", "--transform-mode", "none"),
        ("--algorithm-mode", "maxrl_gtpo_hicra", "--hicra-alpha", "0.3", "--strategic-grams", "so"),
        ("--algorithm-mode", "own_parts.whole", "--algorithm-param", "a=1", "--gtpo-beta", "0.3"),
        ("--sepa-steps", "3", "--gtpo-beta", "0.3", "--strategic-grams", "so"),
        ("--kl-coef", "0.1", "--kl-where", "reward"),
        ("--reward-weights", '{"match": 1.0, "math": 1.0}', "--reward-strict", "false"),
        ("--eval-sets", '{"more": {"source": "arithmetic"}}', "--eval-samples", "2", "--reward-type", "match"),
    ],
)
def test_what_has_an_effect_is_not_spoken_of(
    explained: Callable[..., dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    assert explained("--seed", "1", *arguments)["warnings"] == []
