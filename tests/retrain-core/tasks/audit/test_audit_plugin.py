"""The audit is a plugin: the hook before the model loads refuses a run whose verifier is not fit to train on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, TimedScore
from retrain.kernel.errors import RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Score
from tests.kit.problems import codes_in

PROMPTS = tuple(
    Prompt(example=Example(id=f"e{i}", prompt=f"{i} + 1?", reference=str(i + 1)), tokens_T=np.arange(3))
    for i in range(10, 14)
)


class Words:
    def decode(self, tokens_T: Any, *, skip_special_tokens: bool) -> str:
        return "words"


class FixedVerifier:
    """Gives every text the same score; an environment unless it has rewards."""

    def __init__(self, value: float, rewards: tuple[Any, ...] = ()) -> None:
        self.value = value
        self.names = ("fixed",)
        self.rewards = rewards
        self.timeout_s = None
        self.texts: list[str] = []

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        self.texts += [text for _, text in pairs]
        return [TimedScore(score=Score.of(self.value), seconds=0.0) for _ in pairs]


def notify(verifier: FixedVerifier, audit: str = "stop") -> None:
    config = Config(tables={"scoring": ScoringTable.model_validate({"audit": audit})})
    plugins = load_plugins({})
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins, tokenizer=Words())
    tasks = SimpleNamespace(prompts=PROMPTS, verifier=verifier)
    plugins.notify("retrain_tasks_loaded", context=context, tasks=tasks)


def test_a_verifier_that_calls_everything_correct_refuses_the_run_unless_the_policy_allows_it() -> None:
    with pytest.raises(RewardError) as caught:
        notify(FixedVerifier(1.0))
    assert set(codes_in(caught)) == {"reward.failed-audit"}
    notify(FixedVerifier(1.0), audit="warn")
    untried = FixedVerifier(1.0)
    notify(untried, audit="off")
    assert untried.texts == []


def test_right_answers_are_tried_with_rewards_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="retrain")
    environment = FixedVerifier(0.0)
    notify(environment)
    assert "gold not tried (4 without a known answer), 0 of " in caplog.text
    assert r"\boxed{11}" not in environment.texts
    with pytest.raises(RewardError, match="gold, 4 of 4 examples"):
        notify(FixedVerifier(0.0, rewards=(object(),)))
