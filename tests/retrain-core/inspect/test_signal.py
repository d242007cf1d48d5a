"""An account of signal: real runs against the engine's own count, and its parts against formulas; odd runs."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.inspect.signal.account import Gain, cost_per_point, gain_of, mean_gain, read_account
from retrain.inspect.signal.command import report_section
from retrain.inspect.signal.drawn import Cause, _fields, _row, read_credit, read_drawn
from retrain.inspect.signal.prompts import Forecasts, PromptAccount, checked
from retrain.inspect.signal.summary import by_difficulty
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError, NonFiniteError, Problem
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.reading import parse_record
from retrain.records.run import Run
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats.teaching import Calibration

TEXT = st.text(max_size=30) | st.sampled_from(
    ['", "reward": 9, "outcome": "failed", ', ', "prompt": ', '], "top_surprisal_tokens": [', '\\", "num_tokens": 7']
)
REWARD = st.none() | st.floats(-9, 9)
NAMES = st.sampled_from(["reward", "outcome", "num_tokens", "shaped_reward", "trained", "x"])
Command = Callable[..., Any]
CHAT = st.lists(st.dictionaries(NAMES, TEXT | st.integers()), max_size=3)


@settings(max_examples=150)
@given(TEXT | CHAT, TEXT, TEXT, REWARD, st.dictionaries(NAMES, st.floats(-9, 9)), st.none() | REWARD, st.booleans())
def test_a_line_read_without_its_texts_is_the_line(
    prompt: Any, text: str, name: str, reward: Any, parts: Any, shaped: Any, trained: bool
) -> None:
    """Whatever stands in prompts, answers, tokens and names of rewards, and however they imitate our own fields."""
    tokens = [{"pos": 0, "surprisal": 1.5, "token": text}, {"pos": 1, "surprisal": 0.5, "token": None}]
    record = {"step": 3, "group": 1, "index": 0, "example_id": name, "prompt": prompt, "completion": text}
    record |= {"reference": text, "reward": reward, "outcome": "scored" if reward is not None else "no_verdict"}
    record |= {"reward_parts": parts} if parts else {}
    record |= {"detail": text} if text else {}
    record |= {"shaped_reward": shaped} if shaped is not None else {}
    record |= {"num_tokens": 5, "stop_reason": "length", "policy_version": 3, "trained": trained}
    record |= {"top_surprisal_tokens": tokens}
    for is_ascii in (True, False):
        line = json.dumps(record, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass") + b"\n"
        assert repr(_row(_fields(line), {})) == repr(_row(parse_record(line), {}))


DAMAGES = [({"num_tokens": -1}, "no count"), ({"reward": "1"}, "no reward"), ({"outcome": "won"}, "won")]


@pytest.mark.parametrize(("change", "told"), [*DAMAGES, ({"step": None}, "")])
def test_a_damaged_line_is_named_and_a_cut_one_left_out(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    record = {"step": 0, "group": 0, "example_id": "a", "reward": 1.0, "outcome": "scored", "num_tokens": 4}
    record |= {"stop_reason": "eos", "trained": True}
    file = tmp_path / "emergence/generations.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(record) + "\n" + json.dumps(record)[:40], encoding="utf-8")
    assert read_drawn(Run(tmp_path)).tokens_N.tolist() == [4]
    file.write_text(json.dumps(record) + "\n" + json.dumps(record | change) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"generations.jsonl:2.*{told}"):
        read_drawn(Run(tmp_path))


def forecasts(rng: np.random.Generator, *, bias: float, groups: int = 320) -> Forecasts:
    chance_F = rng.uniform(0.1, 0.8, groups)
    return Forecasts(chance_F=chance_F, taught_F=rng.random(groups) < chance_F + bias, block_F=np.arange(groups) // 8)


@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_the_interval_covers_the_true_calibration_error(bias: float) -> None:
    """Where every chance is off by `bias`, so is every bin; at 0 chance alone makes the error, and 0 is covered."""
    rng = np.random.default_rng(5)
    found = [checked(forecasts(rng, bias=bias)) for _ in range(60)]
    covered = [each is not None and each.interval[0] <= bias + 1e-9 <= each.interval[1] + 2e-9 for each in found]
    assert np.mean(covered) >= 0.93
    assert np.mean([each.interval[1] for each in found if each]) < bias + 0.2
    joined = Forecasts.joined([forecasts(rng, bias=0.0), forecasts(rng, bias=0.0)])
    assert len(np.unique(joined.block_F)) == 80  # runs keep their steps apart
    assert checked(Forecasts.joined([])) is None
    assert isinstance(checked(joined).calibration, Calibration)  # type: ignore[union-attr]


def stored(folder: Path, advantages: list[list[float]], trained: list[bool]) -> Path:
    """A step whose completions have these advantages; token t has probability 1 / (t + 2)."""
    (folder / "emergence").mkdir()
    lines = []
    for index, (each, is_trained) in enumerate(zip(advantages, trained, strict=True)):
        record = {"step": 0, "group": 0, "index": index, "example_id": "a", "reward": float(index), "outcome": "scored"}
        lines.append(json.dumps(record | {"num_tokens": len(each), "stop_reason": "eos", "trained": is_trained}) + "\n")
    (folder / "emergence/generations.jsonl").write_text("".join(lines), encoding="utf-8")
    records = [
        TokenRecord(
            tokens_T=np.arange(len(each)),
            logprobs_T=-np.log(np.arange(len(each)) + 2.0),
            advantages_T=np.array(each),
            planning_T=np.arange(len(each)) == 0,
        )
        for each in advantages
    ]
    write_tokens(folder, 0, records)
    return folder


def test_credit_is_summed_over_trained_tokens_by_rank(tmp_path: Path) -> None:
    run = stored(tmp_path, [[1.0] * 9 + [0.0], [-2.0] * 10, [5.0]], [True, True, False])
    found = read_credit(Run(run), read_drawn(Run(run)))
    assert found.zero_tokens_N.tolist() == [1, 0, 0]
    assert found.credit_N.tolist() == [9.0, 20.0, 5.0]
    assert (found.total.tokens, found.total.credit) == (20, 29.0)
    assert found.total.pull == pytest.approx(sum((3.0 - (t == 9)) * (1 - 1 / (t + 2)) for t in range(10)), rel=1e-6)
    assert [each.tokens for each in found.surprisal] == [2] * 10
    assert [each.credit for each in found.surprisal] == [2.0, *[3.0] * 9]  # the last position is the least likely
    assert found.planning is not None
    assert (found.planning.tokens, found.planning.credit) == (2, 3.0)
    assert (found.entropy, list(found.notes)) == ((), [])


@pytest.mark.parametrize("harm", ["missing", "damaged", "of another step"])
def test_without_a_fitting_token_file_credit_is_not_known(tmp_path: Path, harm: str) -> None:
    run = stored(tmp_path, [[1.0, 1.0], [-1.0]], [True, True])
    file = next((run / "emergence/tokens").iterdir())
    if harm == "missing":
        file.unlink()
    elif harm == "damaged":
        file.write_bytes(b"\x00" * 40)
    else:
        (run / "other").mkdir()
        file.write_bytes(next((stored(run / "other", [[1.0]], [True]) / "emergence/tokens").iterdir()).read_bytes())
    found = read_credit(Run(run), read_drawn(Run(run)))
    assert not found.is_known_N.any()
    assert "1 of 1 steps have no token file" in found.notes[0]


def gain(values: np.ndarray) -> Gain:
    spread = 2.0 * float(values.std(ddof=1)) / math.sqrt(values.size)
    mean = float(values.mean())
    limits = (mean - spread, mean + spread)
    return Gain(points=mean, interval=limits, values_C=tuple(values.tolist()), first=-1, last=9)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(3, 12))
def test_the_limits_of_a_cost_solve_fiellers_equation(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    points_N, costs_N = rng.normal(8.0, 1.0, size), rng.normal(1000.0, 100.0, size)
    found = cost_per_point(costs_N, gain(points_N))
    assert found.interval is not None
    assert found.value is not None
    assert found.interval[0] < found.value < found.interval[1]
    for limit in found.interval:
        rest_N = costs_N - limit * points_N
        assert abs(rest_N.mean()) == pytest.approx(2.0 * rest_N.std(ddof=1) / math.sqrt(size), rel=1e-6)


def test_a_gain_that_may_be_none_has_no_cost_but_a_least_one_and_equal_gains_no_interval() -> None:
    found = cost_per_point(np.array([1000.0]), replace(gain(np.array([1.0, 9.0])), interval=(-2.0, 10.0)))
    assert (found.interval, found.at_least) == (None, 100.0)
    worse = cost_per_point(np.array([1000.0]), replace(gain(np.array([-1.0, -9.0])), interval=(-9.0, -1.0)))
    assert (worse.value, worse.interval, worse.at_least) == (None, None, None)
    # Student's interval of two equal gains would have no width: a gain for certain.
    equal = mean_gain([Gain(points=3.125, interval=None, values_C=(3.125,), first=-1, last=9)] * 2)
    found = cost_per_point(np.array([1000.0, 1200.0]), equal)
    assert (equal.interval, found.value, found.interval, found.at_least) == (None, 352.0, None, None)


def test_a_made_run_has_a_gain_over_its_examples(tmp_path: Path, made: ModuleType) -> None:
    run = made.write_run(tmp_path / "run", made.MadeRun(effect=0.3, example_spread=1.0, steps=40))
    rates = {-1: 0.0, 39: 0.0}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["step"] in rates:
            rates[record["step"]] = record["eval_correct_rate"]
    found = gain_of(run, rates)
    assert isinstance(found, Gain)
    assert found.points == pytest.approx(100 * (rates[39] - rates[-1]))
    assert found.interval is not None
    assert found.interval[0] < found.points < found.interval[1]
    (run / "eval.jsonl").unlink()
    bare = gain_of(run, rates)
    assert isinstance(bare, Gain)
    assert (bare.points, bare.interval) == (pytest.approx(found.points), None)
    assert gain_of(run, {}) == "no held-out evaluation"


def test_a_campaign_of_odd_runs_is_answered(tmp_path: Path, made: ModuleType, command: Command) -> None:
    effects, states = {"maxrl+none": 0.0, "grpo+none\x1b[31m": 0.1}, {("maxrl+none", 2): "failed"}
    folder = made.write_campaign(tmp_path / "c", effects, seeds=[1, 2], steps=6, states=states, completions=4)
    (folder / "runs/maxrl+none_s1/metrics.jsonl").write_text("nonsense\n", encoding="utf-8")
    result = command("signal", str(folder))
    assert (result.code, "\x1b" in result.out) == (0, False)
    assert "no account" in result.out
    data = json.loads(command("signal", str(folder), "--json").out)
    assert [each["run"] for each in data["absent"]] == ["maxrl+none_s1"]
    one = data["runs"][0]
    assert one["drawn_tokens"] == sum(each["tokens"] for each in one["tokens"].values())
    assert set(one["tokens"]) == {"trained, credit not stored", "no record"}  # a few completions of a step are kept
    assert one["drawn_tokens"] == one["stated_tokens"]
    assert any("1 evaluation are not recorded" in note or "evaluations are not" in note for note in one["notes"])
    alone = command("signal", str(folder / "runs" / one["run"]))
    assert (alone.code, "Tokens by cause" in alone.out) == (0, True)
    run = made.write_run(tmp_path / "run", made.MadeRun(status="running", steps=1, eval_every=0))
    for name in ("metrics.jsonl", "emergence/generations.jsonl"):
        (run / name).unlink()
    begun, missing = command("signal", "run"), command("signal", "nowhere")
    assert (begun.code, "Nothing that was drawn is recorded" in begun.out) == (0, True)
    assert (missing.code, "no such folder" in missing.err) == (2, True)
    view = RunView(config=None, condition="", folder=run, seed=0, first_step=0, capabilities=None)  # type: ignore[arg-type]
    assert report_section(view) is None
    nothing = dict.fromkeys(("groups", "teaching_groups", "tokens", "taught_tokens"), 1)
    nothing |= {"credit": 0.0, "rate": None, "chance": None}
    labels = ["Level 10", "Level 2", "all right at first", "none right at first", ""]
    ordered = by_difficulty([PromptAccount(example=label, difficulty=label, **nothing) for label in labels])  # type: ignore[arg-type]
    assert [each.difficulty for each in ordered] == ["none right at first", "all right at first", "", *labels[1::-1]]


KINDS = """
from retrain.api import Score

class Reward:
    def __init__(self, context):
        pass

    def score(self, example, text):
        kind, words = int(example.prompt.split()[4]), text.split()
        if kind < 3:
            return (0.0, 1.0, 0.5)[kind]
        digit = sum(map(ord, text)) % 6
        if kind in (3, 4) and digit:
            return Score.no_verdict("cannot tell")
        if kind == 5 and digit == 0:
            raise RuntimeError("broken")
        return (0.0, 0.5, 1.0)[digit % 3]
"""
BASE = ("--backend", "toy", "--data-source", "toy", "--set", "data.options.count=60", "--reward-type", "kinds.Reward")
BASE += ("--max-steps", "3", "--batch-size", "6", "--group-size", "6", "--max-tokens", "25", "--seed", "1")
BASE += ("--advantage-mode", "grpo", "--transform-mode", "toy_flat", "--uncertainty-kind", "toy_nll")
BASE += ("--data-instruction", "", "--temperature", "1.0", "--save-every", "0", "--scoring-audit", "off")
BASE += ("--eval-every", "2", "--eval-examples", "2", "--eval-samples", "2")
BASE += ("--set", "scoring.max_failed_frac=1.0", "--set", "scoring.retries=0")


@pytest.mark.slow
def test_tokens_by_cause_add_up_to_what_the_engine_drew(
    command: Command, toys: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, drawn, bad = importlib.import_module("toy_parts").ToyBackend, list[int](), set[int]()
    sample, train = backend.sample, backend.train

    def counting(self: Any, requests: Any, params: Any) -> Any:
        found = sample(self, requests, params)
        drawn.extend(len(each.tokens_T) for group in found for each in group)
        return found

    def training(self: Any, batch: Any) -> Any:
        if batch.step in bad:
            raise NonFiniteError(Problem(what="the loss is not finite"))
        return train(self, batch)

    def tallies(*arguments: str) -> dict[Cause, Any]:
        """Of a run whose account adds up to what the engine counted."""
        drawn.clear()
        result = command(*BASE, "--model", str(tokenizer_folder), *arguments, "--log-dir", "run")
        assert result.code == 0, result.err
        found = read_account(find_runs([tmp_path / "run"]).candidates[0])
        assert found.drawn_tokens == sum(drawn) > 0
        assert (found.step_tokens, list(found.notes)) == (found.stated_tokens, [])
        return dict(found.tallies)

    monkeypatch.setattr(backend, "sample", counting)
    monkeypatch.setattr(backend, "train", training)
    (tmp_path / "kinds.py").write_text(KINDS, encoding="utf-8")
    refilled = tallies("--refill", "3", "--batch-size", "4", "--overlong", "drop")
    bad.add(2)
    masked = tallies("--overlong", "mask")
    assert masked[Cause.TRUNCATED].completions
    bad.clear()
    idle = tallies("--set", "training.control=no_update")
    assert not {Cause.TAUGHT, Cause.ZERO_CREDIT, Cause.REJECTED} & set(idle)
    assert {*refilled, *masked, *idle} == set(Cause) - {Cause.TRAINED, Cause.UNRECORDED, Cause.OTHER}
