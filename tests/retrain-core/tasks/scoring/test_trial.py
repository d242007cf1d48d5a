"""A reward that fails on every text ends the run before anything heavy loads; whatever else it may be, it is left."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable, ScoringTable
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import RewardError
from retrain.kernel.types import Example
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring import trial
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier

PARTS = Path(__file__).parent / "parts"


@pytest.fixture
def try_out(monkeypatch: pytest.MonkeyPatch, service: Callable[..., ScoringService]) -> Any:
    """`try_out("Sound", audit="warn")`: the trial of one of `trial_rewards`; returns reward and service."""
    monkeypatch.syspath_prepend(str(PARTS))
    monkeypatch.delitem(sys.modules, "trial_rewards", raising=False)
    made = importlib.import_module("trial_rewards")

    def run(kind: str, **settings: Any) -> tuple[Any, ScoringService]:
        reward = getattr(made, kind)()
        at_work = service(reward, timeout_s=3.0, **settings)
        config = Config(tables={"scoring": ScoringTable(**settings), "data": DataTable(source="some")})
        examples = [Example(id=str(n), prompt="p", reference=str(n)) for n in range(5)]
        prompts = [Prompt(example=example, tokens_T=np.array([1])) for example in examples]
        trial.refuse_broken_rewards(RewardVerifier(at_work), prompts, config)
        return reward, at_work

    return run


@pytest.mark.parametrize(("kind", "fault"), [("Raising", "first: KeyError: 'no such key'"), ("NotANumber", "nan")])
def test_a_reward_that_fails_on_every_text_is_refused(try_out: Any, kind: str, fault: str) -> None:
    with pytest.raises(RewardError) as refused:
        try_out(kind, audit="warn")
    (problem,) = refused.value.problems
    assert (problem.code, problem.where.startswith("[reward] type")) == ("reward.always-fails", True)
    assert "all 9 texts" in problem.what
    assert fault in problem.what


KINDS = ("Sound", "OnlyEmpty", "Gold", "Slow", "Heavy", "Remote")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in KINDS), ("Raising", {"audit": "off"}), ("Raising", {"max_failed_frac": 1.0})],
)
def test_any_other_reward_is_left_to_the_run_as_it_was(
    try_out: Any, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.3)
    before = descendants(os.getpid())
    reward, _ = try_out(kind, **settings)
    assert reward.calls == 0
    assert descendants(os.getpid()) <= before, "no scoring process was started"


def test_a_reward_that_works_in_its_scoring_process_is_not_refused(try_out: Any) -> None:
    before = descendants(os.getpid())
    try_out("OnlyInItsProcess")
    assert descendants(os.getpid()) - before
