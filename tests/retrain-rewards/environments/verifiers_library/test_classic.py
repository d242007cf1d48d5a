"""Classic environments, played by a script: real environments of the library, nothing of theirs replaced."""

import asyncio
import json
import pickle
import random

import pytest

from retrain.api import Outcome, StopReason
from tests.kit.problems import refused

pytestmark = pytest.mark.classic

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 5}}\n</tool_call>'


def test_a_single_turn_is_scored_as_by_the_rubric_itself(sit):
    import verifiers as vf
    from verifiers.types import RolloutTiming

    table = sit("single-sum")
    said = ["It is 1", "no", "a very long way to say that it is 1", "1"]
    played = table.play([table.data.examples[0]] * 4, [[text] for text in said])

    rubric = vf.load_environment("single-sum").rubric

    def state(text):
        completion = [vf.AssistantMessage(content=text)]
        values = {"prompt": [], "completion": completion, "answer": "1", "trajectory": [{}], "info": {}, "task": {}}
        return vf.State(**values, timing=RolloutTiming())

    direct = [state(text) for text in said]
    for one in direct:
        one["trajectory"] = [{"reward": None, "advantage": None}]
    asyncio.run(rubric.score_group(direct))
    assert played.values == [one["reward"] for one in direct] == [1.5, 0.5, 1.0, 1.5]
    assert [dict(result.score.parts) for result in played.results] == [one["metrics"] for one in direct]
    data = sit("single-sum", args={"size": 3, "split": "test"}).data
    first = data.examples[0]
    assert len(data.examples) == 3
    assert first.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1 = ?"}]
    assert (first.reference, first.task) == ("1", "sum")
    assert first.info["info"] == {"n": 0, "split": "test"}
    assert json.loads(json.dumps(dict(first.info))) == first.info
    assert data.notes[1] == "single-sum: 1 duplicates dropped"
    ids = [example.id for example in data.examples]
    assert ids == [example.id for example in sit("single-sum", args={"size": 3, "split": "test"}).data.examples]
    assert set(ids).isdisjoint(example.id for example in sit("single-sum").data.examples)


def test_a_guessing_game_over_two_turns(sit):
    table = sit("guess_number")
    seven = next(example for example in table.data.examples if example.reference == "7")
    game = [[r"\boxed{5}", r"Try another: \boxed{7}"], [r"\boxed{8}", r"\boxed{9}"], [r"\boxed{7}"], ["?", "?"]]
    played = table.play([seven] * 4, game)
    assert played.values == [1.0, 0.0, 1.0, 0.0]
    assert sorted(played.seen[1]) == [0, 1, 3]
    assert played.seen[1][0].prompt == [
        {"role": "user", "content": "I think of a number from 1 to 9. Guess it."},
        {"role": "assistant", "content": r"\boxed{5}"},
        {"role": "user", "content": "Too low. Guess again."},
    ]
    assert played.seen[1][1].prompt[-1]["content"] == "Too high. Guess again."
    assert played.results[1].score.parts == {"right": 0.0, "distance": 2.0, "num_turns": 2.0}
    assert not any(result.hit_turn_limit for result in played.results)
    first, second, third = table.data.examples[:3]
    groups = [first, first, second, second, third, third, first]
    played = table.play(groups, lambda number, turn, ask: rf"\boxed{{{2 if turn else number + 1}}}")
    assert [list(turn) for turn in played.seen] == [list(range(7)), [1, 2, 3, 4, 5, 6]]
    assert played.values == [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_rewards_of_turns_are_those_that_the_environment_gave_while_playing(sit):
    table = sit("guess_number", args={"pays_turns": True})
    seven = next(example for example in table.data.examples if example.reference == "7")
    played = table.play([seven] * 3, [[r"\boxed{5}", r"\boxed{7}"], [r"\boxed{7}"], ["?", "?"]])
    assert [result.turn_rewards for result in played.results] == [(0.25, 0.0), (), ()]
    assert played.values == [1.0, 1.0, None]
    assert "turn" in played.details[2]
    assert [r.turn_rewards for r in sit("guess_number").play([seven] * 2, lambda *_: "?").results] == [(), ()]


def test_open_episodes_are_scored_by_their_last_turn_and_dropped_by_a_reset(sit):
    import signal

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    table, other = sit("guess_number"), sit("single-sum")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert list(table.environment.reset(table.data.examples[:2])) == [0, 1]
    assert [(each.hit_turn_limit, each.score.value) for each in table.environment.results()] == [(True, 0.0)] * 2
    table.environment.reset(table.data.examples)
    played = table.play([table.data.examples[0], other.data.examples[0]], [[r"\boxed{1}"], []])
    assert played.values == [1.0, None]
    assert "no task single-sum" in played.details[1]
    assert other.play([other.data.examples[0]], [[""]]).values == [0.5], "an empty reply is an answer"


def test_a_tool_is_called_and_its_result_is_in_the_next_observation(sit):
    table = sit("tool_sum")
    scripts = [[CALL, "6"], ["6"], ["<tool_call>{]</tool_call>"], [f"I compute {CALL} now", "7"]]
    played = table.play([table.data.examples[0]] * 4, scripts)
    assert played.values == [1.0, 1.0, 0.0, 0.0]
    (schema,) = played.seen[0][0].tools
    assert schema["function"]["name"] == "add"
    assert json.loads(json.dumps(schema)) == schema
    said, result = played.seen[1][0].prompt[1:]
    assert said == {"role": "assistant", "content": CALL}  # word for word as it was sampled
    assert (result["role"], result["content"]) == ("tool", "6")
    assert played.seen[1][3].prompt[1]["content"] == f"I compute {CALL} now"
    assert played.results[0].score.parts["add_calls"] == 1.0
    assert table.play([table.data.examples[0]], [["it is 6"]], stop=StopReason.LENGTH).values == [1.0]
    assert table.environment._loop.episodes[0].result["is_truncated"]


def test_a_turn_cap_ends_the_episode_and_scores_it(sit):
    table = sit("guess_number", max_turns=1)
    five = next(example for example in table.data.examples if example.reference == "5")
    played = table.play([five] * 2, [[r"\boxed{5}"], [r"\boxed{4}"]])
    assert played.values == [1.0, 0.0]
    assert [result.hit_turn_limit for result in played.results] == [False, True]
    capped = sit("trouble", max_turns=1, args={"max_turns": -1})
    played = capped.play(capped.data.examples, [["a"], ["bb"], ["ccc"]])
    assert (played.values, [result.hit_turn_limit for result in played.results]) == ([1.0, 2.0, 3.0], [True] * 3)
    table = sit("trouble", args={"max_turns": 1, "grouped": True})
    first, second, _ = table.data.examples
    played = table.play([first, first, second], [["aa"], ["a"], ["a"]])
    assert played.values == [3.0, 1.0, 2.0]
    played = table.play([first, first, second], [["group raises"], ["a"], ["a"]])
    assert played.values == [None, None, 2.0]
    assert "rank raised ZeroDivisionError" in played.details[0]


@pytest.mark.parametrize(
    ("word", "detail"),
    [
        ("raise", "RuntimeError: the environment broke"),
        ("exit", "SystemExit: 3"),
        ("library error", "ToolError: the library's own error"),
    ],
)
def test_a_rollout_that_breaks_fails_alone(sit, word, detail):
    table = sit("trouble")
    played = table.play([table.data.examples[0]] * 3, [["a", "b"], [word], ["a", "cc"]])
    assert played.values == [1.0, None, 2.0]
    assert detail in played.details[1]
    assert played.results[1].score.outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("word", "detail"),
    [
        ("judge raises", "judged raised KeyError: 'no such verdict'"),
        ("nan", "judged returned nan"),
        ("infinite", "judged returned inf"),
        ("text", "judged raised ValueError: could not convert string to float"),
    ],
)
def test_a_reward_that_breaks_is_never_a_zero(sit, word, detail):
    table = sit("trouble", args={"max_turns": 1})
    played = table.play([table.data.examples[0]] * 2, [["a"], [word]])
    assert (played.values, played.results[1].score.outcome) == ([1.0, None], Outcome.FAILED)
    assert detail in played.details[1]


@pytest.mark.parametrize(
    ("word", "missing"),
    [("metric raises", "measured"), ("metric is nan", "measured"), ("group metric raises", "rank_measured")],
)
def test_a_metric_of_weight_0_that_breaks_costs_only_itself(sit, word, missing):
    table = sit("trouble", args={"max_turns": 1, "metrics": True})
    played = table.play([table.data.examples[0]], [[word]])
    assert played.values == [float(len(word))]
    measured = {name for name in ("measured", "rank_measured") if name in played.results[0].score.parts}
    assert measured == {"measured", "rank_measured"} - {missing}


@pytest.mark.slow
def test_what_hangs_is_cut_and_the_others_go_on(sit):
    table = sit("trouble", timeout_s=2.0)
    played = table.play([table.data.examples[0]] * 4, [["hang"], ["a", "b"], ["stubborn"], ["a", "judge hangs"]])
    assert played.values == [None, None, None, None]
    assert played.details[0] == "the environment took longer than timeout_s = 2 s" == played.details[2]
    assert played.details[1] == "scoring took longer than timeout_s = 2 s"  # it is scored with the one that hangs
    assert table.play([table.data.examples[0]] * 2, [["a", "b"], ["a", "cc"]]).values == [1.0, 2.0]


def test_it_pickles_small_after_loading_too(sit):
    table = sit("guess_number", args={"rounds": 50})
    table.play(table.data.examples[:1], [[r"\boxed{1}"]])
    text = pickle.dumps(table.environment)
    assert len(text) < 2000
    with pytest.raises(RuntimeError, match="load"):
        pickle.loads(text).reset(table.data.examples)

    def observed(table):
        played = table.play([table.data.examples[0]] * 20, lambda number, turn, ask: f"{number}")
        return [[(number, each.prompt) for number, each in turn.items()] for turn in played.seen]

    table = sit("trouble", args={"max_turns": 4}, seed=1)
    first = observed(table)
    random.seed(99)  # numbers drawn elsewhere must not matter
    assert observed(table) == first == observed(sit("trouble", args={"max_turns": 4}, seed=1))
    assert observed(sit("trouble", args={"max_turns": 4}, seed=2)) != first


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        *(("odd", {"kind": "evaluation"}, "evaluation-only"), ("odd", {"kind": "sandbox"}, "foreign-runtime")),
        *(("odd", {"kind": "pictures"}, "not-text"), ("single-sum", {"splitt": "test"}, "unknown-argument")),
        *(("single-sum", {"size": "many"}, "not-made"), ("json", {}, "not-an-environment")),
    ],
)
def test_an_environment_that_cannot_be_trained_on_is_refused(sit, name, args, code):
    assert refused(sit, name, args=args) == [f"environment.{code}"]


def test_a_mixture_is_played_by_each_of_its_environments(sit):
    table = sit("mixture")
    played = table.play(table.data.examples, [[r"\boxed{5}", r"\boxed{7}"], [r"\boxed{0.75}"]])
    assert played.values == [1.0, 1.0]
    assert played.results[0].score.parts["num_turns"] == 2.0
    broken = sit("mixture", args={"break_verifier": True})
    played = broken.play(broken.data.examples[1:2] * 2, [[r"\boxed{0.75}"], ["no box"]])
    assert played.values == [None, None], "never a zero"
    assert "Math verification failed" in played.details[0]
    story = sit("odd", args={"kind": "story"})
    played = story.play(story.data.examples, [[" time"]])
    assert (played.seen[0][0].prompt, played.values) == ("Once upon a", [5.0]), "plain text without a chat"
