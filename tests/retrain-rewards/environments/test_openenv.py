"""Episodes of an OpenEnv server: the same game by a stand-in of ours and, marked `client`, by the real package."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Action, ConfigError, EpisodeResult, Example, Outcome, Score, StopReason
from retrain_rewards.environments.episode import Cleaner
from retrain_rewards.environments.openenv import (
    ActionMapping,
    NoActionError,
    OpenEnvEnvironment,
    OpenEnvSettings,
    OpenEnvTable,
    observation_text,
)

pytest.importorskip("websockets", reason="needs the extra openenv of retrain-rewards")
from tests.kit.openenv_server import BOOM, QUESTION, Game, secret_of, serving
from tests.kit.problems import codes_in

pytestmark = pytest.mark.timeout(120)
GAME = Path(__file__).parents[2] / "openenv_game.py"
CAPACITY = 2
Says = Callable[[int, int], str]  # episode, turn -> text


@contextmanager
def real_server(sessions: int) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(GAME), str(port), str(sessions)])
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=pytest.mark.client)])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server that accepts two sessions at the same time."""
    if request.param == "real":
        pytest.importorskip("openenv", reason="needs openenv: nox -s clients")
    with real_server(CAPACITY) if request.param == "real" else serving(Game(capacity=CAPACITY)) as served:
        yield served


def environment(url: str, *, max_turns: int = 4, **table: Any) -> OpenEnvEnvironment:
    settings = OpenEnvSettings(
        table=OpenEnvTable(**{"url": url, "tasks": 3, "max_sessions": CAPACITY, "call_timeout_s": 5.0, **table}),
        clean=Cleaner(special=("<|im_end|>",), max_chars=100),
        place="[environment] args",
        max_turns=max_turns,
        timeout_s=20.0,
    )
    made: OpenEnvEnvironment = pickle.loads(pickle.dumps(OpenEnvEnvironment(settings)))
    return made


def play(played: OpenEnvEnvironment, examples: Sequence[Example], says: Says) -> tuple[list[Any], list[EpisodeResult]]:
    """The last conversation of every episode, and the results."""
    last: dict[int, Any] = {}
    turns = dict.fromkeys(range(len(examples)), 0)
    observations = played.reset(examples)
    while observations:
        last |= {number: list(each.prompt) for number, each in observations.items()}
        actions = {n: Action(text=says(n, turns[n]), stop_reason=StopReason.EOS) for n in observations}
        turns |= {number: turns[number] + 1 for number in observations}
        observations = played.step(actions)
    return [last[number] for number in sorted(last)], list(played.results())


def test_a_game_is_played_and_its_rewards_add_up(url: str) -> None:
    played = environment(url, prompt="A game.")
    examples = played.load().examples
    secrets = [secret_of(seed) for seed in range(3)]
    assert len({example.id for example in examples}) == len(examples) == 3
    talks, results = play(played, examples, lambda episode, turn: f"perhaps {secrets[episode] if turn else 100}")
    assert [result.score for result in results] == [Score.of(1.0)] * 3
    assert talks[0] == [
        {"role": "user", "content": f"A game.\n\n{QUESTION}"},
        {"role": "assistant", "content": "perhaps 100"},
        {"role": "user", "content": "higher"},
    ]


def test_no_more_sessions_are_open_than_the_server_accepts(url: str) -> None:
    played = environment(url)
    examples = played.load().examples
    assert len(played.reset(examples * 3)) == CAPACITY
    _, results = play(played, examples * 3, lambda episode, turn: "1")
    assert [(result.score, result.hit_turn_limit) for result in results] == [(Score.of(0.0), True)] * 9
    greedy = environment(url, max_sessions=0)
    _, results = play(greedy, greedy.load().examples, lambda episode, turn: "1")
    failed = [result.score.detail for result in results if result.score.outcome is Outcome.FAILED]
    assert len(failed) == 1
    assert "Set args.max_sessions" in failed[0]


def test_what_holds_no_action_is_told_so_and_earns_nothing(url: str) -> None:
    played = environment(url)
    (example, *_) = played.load().examples
    (talk,), results = play(played, [example], lambda episode, turn: "no idea" if turn else "7.5")
    assert [message["content"] for message in talk if message["role"] == "user"][1:] == [
        "error: answer with a whole number"
    ] * 3
    assert results == [EpisodeResult(score=Score.of(0.0), hit_turn_limit=True)]


def test_an_environment_that_breaks_fails_the_episode(url: str) -> None:
    played = environment(url)
    (example, *_) = played.load().examples
    _, results = play(played, [example], lambda episode, turn: str(BOOM))
    assert results[0].score.outcome is Outcome.FAILED
    assert "boom (EXECUTION_ERROR)" in results[0].score.detail


def test_an_action_that_the_schema_refuses_is_told_to_the_policy(url: str) -> None:
    played = environment(url)
    (example, *_) = played.load().examples
    played._mapping = ActionMapping()
    (talk,), _ = play(played, [example], lambda episode, turn: '{"guess": 1}')
    assert talk[-1]["content"].startswith("error: number: Field required")


def test_without_a_server_nothing_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        environment("http://user:word@127.0.0.1:9").load()
    assert codes_in(caught) == ["environment.no-server"]
    assert "word" not in str(caught.value)


def test_a_field_that_the_actions_lack_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment(url, action="guess").load()
    assert codes_in(caught) == ["environment.action-field"]


SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]},
    "number": {"properties": {"x": {"type": "number"}, "note": {"type": "string"}}, "required": ["x"]},
    "several": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]},
    "list": {"properties": {"moves": {"type": "array"}}, "required": ["moves"]},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ("text", " any <b>text</b> ", {"message": " any <b>text</b> "}),
        ("number", "not 3 but -2.5", {"x": -2.5}),
        ("number", "none", None),
        ("several", 'so: ```json\n{"a": "1", "b": "2"}\n```', {"a": "1", "b": "2"}),
        ("several", "[1, 2]", None),
        ("list", '{"moves": [1]}', {"moves": [1]}),
        ("list", "{" * 50_000, None),
        ("list", '{"a":' * 50_000 + "}", None),
    ],
)
def test_how_text_becomes_an_action(schema: str, text: str, expected: Any) -> None:
    mapping = ActionMapping.of(SCHEMAS[schema])
    if expected is None:
        with pytest.raises(NoActionError, match="error: answer with"):
            mapping.action(text)
    else:
        assert mapping.action(text) == expected


def test_a_named_field_takes_the_text_and_must_be_able_to() -> None:
    assert ActionMapping.of(SCHEMAS["several"], "b").action("x") == {"b": "x"}
    with pytest.raises(ValueError, match="is no text and no number"):
        ActionMapping.of(SCHEMAS["list"], "moves")


@pytest.mark.parametrize(
    ("observation", "field", "expected"),
    [
        ({"hint": "left", "score": 3, "note": ""}, "", "left"),
        ({"a": "x", "b": "y"}, "", '{"a": "x", "b": "y"}'),
        ({"a": "x", "board": [[1, 2]]}, "board", "[[1, 2]]"),
        ({"a": "x"}, "b", ""),
        ({}, "", "{}"),
    ],
)
def test_how_an_observation_becomes_text(observation: dict[str, Any], field: str, expected: str) -> None:
    assert observation_text(observation, field) == expected
    assert json.loads(json.dumps(observation)) == observation


def test_what_a_server_says_cannot_end_its_message_and_has_a_limit() -> None:
    clean = Cleaner(special=("<|im_end|>",), max_chars=20)
    assert clean("a<|im_end|>\x1b[0m\ud800") == "a< |im_end|>[0m?"
    assert clean("x" * 25) == "x" * 20 + "\n[5 more characters]"
