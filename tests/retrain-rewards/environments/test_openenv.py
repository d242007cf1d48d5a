"""Episodes of an OpenEnv server: the same game by a stand-in of ours and, marked `client`, by the real package."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Action, ConfigError, EpisodeResult, Outcome, Score, StopReason
from retrain_rewards.environments import openenv
from retrain_rewards.environments.episode import Cleaner

pytest.importorskip("websockets", reason="needs the extra openenv of retrain-rewards")
from tests.kit.http_handler import on_a_port
from tests.kit.openenv_server import BOOM, QUESTION, Game, secret_of, serving
from tests.kit.problems import codes_in, refused

pytestmark = pytest.mark.timeout(120)
GAME = Path(__file__).parents[2] / "kit" / "openenv_game.py"
CAPACITY = 2


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=pytest.mark.client)])
def url(request):
    """A server that accepts two sessions at the same time."""
    if request.param == "real":
        pytest.importorskip("openenv", reason="needs openenv: nox -s clients")
    with on_a_port(GAME, str(CAPACITY)) if request.param == "real" else serving(Game(capacity=CAPACITY)) as served:
        yield served


def environment(url, *, max_turns=4, **table):
    settings = openenv.OpenEnvSettings(
        table=openenv.OpenEnvTable(
            **{"url": url, "tasks": 3, "max_sessions": CAPACITY, "call_timeout_s": 20.0, **table}
        ),
        clean=Cleaner(special=("<|im_end|>",), max_chars=100),
        place="[environment] args",
        max_turns=max_turns,
        timeout_s=60.0,
    )
    made = pickle.loads(pickle.dumps(openenv.OpenEnvEnvironment(settings)))
    return made


def play(played, examples, says):
    """The last conversation of every episode, and the results."""
    last = {}
    turns = dict.fromkeys(range(len(examples)), 0)
    observations = played.reset(examples)
    while observations:
        last |= {number: list(each.prompt) for number, each in observations.items()}
        actions = {n: Action(text=says(n, turns[n]), stop_reason=StopReason.EOS) for n in observations}
        turns |= {number: turns[number] + 1 for number in observations}
        observations = played.step(actions)
    return [last[number] for number in sorted(last)], list(played.results())


def test_a_game_is_played_and_its_rewards_add_up(url):
    played = environment(url, prompt="A game.")
    examples = played.load().examples
    secrets = [secret_of(seed) for seed in range(3)]
    assert len({example.id for example in examples}) == len(examples) == 3
    talks, results = play(played, examples, lambda episode, turn: f"perhaps {secrets[episode] if turn else 100}")
    assert [result.score for result in results] == [Score.of(1.0)] * 3
    assert [result.turn_rewards for result in results] == [(0.0, 1.0)] * 3
    assert talks[0] == [
        {"role": "user", "content": f"A game.\n\n{QUESTION}"},
        {"role": "assistant", "content": "perhaps 100"},
        {"role": "user", "content": "higher"},
    ]


def test_no_more_sessions_are_open_than_the_server_accepts(url):
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


def test_what_is_no_action_earns_nothing_and_a_server_that_breaks_fails_the_episode(url):
    played = environment(url)
    (example, *_) = played.load().examples
    (talk,), results = play(played, [example], lambda episode, turn: "no idea" if turn else "7.5")
    said = [message["content"] for message in talk if message["role"] == "user"]
    assert said[1:] == ["error: answer with a whole number"] * 3
    assert results == [EpisodeResult(score=Score.of(0.0), hit_turn_limit=True, turn_rewards=(0.0,) * 4)]
    _, results = play(played, [example], lambda episode, turn: str(BOOM))
    assert results[0].score.outcome is Outcome.FAILED
    assert "boom (EXECUTION_ERROR)" in results[0].score.detail
    played._mapping = openenv.ActionMapping()
    (talk,), _ = play(played, [example], lambda episode, turn: '{"guess": 1}')
    assert talk[-1]["content"].startswith("error: number: Field required")
    assert refused(environment(url, action="guess").load) == ["environment.action-field"]
    with pytest.raises(ConfigError) as caught:
        environment("http://user:word@127.0.0.1:9").load()
    assert codes_in(caught) == ["environment.no-server"]
    assert "word" not in str(caught.value)


SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["message"]},
    "number": {"properties": {"x": {"type": "number"}, "note": {"type": "string"}}, "required": ["x"]},
    "several": {"properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]},
    "list": {"properties": {"moves": {"type": "array"}}, "required": ["moves"]},
}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        *(("text", " any <b>text</b> ", {"message": " any <b>text</b> "}), ("number", "not 3 but -2.5", {"x": -2.5})),
        *(("number", "none", None), ("several", 'so: ```json\n{"a": "1", "b": "2"}\n```', {"a": "1", "b": "2"})),
        *(("several", "[1, 2]", None), ("list", '{"moves": [1]}', {"moves": [1]}), ("list", "{" * 50_000, None)),
        ("list", '{"a":' * 50_000 + "}", None),
    ],
)
def test_how_text_becomes_an_action(schema, text, expected):
    mapping = openenv.ActionMapping.of(SCHEMAS[schema])
    if expected is None:
        with pytest.raises(openenv.NoActionError, match="error: answer with"):
            mapping.action(text)
    else:
        assert mapping.action(text) == expected
    assert openenv.ActionMapping.of(SCHEMAS["several"], "b").action("x") == {"b": "x"}
    with pytest.raises(ValueError, match="is no text and no number"):
        openenv.ActionMapping.of(SCHEMAS["list"], "moves")


@pytest.mark.parametrize(
    ("observation", "field", "expected"),
    [
        *(({"hint": "left", "score": 3, "note": ""}, "", "left"), ({"a": "x", "b": "y"}, "", '{"a": "x", "b": "y"}')),
        *(({"a": "x", "board": [[1, 2]]}, "board", "[[1, 2]]"), ({"a": "x"}, "b", ""), ({}, "", "{}")),
    ],
)
def test_how_an_observation_becomes_text(observation, field, expected):
    assert openenv.observation_text(observation, field) == expected
    clean = Cleaner(special=("<|im_end|>",), max_chars=20)
    assert clean("a<|im_end|>\x1b[0m\ud800") == "a< |im_end|>[0m?", "it cannot end its message"
    assert clean("x" * 25) == "x" * 20 + "\n[5 more characters]"
