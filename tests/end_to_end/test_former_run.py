"""A run that was stopped before the kernel and the packages on it were separate continues as if nothing had changed.

`former_run/run` was made by the tree before that change: `builtin:tiny`, stopped by SIGTERM after step 4 of 8.
`expected.json` is what that same tree made of it when it was never stopped. Products have been computed in another
order since then, and arithmetic differs from one kind of processor to another: the numbers agree up to rounding where
the fixture was made on the same; elsewhere the run has to load and to reach its end.
"""

from __future__ import annotations

import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.end_to_end.running import retrain, untimed

FORMER = Path(__file__).with_name("former_run")
ADDED_SINCE = {"kl_mean", "kl_k1_mean", "lr", "updates", "reward_p10", "reward_p50", "reward_p90"}
ADDED_TO_EVALUATIONS = {"eval_mean_reward", "eval_reward_p10", "eval_reward_p50", "eval_reward_p90"}

CHANGED_SINCE = {"eval_ci_low", "eval_ci_high"}  # Wilson's limits then, exact binomial ones now


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@pytest.mark.long
def test_a_run_made_before_the_two_floors_continues_with_the_same_numbers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(FORMER / "run", run)
    outcome = retrain("--resume", "run", "--log-dir", "run", cwd=tmp_path, environ={"OMP_NUM_THREADS": "1"})
    assert outcome.code == 0, outcome.err
    assert "Resuming run at step 5" in outcome.out
    (resume,) = json.loads((run / "run.json").read_text(encoding="utf-8"))["resumes"]
    assert (resume["step"], resume["accepted"]) == (5, [])
    assert "run.json has no hashes of code and data" in resume["noticed"][0]
    assert resume["noticed"][0] in outcome.out + outcome.err
    expected = json.loads((FORMER / "expected.json").read_text(encoding="utf-8"))
    lines = untimed(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    for line in lines[6:]:
        added = ADDED_SINCE | (ADDED_TO_EVALUATIONS if "eval_correct_rate" in line else set())
        assert added <= line.keys()
        for name in added:
            del line[name]
    assert [line.keys() for line in lines[6:]] == [line.keys() for line in expected["metrics"]]
    made_with = expected["made_with"]
    if (_processor(), version("torch")) != (made_with["cpu"], made_with["torch"]):
        return  # loaded and finished; its numbers belong to another machine
    for line, before in zip(lines[6:], expected["metrics"], strict=True):
        for name, value in before.items():
            if name in CHANGED_SINCE:
                continue
            near = pytest.approx(value, rel=1e-4, abs=1e-5) if isinstance(value, float) else value
            assert line[name] == near, name
