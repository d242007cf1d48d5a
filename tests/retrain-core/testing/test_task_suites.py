"""The suites of rewards, data sources and environments distinguish sound parts from broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.slow

Failures = Callable[..., dict[str, str]]
SOUND = (
    ("reward", "reward_parts.Sound"),
    ("reward", "reward_parts.SoundAsync"),
    ("data source", "source_parts.Source"),
    ("environment", "environment_parts.sound"),
)
REWARDS = (
    ("WrongArguments", "can_score", "score(example, text)"),
    ("NoScore", "can_score", "has no method score"),
    ("Unpicklable", "works_in_the_process_of_a_run", "lambda"),
    ("BreaksOnNothing", "survives_hostile_texts", "scoring nothing failed: IndexError"),
    ("NotANumber", "survives_hostile_texts", "finite number"),
    ("Hangs", "survives_hostile_texts", "scoring one long word failed"),
    ("DisagreesWithItsGold", "calls_its_gold_right", "'something else', but scores 0.0"),
    ("Noisy", "repeats_its_scores", "in another process"),
    ("WritesInfo", "leaves_examples_alone", "has changed an example"),
    ("BadMetrics", "reports_finite_metrics", "calls = nan"),
)
SOURCES = (
    ("Empty", "gives_examples", "no examples"),
    ("AList", "gives_examples", "returned list"),
    ("SharedIds", "names_examples_for_good", "['sum']"),
    ("Shuffled", "names_examples_for_good", "another order"),
    ("HoldsArrays", "holds_plain_data", "info of example 'sum-0' is not JSON"),
    ("EmptyChat", "can_be_put_to_the_model", "'sum-0' has the message {'role': 'user'}"),
    ("HalfACharacter", "can_be_put_to_the_model", "example sum-0: the tokenizer refuses the prompt"),
    ("BadVerifier", "brings_a_sound_verifier", "gold() of example 'sum-0'"),
)
ENVIRONMENTS = (
    ("never_ends", "plays_episodes_side_by_side", "6 episodes are still open after 128 turns"),
    ("forgets_one", "plays_episodes_side_by_side", "5 results for 6 episodes"),
    ("fails", "plays_episodes_side_by_side", "episode 0 ended with"),
    ("keeps_what_was_open", "drops_what_was_left_open", "4 results for 1 episodes"),
    ("breaks_on_nothing", "survives_hostile_replies", "RuntimeError: no action"),
    ("breaks_on_nothing", "ends_when_the_context_is_full", "environment_parts.py:"),
    ("asks_in_sets", "asks_in_plain_data", "the observation of episode 0 is not JSON"),
    ("asks_in_text", "asks_in_plain_data", "'And then?'"),
    ("cannot_travel", "plays_in_a_process_of_its_own", "lambda"),
)
QUICK = {"scoring": {"timeout_s": 1.0}}


@pytest.mark.parametrize(("kind", "part"), SOUND)
def test_sound_parts_pass(kind: str, part: str, failures: Failures) -> None:
    assert failures(kind, part) == {}


@pytest.mark.parametrize(("part", "check", "words"), REWARDS)
def test_broken_rewards_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures("reward", f"reward_parts.{part}", only=check, config=QUICK)[check]


@pytest.mark.parametrize(("part", "check", "words"), SOURCES)
def test_broken_sources_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures("data source", f"source_parts.{part}", only=check)[check]


@pytest.mark.parametrize(("part", "check", "words"), ENVIRONMENTS)
def test_broken_environments_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures("environment", f"environment_parts.{part}", only=check)[check]


def test_a_reward_is_tried_on_the_examples_of_a_named_source(failures: Failures) -> None:
    config = {"data": {"source": "source_parts.SharedIds"}}
    assert failures("reward", "reward_parts.Sound", only="calls_its_gold_right", config=config) == {}
    empty = {"data": {"source": "source_parts.Empty"}}
    found = failures("reward", "reward_parts.Sound", only="calls_its_gold_right", config=empty)
    assert "gave no examples to try the reward on" in found["calls_its_gold_right"]
