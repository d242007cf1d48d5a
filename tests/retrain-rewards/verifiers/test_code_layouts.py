"""Tests of programs in the layouts of well-known data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Config, Example, Kind, LoadedData, PluginContext, Plugins, RewardError, Seeds
from retrain.kernel.config.schema import DataTable
from retrain.kernel.plugins.resolve import build_part
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.code.layouts import CallTest, CodeTest, StdinTest, read_tests
from tests.kit.problems import codes_in, refused

APPS = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
HUMANEVAL = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\n"


def read(tests: Any, column: str = "tests", **info: Any) -> tuple[Any, ...]:
    example = Example(id="e", prompt="p", reference="", info={**info, "tests": tests})
    return read_tests(example, column, in_reference=False)


def test_pairs_of_input_and_output() -> None:
    wanted = (StdinTest(stdin="1 2\n", stdout="3\n"), StdinTest(stdin="3\n4", stdout="7"))
    assert read([{"input": "1 2\n", "output": "3\n"}, {"input": ["3", "4"], "output": 7}]) == wanted
    assert read(APPS) == read(json.dumps(APPS)) == wanted
    example = Example(id="e", prompt="p", reference=json.dumps(APPS))
    assert read_tests(example, "input_output", in_reference=True) == wanted
    stdin = {"input": "1", "output": "2", "testtype": "stdin"}
    assert read(json.dumps([stdin])) == (StdinTest(stdin="1", stdout="2"),)


def test_calls_of_a_function() -> None:
    wanted = CallTest(function="add", arguments=[1, [2]], expected=3, is_json=True)
    assert read({"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3]]}) == (wanted,)
    assert read(
        None, verification={"tests": [{"function": "add", "args": [1, [2]], "output": 3}]}, column="verification.tests"
    ) == (wanted,)
    assert read([{"function": "add", "args": [1, [2]], "output": 3}]) == (wanted,)
    livecode = {"input": "1\n[2]\n", "output": "3", "testtype": "functional"}
    assert read([livecode], metadata='{"func_name": "add"}') == (wanted,)


def test_statements_and_code() -> None:
    simple, more = read(["assert add(1, b=-2) == [(3,)]", "assert abs(add(1, 2) - 3) < 1e-9"])
    assert simple == CallTest(function="add", arguments=[1], keywords={"b": -2}, expected=[(3,)])
    assert isinstance(more, CodeTest)
    assert more.names == ["add"]
    (prepared,) = read(["assert near(f(1), 3)"], test_imports=["from math import isclose as near"])
    assert prepared.names == ["f"]
    assert prepared.source.startswith("from math import isclose as near\n")
    (check,) = read(HUMANEVAL, entry_point="double")
    assert check.names == ["double"]
    assert check.source.endswith("\ncheck(double)\n")


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        *(("no-tests", tests) for tests in (None, [], "  ", {"inputs": [], "outputs": []})),
        ("silent-tests", [{"input": "1", "output": " \n"}]),
        *(("unreadable-tests", tests) for tests in ({"inputs": ["1", "2"], "outputs": ["1"]}, [{"input": "1"}], [5])),
        *(("unreadable-tests", tests) for tests in (["assert f(1 == 2"], ["assert True"], "def check(f):\n    pass\n")),
    ],
)
def test_tests_that_any_program_would_pass_or_none_are_no_tests(code: str, tests: Any) -> None:
    with pytest.raises(RewardError, match="example e") as caught:
        read(tests)
    assert codes_in(caught) == [f"reward.{code}"]


def test_tests_may_stand_in_the_answer_column(plugins: Plugins, tmp_path: Path) -> None:
    """Reward `code` reads them; for any other reward a list is no reference."""
    tests = [{"input": "1", "output": "2"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "Add one.", "tests": tests}), encoding="utf-8")
    data = DataTable(source="files", path=str(tmp_path / "p.jsonl"), answer_key="tests")

    def load(reward: str) -> LoadedData:
        config = Config(tables={"data": data, "reward": RewardTable(type=reward)})
        context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins)
        loaded: LoadedData = build_part(Kind.DATA_SOURCE, "files", "test", context, config.data.options, "test").load()
        return loaded

    (example,) = load("code").examples
    assert read_tests(example, "tests", in_reference=True) == (StdinTest(stdin="1", stdout="2"),)
    assert refused(load, "match") == ["data.bad-reference"]
