"""Every field that a real run writes is described, and every description is of a field that exists."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.manual.keys import described
from retrain.kernel.declared import MetricSpec
from retrain.kernel.plugins.discover import load_plugins
from tests.end_to_end.running import records, tiny
from tests.kit.shared import made_once

SIZE = ("--max-steps", "3", "--batch-size", "4", "--group-size", "4", "--save-every", "0")
EVERYTHING = (
    *("--eval-examples", "4", "--eval-samples", "2", "--eval-every", "2", "--bp-enabled", "true"),
    *("--bp-warmup-steps", "2", "--bp-max-batch-size", "4", "--sepa-correct-rate-gate", "0"),
    *("--reward-weights", '{"match": 1.0, "math": 0.5}', "--reward-shadow", "math"),
    *("--refill", "1", "--overlong", "drop", "--soft-overlong", "8"),
)
CUT_OFF = (
    *("--uncertainty-kind", "shannon_entropy", "--eval-examples", "0", "--max-tokens", "24"),
    *("--health-steps", "1", "--health-truncation", "0", "--minibatches", "2"),
    *("--overlong", "mask", "--kl-coef", "0.01", "--kl-where", "reward", "--sft-steps", "1", "--sft-lr", "1e-3"),
)
# Described, and not to be seen in these runs; each has a test where it comes about.
ELSEWHERE = {
    "end_to_end/test_killed.py": "sampler sampler_chance_mean sampler_uniform_share sampler_uniform_correct_rate",
    "retrain-core/observe/gaming/test_alarm_watch.py": "gaming_since gaming_example gaming_tokens",
    "retrain-core/observe/gaming/test_suspicion.py": "gaming_length_shift gaming_entropy_shift gaming_ngram_share "
    "gaming_answer_shift gaming_prompt_answers gaming_format_credit gaming_suspected gaming_ngram",
    "retrain-core/kernel/test_train.py, a step whose numbers are not finite": "rejected",
    "retrain-core/run/backpressure, a fit": "bp_sigma bp_kappa bp_p_star bp_utilization bp_ceiling",
    "retrain-rewards/judge": "judge_calls judge_tokens_in judge_tokens_out judge_cost_usd",
    "retrain-core/engines, servers that fail": "inference_retries inference_moved inference_servers inference_reloads",
    "end_to_end/test_inference_servers.py": "probe_gap_mean probe_gap_max engine_gap_mean engine_gap_p99 "
    "engine_gap_max",
    "retrain-core/credit/teacher": "teacher_kl_mean teacher_kl_k1_mean teacher_time_s",
    "retrain-core/run/steps/test_controls.py": "verifier_correct_rate",
    "retrain-prime-rl/test_prime_rl_backend.py": "prime_rl_enqueue_time_s prime_rl_sync_time_s prime_rl_step "
    "prime_rl_policy_lag prime_rl_stale_steps",
    "end_to_end/test_agents.py": "turns_mean turn_limit_rate rewritten_history_count dropped_call_count",
    "retrain-core/kernel/test_overlap.py": "staleness_mean staleness_max overlap_time_s sampler_idle_time_s "
    "trainer_idle_time_s",
}
UNITS = {"", "text", "flag", "list", "nats", "nats²", "tokens", "tokens/s", "s", "rows", "groups", "prompts"}
UNITS |= {"completions", "examples", "scores", "requests", "turns", "times", "steps", "USD"}


def _pattern(spec: MetricSpec) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(spec.name)))


def _fits(value: Any, unit: str) -> bool:
    if unit in ("text", "flag", "list"):
        return isinstance(value, {"text": str, "flag": bool, "list": list}[unit])
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    def make(folder: Path) -> None:
        for name, flags in (("everything", EVERYTHING), ("cut_off", CUT_OFF)):
            tiny(*SIZE, *flags, "--log-dir", name, cwd=folder)

    folder = made_once(tmp_path_factory, "metrics", make)
    return [folder / "everything", folder / "cut_off"]


@pytest.fixture(scope="session")
def lines(runs: list[Path]) -> list[dict[str, Any]]:
    return [line for run in runs for line in records(run / "metrics.jsonl")]


def test_fields_and_descriptions_match_and_values_are_of_their_unit(lines: list[dict[str, Any]]) -> None:
    specs = [spec for specs in described(load_plugins({})).values() for spec in specs]
    exact = {spec.name: spec for spec in specs}
    assert len(exact) == len(specs)
    for spec in specs:
        assert spec.meaning.endswith("."), spec.name
        assert spec.unit in UNITS, spec.name
    seen = set()
    for line in lines:
        for name, value in line.items():
            fitting = [each for each in specs if _pattern(each).fullmatch(name)]
            assert fitting, f"{name} is not described"
            unit = exact.get(name, fitting[0]).unit
            assert _fits(value, unit), (name, value, unit)
            seen |= {each.name for each in fitting}
        if line["step"] >= 0:
            assert not [spec.name for spec in specs if not spec.absent and spec.name not in line]
        elif "eval_examples" in line:  # before training
            assert all(name.startswith("eval_") for name in line.keys() - {"step"})
    assert exact.keys() - seen == set(" ".join(ELSEWHERE.values()).split())


def test_the_page_of_files_names_every_file_and_field(runs: list[Path]) -> None:
    page = (Path(__file__).parents[2] / "docs/pages/read-a-run.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`([\w./]+)`", page))
    for run in runs:
        for file in run.iterdir():
            assert {file.name, f"{file.name}/"} & documented or f"`{file.name}/" in page, file.name
        for line in records(run / "emergence" / "generations.jsonl"):
            assert set(line) <= documented
        assert set(json.loads((run / "run.json").read_text(encoding="utf-8"))) <= documented
        assert {file.name for file in (run / "emergence").iterdir()} <= {Path(name).name for name in documented} | {
            "tokens"
        }
