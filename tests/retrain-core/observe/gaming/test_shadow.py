"""`[reward] shadow`: recorded beside the reward wherever a run scores, trained nowhere, and never the end of a run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Group, Outcome, Score
from retrain.observe.gaming.shadow import eval_fields, step_fields
from retrain.run.check import identity_of
from retrain.use.evaluate.evaluation import set_records
from retrain.use.evaluate.subjects import scores_of
from tests.kit.groups import completion_of, group_of
from tests.kit.overlapped import GENERATIONS, lines, steps
from tests.kit.problems import codes_in

Command = Callable[..., Any]

# Scores, says nothing, raises or ends its process, as the text wants it.
MOODY = """
from retrain.api import Score
def score(example, text):
    mood = sum(map(ord, text)) % 4
    if mood == 0:
        return Score.no_verdict("cannot tell")
    if mood == 1:
        raise ValueError("api_key=sk-SECRET1234567890abcdef" + chr(27) + "[31m")
    return 0.25 * mood
def calls():
    with open("calls", "a+") as file:
        file.write("x")
        return file.tell()
def fails(example, text):
    if calls() < 26:
        raise ValueError("down")
    return 1.0
"""
NEW = re.compile("shadow_|eval_shadow_|gaming_(evidence|unconfirmed)")  # an alarm compares reward and shadow
NOT_TIMED = ("time_s", "tokens_per_s")


@pytest.fixture
def moody(tmp_path: Path) -> list[str]:
    """Arguments of a run whose shadow has every outcome."""
    (tmp_path / "moody.py").write_text(MOODY, encoding="utf-8")
    return ["--reward-shadow", "custom", "--reward-shadow-params", '{"custom_module": "moody"}']


def without_shadow(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records without the time and what the shadow adds."""
    kept = {name for record in records for name in record if not (NEW.match(name) or name.endswith(NOT_TIMED))}
    return [{name: record[name] for name in record.keys() & kept} for record in records]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--refill", "2", "--scoring-cache", "false"),
        pytest.param(("--soft-overlong", "1", "--control", "random_reward"), marks=pytest.mark.slow),
        pytest.param(("--backend", "toy_overlap"), marks=pytest.mark.slow),
        pytest.param(("--backend", "toy_buffered", "--max-staleness", "2"), marks=pytest.mark.slow),
    ],
    ids=["refill", "shaped and controlled", "overlapped", "ahead"],
)
def test_its_fields(
    run_overlapped: Command, command: Command, moody: list[str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    base = ("--backend", "toy", "--reward-type", "toy", "--max-steps", "2", "--eval-examples", "2", "--eval-every", "2")
    assert run_overlapped(*base, *arguments, "--log-dir", "alone").code == 0
    result = run_overlapped(*base, *arguments, *moody, "--log-dir", "shadowed")
    assert result.code == 0, result.err
    alone, shadowed = tmp_path / "alone", tmp_path / "shadowed"
    for name in ("metrics.jsonl", GENERATIONS, "eval.jsonl"):
        assert without_shadow(lines(alone, name)) == without_shadow(lines(shadowed, name))
        assert not any(NEW.match(field) for line in lines(alone, name) for field in line)
    final = "adapter/final/logits.json"
    assert (alone / final).read_bytes() == (shadowed / final).read_bytes()
    told = Counter(line["shadow_outcome"] for line in lines(shadowed, GENERATIONS))
    assert set(told) == {"scored", "no_verdict", "failed"}
    counted = steps(shadowed)
    assert sum(line["shadow_failed_count"] for line in counted) == told["failed"]
    assert sum(line["shadow_no_verdict_count"] for line in counted) == told["no_verdict"]
    assert sum(line["failed_score_count"] for line in counted) == 0
    for line in lines(shadowed, GENERATIONS):
        assert (line["shadow_reward"] is None) == (line["shadow_outcome"] != "scored")
    assert "sk-SECRET" not in (shadowed / GENERATIONS).read_text()
    evaluated = lines(shadowed, "eval.jsonl")
    assert all(len(line["shadow_scores"]) == len(line["scores"]) for line in evaluated)
    rate = f"{100 * counted[-1]['shadow_correct_rate']:.1f}%"
    assert f"% | shadow={rate} | " in result.out
    assert f"{rate} by its shadow" in command("status", "shadowed").out
    assert command("report", "shadowed", "-o", "page.html").code == 0
    assert "Correct rate by the shadow, training batches" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_broken_shadow_ends_nothing_and_is_spared(run_overlapped: Command, moody: list[str], tmp_path: Path) -> None:
    params = '{"custom_module": "moody", "custom_function": "fails"}'
    down = ("--reward-shadow", "custom", "--reward-shadow-params", params, "--set", "scoring.retries=0")
    size = ("--backend", "toy", "--batch-size", "4", "--group-size", "2", "--scoring-cache", "false")
    refused = run_overlapped(*size, *down, "--scoring-audit", "warn", "--log-dir", "refused")
    assert refused.code == 1
    assert "[reward] shadow: reward 'custom' failed on all" in " ".join(refused.err.split())
    (tmp_path / "calls").unlink()
    result = run_overlapped(*size, *down, "--max-steps", "6")
    assert result.code == 0, result.err
    found = steps(tmp_path / "logs/train")
    assert [line["shadow_judged_count"] for line in found] == [0, 0, 0, 0, 1, 8]
    assert [line["shadow_failed_count"] for line in found] == [8, 8, 8, 8, 7, 0]
    assert "shadow_mean_reward" not in found[0]
    assert (tmp_path / "calls").stat().st_size == 3 * 8 + 1 + 1 + 8


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[reward]\nshadow = "none"', "reward.judges-nothing"),
        ('[reward]\nshadow = "mth"', "no reward named 'mth'"),
        ('[reward]\nshadow = "math"\nshadow_params = {strickt = true}', "reward.bad-shadow-params"),
        ('[reward]\nshadow = "math"\nshadow_params = {strict = "no"}', "reward.bad-shadow-params"),
        ('[reward]\nshadow = "math"\nshadow_params = {type = "match"}', "reward.key-of-run"),
        ('[reward]\nshadow = "math"\nshadow_params = {judge_model = "m"}', "read only by reward 'judge'"),
        ("[reward]\nshadow_params = {strict = true}", "reward.no-shadow"),
        ('[reward]\nshadow = "toy"\n[environment]\nprovider = "toy_turns"', "reward.no-text-to-shadow"),
        ('[reward]\nshadow = "toy"\ntype = "none"\n[eval]\nexamples = 0', "reward.no-score-to-shadow"),
    ],
)
def test_what_makes_no_sense_is_refused(command: Command, toys: Path, tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "retrain.toml").write_text(text, encoding="utf-8")
    result = command("explain", "retrain.toml")
    assert result.code == 2
    assert what in (codes_in(result.err) if what.startswith("reward.") else result.err)


@pytest.mark.slow
def test_the_audit_tries_it_too(
    command: Command, toys: Path, tokenizer_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pays.py").write_text("def score(example, text):\n    return 1.0\n", encoding="utf-8")
    toy = ["audit", "--model", str(tokenizer_folder), "--data-source", "toy", "--reward-type", "toy", "--examples", "2"]
    fit = command(*toy, "--reward-shadow", "toy")
    assert fit.code == 0, fit.err
    assert "Shadow audit: 2 examples" in fit.out
    assert "'toy' is the trained reward" in caplog.text
    lenient = ["--reward-shadow", "custom", "--reward-shadow-params", '{"custom_module": "pays"}']
    unfit = command(*toy, *lenient, "--json")
    assert unfit.code == 1
    found = json.loads(unfit.out)
    assert (found["ok"], found["shadow"]["ok"]) == (True, False)


def test_its_own_module_belongs_to_the_identity_of_a_run(
    load: Command, moody: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tables: Any
) -> None:
    from retrain.kernel.plugins.discover import load_plugins

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as the command line does with the current folder
    config, problems = load("", *moody)
    assert not problems
    assert "moody.py" in {file.name for file in identity_of(config, load_plugins({}), tables).code}


SCORES = st.one_of(st.floats(-2.0, 2.0).map(Score.of), st.just(Score.no_verdict("?")), st.just(Score.failed("broken")))


def group(pairs: list[tuple[Score, Score]], round_: int = 0) -> Group:
    """A group of one-token completions, each with the score of the reward and of the shadow."""
    scores = [replace(reward, shadow=shadow) for reward, shadow in pairs]
    return group_of([completion_of(prompt=1)] * len(pairs), scores, round=round_)


@settings(max_examples=30)
@given(groups=st.lists(st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=6), min_size=1, max_size=4))
def test_rates_are_over_what_both_judged_in_the_first_round(groups: list[list[tuple[Score, Score]]]) -> None:
    made = [group(pairs) for pairs in groups]
    found = step_fields([*made, group([(Score.of(1.0), Score.failed("?"))], round_=1)])
    both = [(a.value, b.value) for pairs in groups for a, b in pairs if a.value is not None and b.value is not None]
    assert found["shadow_judged_count"] == len(both)
    failed = sum(shadow.outcome is Outcome.FAILED for pairs in groups for _, shadow in pairs)
    assert found["shadow_failed_count"] == failed + 1
    in_evaluation = eval_fields([each.scores for each in made], 0.5)
    if not both:
        assert "shadow_gap" not in found
        assert not in_evaluation
        return
    assert found["shadow_mean_reward"] == pytest.approx(np.mean([b for _, b in both]))
    assert found["shadow_correct_rate"] == pytest.approx(np.mean([b > 0.5 for _, b in both]))
    assert found["shadow_gap"] == pytest.approx(np.mean([a - b for a, b in both]), abs=1e-12)
    assert in_evaluation["eval_shadow_gap"] == found["shadow_gap"]


@settings(max_examples=30)
@given(pairs=st.lists(st.tuples(SCORES, SCORES), min_size=1, max_size=5))
def test_a_stored_evaluation_has_the_scores_of_both_again(pairs: list[tuple[Score, Score]]) -> None:
    made = group(pairs)
    config = SimpleNamespace(scoring=SimpleNamespace(correct_above=0.5))
    each: Any = SimpleNamespace(name="s", cluster="", context=SimpleNamespace(config=config))
    prompt: Any = SimpleNamespace(example=made.example)
    evaluated = ([made.completions], [made.scores])
    [record] = set_records(each, [prompt], evaluated, 3)
    stored = scores_of(json.loads(json.dumps(record)))
    assert [(s.outcome, s.value) for s in stored] == [(s.outcome, s.value) for s in made.scores]
    shadows = [s.shadow for s in stored]
    assert [(s.outcome, s.value) for s in shadows if s] == [(b.outcome, b.value) for _, b in pairs]
