"""The audit is a plugin: the hook before the model loads refuses a run whose verifier is not fit to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, TimedScore
from retrain.kernel.errors import RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Score

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


class Loaded:
    def __init__(self, verifier: FixedVerifier) -> None:
        self.prompts = PROMPTS
        self.verifier = verifier


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins({})


def notify(plugins: Plugins, verifier: FixedVerifier, audit: str = "stop") -> None:
    config = Config(tables={"scoring": ScoringTable.model_validate({"audit": audit})})
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins, tokenizer=Words())
    plugins.notify("retrain_tasks_loaded", context=context, tasks=Loaded(verifier))


def test_a_verifier_that_calls_everything_correct_refuses_the_run(plugins: Plugins) -> None:
    with pytest.raises(RewardError, match="the reward failed its audit"):
        notify(plugins, FixedVerifier(1.0))
    notify(plugins, FixedVerifier(1.0), audit="warn")


def test_right_answers_are_tried_with_rewards_only(plugins: Plugins, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="retrain")
    environment = FixedVerifier(0.0)
    notify(plugins, environment)
    assert "gold not tried (4 without a known answer), 0 of " in caplog.text
    assert r"\boxed{11}" not in environment.texts
    with pytest.raises(RewardError, match="the right answer scored 0"):
        notify(plugins, FixedVerifier(0.0, rewards=(object(),)))


def test_nothing_is_tried_when_the_audit_is_off(plugins: Plugins) -> None:
    verifier = FixedVerifier(1.0)
    notify(plugins, verifier, audit="off")
    assert verifier.texts == []
