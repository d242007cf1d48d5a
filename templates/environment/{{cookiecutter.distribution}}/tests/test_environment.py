"""The conformance checks for environments, and tests of this game."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import pytest
from retrain.api import Action, StopReason
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import Arguments, GuessNumber


@pytest.mark.parametrize("check", conformance("environment", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def play(secret: int, guesses: list[str], max_turns: int = 4) -> GuessNumber:
    """Play one game with these guesses."""
    environment = GuessNumber(Arguments(highest=20, tasks=20), max_turns)
    example = next(example for example in environment.load().examples if example.reference == str(secret))
    observations = environment.reset([example])
    for guess in guesses:
        assert observations, "the game is over too early"
        text = r"It is \boxed{" + guess + "}."
        observations = environment.step({0: Action(text=text, stop_reason=StopReason.EOS)})
    assert not observations, "the game continues"
    return environment


@pytest.mark.parametrize(
    ("guesses", "expected"),
    [(["7"], 0.7 + 0.3 * 3 / 4), (["10", "what?", "5", "7"], 0.7), (["1", "2", "3", "4"], 0.0)],
)
def test_the_score_is_finding_it_and_finding_it_soon(guesses: list[str], expected: float) -> None:
    (result,) = play(7, guesses).results()
    assert result.score.value == pytest.approx(expected)
    assert result.hit_turn_limit == (expected == 0.0)


def test_hints_say_where_the_number_is() -> None:
    game = play(7, ["10", "5", "7"]).games[0]
    hints = [str(message["content"]) for message in game.messages if message["role"] == "user"][1:3]
    assert "lower than 10" in hints[0]
    assert "higher than 5" in hints[1]
