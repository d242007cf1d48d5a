"""Which examples of a source are used: each once, and none that the rewards cannot score."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config import plugin_tables
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.config.schema import DataTable
from retrain.kernel.contracts.tasks import LoadedData
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.types import Example, Score
from retrain.tasks.prompts import usable_examples
from retrain.tasks.scoring.build import uses_own_verifier
from tests.kit.problems import codes_in


class RewardTable(plugin_tables.RewardTable):
    """With the default that retrain-rewards gives."""

    type: str = "match"


class Verifier:
    def score(self, example: Example, text: str) -> Score:
        return Score.of(1.0)


def config(**reward: Any) -> Config:
    """A configuration whose `[reward]` was written in a file."""
    origins = {f"reward.{name}": Origin(layer=Layer.FILE, place="retrain.toml:3") for name in reward}
    return Config(tables={"reward": RewardTable(**reward), "data": DataTable(source="math")}, origins=origins)


def usable(data: LoadedData, config: Config, **more: Any) -> Any:
    """The usable examples where `match` and `math`, and they alone, compare with the reference."""
    names = set(config.reward.weights) or {config.reward.type}
    return usable_examples(data, config, comparing=names & {"match", "math"}, **more)


def task(name: str, reference: str = "1", prompt: Any = "p", **more: Any) -> Example:
    return Example(id=name, prompt=prompt, reference=reference, **more)


def data(*examples: Any, reward: Any = None) -> LoadedData:
    return LoadedData(examples=tuple(examples), reward=reward)


def test_repeated_examples_are_dropped_and_counted() -> None:
    chat = [{"role": "user", "content": "a"}]
    kept, notes = usable(
        data(task("a"), task("b", prompt=chat), task("a"), task("b", prompt=tuple(chat)), task("c")), config()
    )
    assert [e.id for e in kept] == ["a", "b", "c"]
    assert notes == ("math: 2 repeated examples dropped",)


@pytest.mark.parametrize("other", [{"reference": "2"}, {"prompt": "q\x1b"}, {"info": {"k": 1}}, {"task": "t"}])
def test_one_id_for_two_tasks_is_an_error_that_shows_both(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        usable(data(task("a"), task("a", **other)), config())
    (problem,) = caught.value.problems
    assert problem.code == "data.id-twice"
    assert problem.why.startswith("'p' and ")
    assert "\x1b" not in str(problem)


@pytest.mark.parametrize("reward", [{}, {"type": "match"}, {"type": "math"}, {"weights": {"math": 1.0, "len": 0.1}}])
def test_silence_must_not_become_correct(reward: dict[str, Any]) -> None:
    kept, notes = usable(data(task("a"), task("b", ""), task("c", " \n")), config(**reward))
    assert [e.id for e in kept] == ["a"]
    assert "2 of 3 examples have no reference answer (first: b): left out" in notes[0]
    with pytest.raises(ConfigError) as caught:
        usable(data(task("b", ""), task("c", "")), config(**reward))
    assert codes_in(caught) == ["data.no-references"]


@pytest.mark.parametrize("reward", [{"type": "judge"}, {"type": "my.own"}, {"weights": {"custom": 1.0}}])
def test_a_reward_that_needs_no_reference_keeps_them_and_says_so(reward: dict[str, Any]) -> None:
    kept, notes = usable(data(task("a"), task("b", "")), config(**reward))
    assert len(kept) == 2
    assert notes == ("math: 1 of 2 examples have no reference answer (first: b)",)


def test_a_verifier_of_the_sources_own_needs_no_reference() -> None:
    judged = data(task("a", ""), task("b"), reward=Verifier())
    assert usable(judged, config()) == (list(judged.examples), ())
    assert uses_own_verifier(judged, config())
    assert not uses_own_verifier(judged, config(type="match"))
    assert not uses_own_verifier(judged, config(weights={"match": 1.0}))
    assert not uses_own_verifier(data(task("a")), config())
    assert len(usable(data(task("a", "")), config(type="match"), is_environment=True)[0]) == 1


@pytest.mark.parametrize(("reward", "key"), [({"type": "match"}, "type"), ({"weights": {"math": 1.0}}, "weights")])
def test_a_comparing_reward_on_tasks_without_references_is_refused_before_scoring(
    reward: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        usable(data(task("a"), task("b", ""), reward=Verifier()), config(**reward))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("reward.needs-references", f"retrain.toml:3 [reward] {key}")
    complete = data(task("a"), task("b"), reward=Verifier())
    assert len(usable(complete, config(**reward))[0]) == 2


@pytest.mark.parametrize(
    "example",
    [
        {"id": "a"},
        task(5),  # type: ignore[arg-type]
        task(""),
        task("a", 7),  # type: ignore[arg-type]
        task("a", prompt=7),
        task("a", prompt=[]),
        task("a", prompt=["x"]),
        task("a", prompt=[{"role": "user"}]),
    ],
)
def test_what_is_no_example_is_the_plugins_fault(example: Any) -> None:
    shown = re.escape(repr(example)[:50])
    with pytest.raises(PluginError, match=f"example 1 of .*{shown}") as caught:
        usable(data(task("first"), example), config())
    assert codes_in(caught) == ["data.not-an-example"]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "1"])), max_size=12))
def test_what_is_kept_is_unique_in_order_and_has_a_reference(drawn: list[tuple[str, str]]) -> None:
    tasks = [task(name + reference, reference) for name, reference in drawn]
    if tasks and not any(e.reference for e in tasks):
        return
    kept, _ = usable(data(*tasks), config())
    assert [e.id for e in kept] == list(dict.fromkeys(e.id for e in tasks if e.reference))
