"""v1 environments, played by a script: real tasksets of the library, nothing of theirs replaced."""

from dataclasses import replace

import pytest

from retrain.api import Outcome
from retrain.tasks.environment import EnvironmentProcess
from tests.kit.problems import refused

pytestmark = pytest.mark.tasksets

CALL = '<tool_call>{"name": "adder_add", "arguments": {"a": 1, "b": 5}}</tool_call>'


def test_a_single_turn_is_scored_by_its_rewards(sit):
    table = sit("taskset-sum")
    first, _, third = table.data.examples
    assert first.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1 = ?"}]
    assert (first.reference, third.reference) == ("1", "5")
    played = table.play([first, first, third], [["it is 1"], ["2"], ["5"]])
    assert played.values == [2.0, 0.0, 2.0]
    assert [each.prompt for each in played.seen[0].values()] == [first.prompt, first.prompt, third.prompt]
    assert played.results[0].score.parts == {"right": 1.0, "length": 7.0, "spaces": 2.0}
    more = sit("taskset_sum", args={"size": 5}).data.examples
    assert [one.id.split("-")[-1] for one in table.data.examples] == [one.id.split("-")[-1] for one in more[:3]]
    assert len({one.id for one in more}) == 5


def test_a_reward_that_breaks_is_never_a_zero_and_a_measure_that_breaks_is_left_out(sit):
    table = sit("taskset-sum")
    said = ["judge raises", "nan", "", "measure raises 1", "measure is nan 1"]
    played = table.play([table.data.examples[0]] * 5, [[text] for text in said])
    assert played.values == [None, None, 0.0, 2.0, 2.0]
    assert [result.score.outcome for result in played.results[:3]] == [Outcome.FAILED, Outcome.FAILED, Outcome.SCORED]
    assert "no such verdict" in played.details[0]
    assert "nan" in played.details[1]
    assert [set(result.score.parts) for result in played.results[3:]] == [{"right"}, {"right"}]


def test_an_environment_that_plays_the_user(sit):
    table = sit("taskset_guess", timeout_s=3.0, endless_tasks=12)
    three = table.data.examples[2]
    played = table.play([three] * 4, [["1", "4", "3"], ["3"], ["hang"], ["raise"]])
    assert played.values == [1.0, 1.0, None, None]
    assert played.seen[2][0].prompt[-4:] == [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Too low. Guess again."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Too high. Guess again."},
    ]
    assert played.details[2] == "the environment took longer than timeout_s = 3 s"
    assert "the environment broke" in played.details[3]
    assert [example.reference for example in table.data.examples] == [str(n) for n in range(1, 13)]
    assert "the first of an endless taskset" in table.data.notes[0]
    capped = sit("taskset_guess", max_turns=2, endless_tasks=3)
    played = capped.play([capped.data.examples[2]] * 2, [["1", "2"], ["1", "3"]])
    assert (played.values, [each.hit_turn_limit for each in played.results]) == ([0.0, 1.0], [True, False])
    assert list(capped.environment.reset(capped.data.examples[:2])) == [0, 1]
    assert [(each.hit_turn_limit, each.score.value) for each in capped.environment.results()] == [(True, 0.0)] * 2


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_is_in_the_next_observation(sit):
    table = sit("taskset_tools")
    unknown = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    played = table.play([table.data.examples[0]] * 2, [[CALL, "6"], [unknown, "7"]])
    assert played.values == [1.0, 0.0]
    assert played.seen[0][0].tools[0]["function"]["name"] == "adder_add"
    said, result = played.seen[1][0].prompt[1:]
    assert said == {"role": "assistant", "content": CALL}
    assert (result["role"], result["content"]) == ("tool", "6")
    assert played.seen[1][1].prompt[2]["content"] == "error: unknown tool 'nope'"


@pytest.mark.slow
def test_a_tool_is_called_from_the_process_in_which_a_run_keeps_its_environment(sit):
    table = sit("taskset_tools")
    hosted = EnvironmentProcess(table.environment, name="tools", timeout_s=30.0, memory_gb=4.0)
    try:
        played = replace(table, environment=hosted, data=hosted.load()).play(table.data.examples, [[CALL, "6"]])
    finally:
        hosted.close()
    assert (played.values, played.details) == ([1.0], [""])


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "code"), [("ends", "tools-failed"), ("away", "remote-tools")])
def test_tools_that_cannot_be_started_are_refused_at_load(sit, fault, code):
    assert refused(sit, "taskset_broken_tools", args={"fault": fault}) == [f"environment.{code}"]


@pytest.mark.parametrize(
    ("name", "args", "code"),
    [
        ("taskset_two_agents", {}, "several-agents"),
        ("taskset_in_container", {}, "foreign-runtime"),
        *(("taskset-sum", args, "bad-args") for args in ({"sizes": 3}, {"size": "many"})),
        ("taskset-sum", {"size": 0}, "no-tasks"),
        ("json", {}, "not-an-environment"),
    ],
)
def test_a_taskset_that_cannot_be_trained_on_is_refused(sit, name, args, code):
    assert refused(sit, name, args=args) == [f"environment.{code}"]


def test_a_classic_environment_is_refused_by_a_library_without_them(sit, monkeypatch, tmp_path):
    import importlib.util

    (tmp_path / "classic_one.py").write_text("def load_environment(): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verifiers.legacy" else find(name))
    assert refused(sit, "classic_one") == ["environment.classic-unsupported"]
