"""Further sets of a run: `[eval.sets.NAME]`, their metrics, their lines of eval.jsonl, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.load import TableEntry
from retrain.kernel.registry import Plugins
from retrain.observe.metrics.evaluate import rate_interval
from retrain.run.check import identity_of
from retrain.tools.capacity.workload import workload_of
from retrain.use.evaluate.sets import problems_of

Read = Callable[[Path], list[dict[str, Any]]]
TOML = """
[eval]
examples = 2
samples = 2
every = 1

[eval.sets.same]
options = { count = 30 }
examples = 4

[eval.sets.words]
source = "files"
path = "words.jsonl"
prompt_key = "q"
answer_key = "a"
reward = { type = "match", answer = "last_number" }
max_tokens = 2
greedy = true
cluster = "book"

[eval.sets.own]
source = "own"

[eval.sets.named]
source = "own"
reward = "near"
"""


@pytest.fixture
def run(command: Callable[..., Any], near_arguments: list[str], tmp_path: Path) -> Callable[..., Any]:
    """`run("--log-dir", "a")`: two steps of the toys with held-out examples and further sets."""
    (tmp_path / "sets.toml").write_text(TOML, encoding="utf-8")
    return lambda *arguments: command("sets.toml", *near_arguments, "--max-steps", "2", *arguments)


def test_sets_are_scored_at_every_evaluation_and_change_nothing_else(
    run: Callable[..., Any], lines: Read, tmp_path: Path
) -> None:
    done = run("--log-dir", "a")
    assert done.code == 0, done.err
    plain = run("--log-dir", "b", "--eval-sets", "{}")
    assert plain.code == 0, plain.err
    ours, theirs = lines(tmp_path / "a/metrics.jsonl"), lines(tmp_path / "b/metrics.jsonl")
    sets = ("eval_same_", "eval_words_", "eval_own_", "eval_named_")
    for with_sets, without in zip(ours, theirs, strict=True):
        left = {k: v for k, v in with_sets.items() if not k.startswith(sets) and not k.endswith("time_s")}
        assert left == {k: v for k, v in without.items() if not k.endswith("time_s")}
    last = ours[-1]
    assert (last["eval_same_examples"], last["eval_same_samples"]) == (4, 2)
    assert (last["eval_words_examples"], last["eval_words_samples"]) == (4, 1)
    assert 0 <= last["eval_same_ci_low"] <= last["eval_same_correct_rate"] <= last["eval_same_ci_high"] <= 1
    assert {"eval_same_pass_at_2", "eval_words_pass_at_1"} <= last.keys()
    assert "[eval.sets.same] 10 of 30 examples left out: they are trained on" in done.out
    # A source with a verifier of its own is judged by it, unless the set names a reward.
    assert (last["eval_own_correct_rate"], last["eval_named_correct_rate"]) == (1.0, 0.0)

    records = lines(tmp_path / "a/eval.jsonl")
    assert [line["step"] for line in records] == [-1] * 14 + [0] * 14 + [1] * 14
    for step, metrics in ((-1, ours[0]), (1, last)):
        for name, prefix in (("held_out", "eval_"), ("same", "eval_same_"), ("words", "eval_words_")):
            own = [line for line in records if (line["step"], line["set"]) == (step, name)]
            flags = [right for line in own for right in line["correct"]]
            assert sum(flags) / len(flags) == metrics[f"{prefix}correct_rate"], "the record says what the metric says"
            assert len(own) == metrics[f"{prefix}examples"]
            sizes = {len(line[each]) for line in own for each in ("scores", "lengths", "stops")}
            assert sizes == {metrics[f"{prefix}samples"]}
    words = [line for line in records if line["set"] == "words"][:4]
    assert [line["cluster"] for line in words[:3]] == ["b0", "b1", "b0"]
    assert words[3]["cluster"] == words[3]["example"], "without a value in the column an example stands for itself"
    last_words = [line for line in records if (line["step"], line["set"]) == (1, "words")]
    rates_E = np.array([float(line["correct"][0]) for line in last_words])
    clusters_E = [line["cluster"] for line in last_words]
    limits = last["eval_words_ci_low"], last["eval_words_ci_high"]
    assert limits == rate_interval(rates_E, 1, clusters_E) != rate_interval(rates_E, 1), "clusters widen the interval"
    assert {length for line in words for length in line["lengths"]} <= {1, 2}
    assert all(line["cluster"] == line["example"] for line in records if line["set"] != "words")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('sorce = "toy"', ("[eval.sets.a]: unknown option 'sorce'", "use 'source'")),
        ('reward = "mach"', ("[eval.sets.a], as [reward] type: ", "'mach'", "use 'match'")),
        ('reward = { tipe = "match" }', ("[eval.sets.a] reward: unknown option 'tipe'", "use 'type'")),
        ("samples = 2\ngreedy = true", ("[eval.sets.a] samples: 2 samples of one greedy answer are all equal",)),
        ("temperature = 0.0", ("[eval.sets.a].temperature: ", "Input should be greater than 0")),
        ('reward = "none"', ("[eval.sets.a]: the set has no reward",)),
        ('source = "files"\noptions = { nothing = 1 }', ("[eval.sets.a], as [data] options", "'nothing'")),
    ],
)
def test_a_fault_is_named_with_its_place(
    keys: str, expected: tuple[str, ...], load: Callable[..., Any], plugins: Plugins
) -> None:
    config, problems = load(f"[eval]\nexamples = 2\n\n[eval.sets.a]\n{keys}\n")
    assert not problems
    (found,) = map(str, problems_of(config, plugins))
    for part in ("retrain.toml:4 [eval.sets.a]", *expected):
        assert part in found


@pytest.mark.parametrize("name", ["held_out", '"a b"', '"é"', '"<x>"', '"4"'])
def test_a_name_becomes_part_of_metrics_names(name: str, load: Callable[..., Any], plugins: Plugins) -> None:
    config, _ = load(f"[eval.sets.{name}]\nexamples = 4\n")
    (found,) = map(str, problems_of(config, plugins))
    assert "cannot be a set's name" in found


WORDS = {"source": "files", "path": "words.jsonl", "prompt_key": "q", "answer_key": "a"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "[eval.sets.t]: all 12 examples are trained on"),
        (WORDS | {"examples": 9}, "[eval.sets.t] examples: 9 examples wanted, but the set has 4"),
        (WORDS | {"cluster": "bok"}, "[eval.sets.t] cluster: no example has 'bok'"),
        (WORDS | {"path": "word.jsonl"}, "did you mean 'words.jsonl'?"),
    ],
    ids=["trained", "examples", "cluster", "path"],
)
def test_a_set_that_the_data_does_not_give_is_refused(
    run: Callable[..., Any], values: dict[str, Any], expected: str
) -> None:
    refused = run("--log-dir", "a", "--eval-examples", "0", "--eval-sets", json.dumps({"t": values}))
    assert refused.code == 2
    assert expected in refused.err


def test_the_data_of_a_set_is_part_of_what_a_run_is(
    load: Callable[..., Any],
    tables: Mapping[str, TableEntry],
    plugins: Plugins,
    near_arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge.py").write_text("def score(example, text): return 1.0\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/more.jsonl").write_text('{"prompt": "ok ?", "answer": "1"}\n')
    reward = 'reward = { type = "custom", custom_module = "judge.py" }'
    config, problems = load(f'{TOML}\n[eval.sets.mine]\nsource = "files"\npath = "folder"\n{reward}\n')
    assert not problems
    found = identity_of(config, plugins, tables)
    assert {"words.jsonl", "folder/more.jsonl"} <= {file.name for file in found.data}
    assert "judge.py" in {file.name for file in found.code}
    # So are they counted where time is forecast, and told by `explain`.
    assert workload_of(config).eval_completions == 2 * 2 + 4 * 2  # sets of unknown size are not counted
    rows = [each for each in plugins.notify("retrain_explain", config=config, plugins=plugins) if "eval_sets" in each]
    assert rows[0]["eval_sets"]["words"] == "files words.jsonl, match, all examples x 1, greedy"


@pytest.mark.long
def test_a_run_with_nothing_but_a_set_shows_it_everywhere(
    run: Callable[..., Any], command: Callable[..., Any], lines: Read, tmp_path: Path
) -> None:
    sets = json.dumps({"words": WORDS})
    done = run("--log-dir", "logs/a", "--eval-examples", "0", "--eval-sets", sets)
    assert done.code == 0, done.err
    assert [line["set"] for line in lines(tmp_path / "logs/a/eval.jsonl")] == ["words"] * 12
    last = lines(tmp_path / "logs/a/metrics.jsonl")[-1]
    assert "eval_correct_rate" not in last
    rate = last["eval_words_correct_rate"]
    assert f"Eval after step 1, words | correct={100 * rate:.1f}% [" in done.out
    (found,) = json.loads(command("status", "logs", "--json", "--all").out)["runs"]
    assert found["eval_rates"] == {"words": rate}
