"""Every source with the rewards that fit it passes the audit that a run begins with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Config, Example, Kind, PluginContext, Plugins, Reward, Seeds, resolve
from retrain.kernel.contracts.tasks import TimedScore
from retrain.tasks.audit.probes import gold_of
from retrain.tasks.audit.report import AuditReport
from retrain.tasks.audit.verifier_audit import audit
from retrain.tasks.scoring.verdict import verdict
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.math_reward import make_math
from tests.kit.shared import first_or_long
from tests.kit.tables import cells

Load = Callable[..., Any]
ANSWERS = cells(r"""
    \frac{1}{2}  -3  0  1  2\sqrt{3}  \left(-\infty, 2\right]  (3, -1)  x^2 - 4x + 1
    \begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}  10\%  \$18.50  \text{(C)}  12,345  \frac{\pi}{6}  60^\circ
    \{1, 2, 3\}
""")


def audited(reward: Reward, examples: Sequence[Example], limit: int = 16) -> AuditReport:
    """As a run does it, but in this process; the prompt stands in a chat."""

    def scorer(pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        scores = []
        for example, text in pairs:
            started = time.perf_counter()
            score = verdict(reward.score(example, text))
            scores.append(TimedScore(score=score, seconds=time.perf_counter() - started))
        return scores

    def rendered(example: Example) -> str:
        return f"user\n{example.prompt}\nPut your final answer in \\boxed{{}}.\nassistant\n"

    return audit(examples, scorer, limit=limit, gold=gold_of([reward]), rendered=rendered)


@pytest.fixture
def make(plugins: Plugins) -> Callable[[str], Reward]:
    """`make("match")`: a reward of this distribution with its default settings."""

    def build(name: str) -> Reward:
        found = resolve(plugins, Kind.REWARD, name, where="test")
        reward: Reward = found.target(PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=plugins))
        prepare = getattr(reward, "prepare", None)
        if prepare is not None:
            prepare()
        return reward

    return build


@pytest.fixture
def math_folder(tmp_path: Path) -> Path:
    rows = [
        {"problem": f"Problem {i}: find it.", "solution": rf"It is $\boxed{{{a}}}$."} for i, a in enumerate(ANSWERS)
    ]
    (tmp_path / "geometry.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("reward", first_or_long(["match", "math"]))
@pytest.mark.parametrize("source", first_or_long(["arithmetic", "math", "files"]))
def test_match_and_math_on_the_sources(
    load: Load, make: Callable[[str], Reward], math_folder: Path, source: str, reward: str
) -> None:
    tasks = {"prompt": "Which number follows 6?", "answer": 7}, {"prompt": "And 007?", "answer": "008"}
    (math_folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    given = {
        "arithmetic": {},
        "math": {"path": str(math_folder), "options": {"subjects": ["geometry"]}},
        "files": {"path": str(math_folder / "tasks.jsonl")},
    }[source]
    report = audited(make(reward), load(source, **given).examples)
    assert not report.findings
    assert report.gold_correct == report.examples


def test_countdown_with_its_own_verifier(load: Load, tmp_path: Path) -> None:
    rows = [{"nums": [44, 19, 35], "target": 98}, {"nums": [3, 3, 8, 8], "target": 24}, {"nums": [1, 2], "target": 99}]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = load("countdown", path=str(tmp_path))
    report = audited(loaded.reward, loaded.examples)
    assert not report.findings
    assert (report.gold_correct, report.gold_unknown) == (2, 1)  # nobody can make 99 of 1 and 2


def test_math_verify_alone_is_stopped(load: Load, plugins: Plugins) -> None:
    tables = {"reward": RewardTable.model_validate({"strict": False})}
    reward = make_math(PluginContext(config=Config(tables=tables), seeds=Seeds(0), plugins=plugins))
    reward.prepare()
    report = audited(reward, load("arithmetic").examples, limit=2)
    errors = {finding.check for finding in report.errors}
    assert errors >= {"restated", "hedged", "negated"}
    assert report.gold_correct == 2


@pytest.mark.usefixtures("one_entries_process")
@pytest.mark.parametrize("name", ["chain_sum", "intermediate_integration", "graph_color"])
@pytest.mark.slow
def test_reasoning_gym_with_its_own_verifiers(load: Load, name: str) -> None:
    loaded = load("reasoning_gym", options={"name": name, "size": 24})
    report = audited(loaded.reward, loaded.examples)
    assert not report.findings
    assert report.gold_unknown == (16 if name == "graph_color" else 0)
