"""What a policy, or a careless reward, can throw at scoring: all of it ends in one of three outcomes, nothing dies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from retrain.api import Example, Outcome, PluginContext, Seeds, load_plugins
from retrain.run.configure import load_checked
from retrain.tasks.scoring.build import build_rewards
from retrain.tasks.scoring.service import ScoringService
from tests.end_to_end.running import SMALL, records, retrain

CARELESS = r'''
import os, sys, time

def score(response, reference):
    """Does what the completion says; otherwise judges it."""
    if "EXIT" in response:
        os._exit(7)
    if "QUIT" in response:
        sys.exit(1)
    if "SLEEP" in response:
        time.sleep(1e6)
    if "FORK" in response and os.fork() == 0:
        time.sleep(1e6)
    if "FILL" in response:
        return float(len(bytearray(50 * 2**30)))
    return float("7" in response)
'''
TOWERS = [r"\boxed{" + "^{".join(["9"] * n) + "}" * n for n in (3, 5, 50, 500)]
TOWERS += [r"\boxed{10^{10^{10}}}", r"\boxed{(((7!)!)!)!}", r"\boxed{9**9**9**9}", r"\boxed{2^{-9^{9^9}}}"]
BROKEN = [
    *(r"\boxed{", r"\boxed{{{{", r"\boxed{}}}}", r"\boxed{\boxed{}}", r"\boxed{\boxed{7}}", "}{" * 50),
    r"\boxed{\frac{1}{",
]
LARGE = [r"\boxed{" + "7" * 10**6 + "}", r"\boxed{" * 10**5, "x" * 10**6 + r"\boxed{7}", r"\boxed{" + "(" * 10**5 + "}"]
ODD = [
    *("\0", "\\boxed{\0}", "\\boxed{7\0}", "\ud800", "\u202e\\boxed{7}", "", r"\boxed{}", r"\boxed{\infty}"),
    *(r"\boxed{nan}", r"\boxed{\int_0^1 x^{x^{x}} dx}", r"\boxed{\sum_{n=1}^{10^9} n!}", r"\boxed{\sqrt[10^9]{7}}"),
    r"\boxed{7,7,7,7}",
]
DEEDS = ["EXIT", "QUIT", "FORK"] * 4 + ["SLEEP", "FILL"] * 3


def hostile_texts() -> list[str]:
    """1,000 of them; most are small variations, since equal ones are scored once."""
    texts = [*TOWERS, *BROKEN, *LARGE, *ODD, *(f"{deed} {n}" for n, deed in enumerate(DEEDS))]
    kinds = [*TOWERS, *BROKEN, *ODD]
    return texts + [f"{kinds[n % len(kinds)]} {n}" for n in range(1000 - len(texts))]


@pytest.mark.long
def test_a_thousand_hostile_completions_each_end_in_one_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careless.py").write_text(CARELESS)
    monkeypatch.chdir(tmp_path)
    plugins = load_plugins()
    flags = ["--reward-weights", '{"math": 1.0, "custom": 0.1}', "--reward-custom-module", "careless"]
    limits = [
        "--scoring-timeout-s",
        "2",
        "--scoring-retries",
        "0",
        "--scoring-memory-gb",
        "4",
        "--scoring-workers",
        "2",
    ]
    config = load_checked([*flags, *limits, "--scoring-workers", "2", "--data-source", "arithmetic"], plugins).config
    context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins)
    example = Example(id="seven", prompt="3 + 4 =", reference="7")
    texts = hostile_texts()
    with ScoringService(build_rewards(config, context, None), config.scoring) as service, service.batch() as batch:
        for text in texts:
            batch.submit(example, text)
        scores = batch.collect(within_budget=False)
    assert len(scores) == 1000
    outcomes = Counter(score.outcome for score in scores)
    assert sum(outcomes.values()) == 1000
    by_text = dict(zip(texts, scores, strict=True))
    for text, score in by_text.items():
        assert (score.value is not None) == (score.outcome is Outcome.SCORED), text[:60]
    for number, deed in enumerate(DEEDS):
        wanted = Outcome.SCORED if deed == "FORK" else Outcome.FAILED
        assert by_text[f"{deed} {number}"].outcome is wanted, deed
    assert by_text["x" * 10**6 + r"\boxed{7}"].value == pytest.approx(1.1)
    assert by_text[r"\boxed{}"].value == 0.0
    assert outcomes[Outcome.SCORED] > 500


@pytest.mark.slow
@pytest.mark.long
def test_a_run_survives_a_reward_that_exits_and_hangs(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(CARELESS.replace('"EXIT" in response', '"1" in response and "2" in response'))
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    limits = ("--scoring-max-failed-frac", "1", "--scoring-audit", "warn", "--scoring-timeout-s", "5")
    reward = ("--reward-type", "custom", "--reward-custom-module", "careless")
    outcome = retrain(*SMALL, *limits, *reward, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    lines = records(tmp_path / "logs/tiny/metrics.jsonl")
    failed = sum(int(line["failed_score_count"]) for line in lines)
    assert failed > 0
    kept = list((tmp_path / "logs/tiny/failures").glob("step_*.json"))
    assert kept
    again = retrain("audit", "--replay", str(tmp_path / "logs/tiny/failures"), "--json", cwd=tmp_path)
    assert again.code == 1, again.err
    assert "exited with code 7" in again.out
