"""Which rewards a configuration means; the trial of one that fails on every text; rewards in the event loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable, ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import PluginError, RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring import trial
from retrain.tasks.scoring.build import build_rewards, comparing_rewards, has_verifier, judges
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier
from tests.kit import user_rewards
from tests.kit import user_rewards as rewards
from tests.kit.problems import codes_in, refused


class Verifier:
    """The data source's own."""

    def score(self, example: Any, text: str) -> float:
        return 1.0


@pytest.fixture
def built(load: Callable[..., Any], toys: Path) -> Callable[..., dict[str, tuple[str, float]]]:
    """`built(text, own)`: class and weight of every reward by name."""

    def build(text: str, own: Any = None) -> dict[str, tuple[str, float]]:
        config, problems = load(f'[data]\nsource = "toy"\n{text}')
        assert not problems
        context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
        rewards = build_rewards(config, context, own)
        return {each.name: (type(each.reward).__name__, each.weight) for each in rewards}

    return build


def test_the_type_or_the_verifier_of_the_source_and_weights_in_place_of_both(built: Callable[..., Any]) -> None:
    assert built("") == {"match": ("MatchReward", 1.0)}
    assert built("", Verifier()) == {"toy": ("Verifier", 1.0)}
    assert built('[reward]\ntype = "toy"', Verifier()) == {"toy": ("ToyReward", 1.0)}
    text = "[reward.weights]\nmatch = 1.0\ntoy = -0.5"
    wanted = {"match": ("MatchReward", 1.0), "toy": ("ToyReward", -0.5)}
    assert built(text) == built(text, Verifier()) == wanted
    assert list(built(text)) == ["match", "toy"]
    with pytest.raises(PluginError, match=r"\[reward\] weights(.|\n)*no reward named 'mtach'"):
        built("[reward.weights]\nmtach = 1.0")


def test_rewards_that_compare_say_so_themselves() -> None:
    class Comparing(Verifier):
        needs_reference = True

    named = [NamedReward(name="mine", reward=Comparing()), NamedReward(name="other", reward=Verifier())]
    assert comparing_rewards(named) == {"mine"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ('[reward]\ntype = "none"', False),
        ("[reward.weights]\nmatch = 1.0\ntoy = 1.0", True),
        ("[reward.weights]\nmatch = 1.0\nnone = 1.0", False),  # a sum without one of its parts is no verdict
    ],
)
def test_whether_anything_is_judged_is_one_answer_by_name_and_by_object(
    text: str, expected: bool, load: Callable[..., Any], toys: Path
) -> None:
    config, problems = load(f'[data]\nsource = "toy"\n{text}')
    assert not [problem for problem in problems if "none" not in str(problem)]
    context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
    rewards = [each.reward for each in build_rewards(config, context, None)]
    assert (has_verifier(config), judges(rewards)) == (expected, expected)


@pytest.fixture
def try_out(service: Callable[..., ScoringService]) -> Any:
    """`try_out("Sound", audit="warn")`: the trial of one of `user_rewards`; returns reward and service."""

    def run(kind: str, **settings: Any) -> tuple[Any, ScoringService]:
        reward = getattr(user_rewards, kind)()
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


KINDS = ("Sound", "OnlyEmpty", "ReadsOneFormat", "Slow", "Heavy", "Remote")


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


Make = Callable[..., ScoringService]


def test_whatever_goes_wrong_is_a_failed_score(
    service: Make, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.tasks.scoring.event_loop.JOIN_S", 0.2)  # one call ignores its cancellation
    wanted = {
        "busy": "RuntimeError: 429: too many requests",
        "hang": "timed out after 0.2 s",
        "ignore": "timed out after 0.2 s",
        "exit": "SystemExit: 1",
        "nan": "the reward returned nan, not a finite number",
    }
    acts = service(rewards.AsyncActs(), timeout_s=0.2, retries=1, max_failed_frac=1.0)
    with acts.batch() as batch:
        for text in (*wanted, "fine"):
            batch.submit(example, text)
        scores = batch.collect()
        assert [score.detail.partition(" (")[0] for score in scores] == [*wanted.values(), ""]
        assert "user_rewards.py:" in scores[0].detail
        assert scores[-1] == Score.of(0.5)
        assert batch.metrics()["timed_out_score_count"] == 2
    with service(rewards.AsyncActs(), retries=0, max_failed_frac=1.0, timeout_s=1.0).batch() as batch:
        batch.submit(example, "hang")
        batch.submit(example, "cancel")  # a reward that cancels everything hangs nothing
        assert {score.outcome for score in batch.collect(within_budget=False)} == {Outcome.FAILED}


@pytest.mark.slow
def test_waiting_for_a_place_is_no_scoring(service: Make, example: Example) -> None:
    acts = service(rewards.AsyncActs(), timeout_s=1.0, retries=0, cache=False, max_failed_frac=0.5)
    with acts.batch() as batch:
        for _ in range(8):  # twice all places
            batch.submit(example, "hang")
        for _ in range(8):
            batch.submit(example, "fine")
        scores = batch.collect()
    assert [score.outcome for score in scores] == [Outcome.FAILED] * 8 + [Outcome.SCORED] * 8


@pytest.mark.slow
def test_a_reward_that_does_not_await_is_found_out(service: Make, example: Example) -> None:
    acts = service(acts=rewards.AsyncActs(), match=rewards.Match(), timeout_s=0.5, retries=0, max_failed_frac=1.0)
    with acts.batch() as batch:
        batch.submit(example, "block")
        with pytest.raises(RewardError) as caught:
            batch.collect()
    assert codes_in(caught) == ["reward.blocks-loop"]
    assert "user_rewards.py:" in str(caught.value)
    with acts.batch() as batch:
        batch.submit(example, "7")
        assert batch.collect()[0].parts == {"acts": 0.5, "match": 1.0}


def test_figures_that_are_none_are_passed_over(
    service: Make, example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    acts = rewards.AsyncActs()
    acts.metrics = lambda: {"cost": float("nan")}
    with service(acts).batch() as batch:
        batch.submit(example, "fine")
        batch.collect()
        assert "cost" not in batch.metrics()
    assert "metrics() of reward 'the_reward' raised ValueError: cost = nan" in caplog.text
    acts = rewards.AsyncActs()
    with service(acts, cache=False).batch() as batch:
        for n in range(40):
            batch.submit(example, str(n))
        assert {score.value for score in batch.collect()} == {0.5}
        assert batch.metrics()["acts_calls"] == 40
    assert acts.most == 4, "no more than the concurrency at a time"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("concurrency", 0, "reward.bad-concurrency"), ("prepare", lambda: 1 / 0, "reward.cannot-prepare")],
)
def test_what_cannot_work_is_refused_at_the_start(name: str, value: Any, code: str, service: Make) -> None:
    acts = rewards.AsyncActs()
    setattr(acts, name, value)
    assert refused(service(acts).start) == [code]
