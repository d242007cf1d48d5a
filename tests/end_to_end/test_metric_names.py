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
from tests.end_to_end.running import records, retrain, tiny
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
    "sampler": "end_to_end/test_samplers.py: a sampler other than uniform",
    "sampler_chance_mean": "end_to_end/test_samplers.py: a sampler other than uniform",
    "sampler_uniform_share": "end_to_end/test_samplers.py: a sampler other than uniform",
    "sampler_uniform_correct_rate": "end_to_end/test_samplers.py: a sampler other than uniform",
    "gaming_since": "retrain-core/observe/gaming/test_alarm_watch.py: an alarm",
    "gaming_example": "retrain-core/observe/gaming/test_alarm_watch.py: an alarm",
    "gaming_tokens": "retrain-core/observe/gaming/test_alarm_watch.py: an alarm",
    "gaming_length_shift": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_entropy_shift": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_ngram_share": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_answer_shift": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_prompt_answers": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_format_credit": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_suspected": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "gaming_ngram": "retrain-core/observe/gaming/test_suspicion.py: after the first steps",
    "rejected": "loop/test_train.py: a step whose numbers are not finite",
    "bp_sigma": "backpressure/: a fit to three batch sizes or more",
    "bp_kappa": "backpressure/: a fit to three batch sizes or more",
    "bp_p_star": "backpressure/: a fit with a peak",
    "bp_utilization": "backpressure/: a fit with a peak",
    "bp_ceiling": "end_to_end/test_backpressure.py: memory ran out",
    "judge_calls": "retrain-rewards/verifiers/test_judge_reward.py",
    "judge_tokens_in": "retrain-rewards/verifiers/test_judge_reward.py",
    "judge_tokens_out": "retrain-rewards/verifiers/test_judge_reward.py",
    "judge_cost_usd": "retrain-rewards/verifiers/test_judge_reward.py",
    "inference_retries": "retrain-core/engines/test_inference_client.py: a server that fails first",
    "inference_moved": "retrain-core/engines/test_fleet.py: a server that hangs",
    "inference_servers": "retrain-core/engines/test_fleet.py: a server that hangs",
    "inference_reloads": "retrain-core/engines/test_fleet.py: an answer of another model",
    "probe_gap_mean": "end_to_end/test_inference_servers.py: an engine that is a server",
    "probe_gap_max": "end_to_end/test_inference_servers.py: an engine that is a server",
    "engine_gap_mean": "retrain-core/engines/test_server_engine.py: logprobs of the trainer",
    "engine_gap_p99": "retrain-core/engines/test_server_engine.py: logprobs of the trainer",
    "engine_gap_max": "retrain-core/engines/test_server_engine.py: logprobs of the trainer",
    "teacher_kl_mean": "retrain-core/credit/teacher/test_teacher_shaper.py",
    "teacher_kl_k1_mean": "retrain-core/credit/teacher/test_teacher_shaper.py",
    "verifier_correct_rate": "retrain-core/run/steps/test_controls.py",
    "teacher_time_s": "retrain-core/credit/teacher/test_teacher_shaper.py",
    "prime_rl_enqueue_time_s": "retrain-prime-rl/test_prime_rl_backend.py",
    "prime_rl_sync_time_s": "retrain-prime-rl/test_prime_rl_backend.py",
    "prime_rl_step": "retrain-prime-rl/test_prime_rl_backend.py",
    "prime_rl_policy_lag": "retrain-prime-rl/test_prime_rl_backend.py",
    "prime_rl_stale_steps": "retrain-prime-rl/test_prime_rl_backend.py",
    "turns_mean": "loop/test_episodes.py: an environment",
    "turn_limit_rate": "loop/test_episodes.py: an environment",
    "rewritten_history_count": "loop/test_episodes.py: an environment",
    "dropped_call_count": "end_to_end/test_agents.py: an agent",
    "staleness_mean": "loop/test_overlap.py: a backend that samples ahead",
    "staleness_max": "loop/test_overlap.py: a backend that samples ahead",
    "overlap_time_s": "loop/test_overlap.py: a backend that samples ahead",
    "sampler_idle_time_s": "loop/test_overlap.py: a backend that samples ahead",
    "trainer_idle_time_s": "loop/test_overlap.py: a backend that samples ahead",
}
UNITS = {"", "text", "flag", "list", "nats", "nats²", "tokens", "tokens/s", "s", "rows", "groups", "prompts"}
UNITS |= {"completions", "examples", "scores", "requests", "turns", "times", "steps", "USD"}


def _specs() -> list[MetricSpec]:
    return [spec for specs in described(load_plugins({})).values() for spec in specs]


def _pattern(spec: MetricSpec) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(spec.name)))


def _fits(value: Any, unit: str) -> bool:
    if unit in ("text", "flag", "list"):
        return isinstance(value, {"text": str, "flag": bool, "list": list}[unit])
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that between them turn on what writes fields."""

    def make(folder: Path) -> None:
        for name, flags in (("everything", EVERYTHING), ("cut_off", CUT_OFF)):
            tiny(*SIZE, *flags, "--log-dir", name, cwd=folder)

    folder = made_once(tmp_path_factory, "metrics", make)
    return [folder / "everything", folder / "cut_off"]


@pytest.fixture(scope="session")
def lines(runs: list[Path]) -> list[dict[str, Any]]:
    """The lines of both."""
    return [line for run in runs for line in records(run / "metrics.jsonl")]


@pytest.mark.long
def test_every_field_of_a_run_is_described(lines: list[dict[str, Any]]) -> None:
    specs = _specs()
    names = {name for line in lines for name in line}
    unknown = {name for name in names if not any(_pattern(spec).fullmatch(name) for spec in specs)}
    assert not unknown
    assert len(names) > 70


def test_every_described_field_exists(lines: list[dict[str, Any]]) -> None:
    names = {name for line in lines for name in line}
    unseen = {spec.name for spec in _specs() if not any(_pattern(spec).fullmatch(name) for name in names)}
    assert unseen == set(ELSEWHERE)


def test_values_are_of_their_unit_and_present_when_promised(lines: list[dict[str, Any]]) -> None:
    specs = _specs()
    for line in lines:
        for name, value in line.items():
            exact = [spec for spec in specs if spec.name == name]
            spec = exact[0] if exact else next(spec for spec in specs if _pattern(spec).fullmatch(name))
            assert _fits(value, spec.unit), (name, value, spec.unit)
        if line["step"] >= 0:
            missing = [spec.name for spec in specs if not spec.absent and spec.name not in line]
            assert not missing


def test_the_line_before_training_has_the_evaluation_alone(lines: list[dict[str, Any]]) -> None:
    first = next(line for line in lines if line["step"] == -1)
    assert all(name == "step" or name.startswith("eval_") for name in first)


def test_descriptions_are_sound() -> None:
    specs = _specs()
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names)
    for spec in specs:
        assert spec.meaning.endswith("."), spec.name
        assert spec.unit in UNITS, spec.name


def test_the_manual_shows_them(tmp_path: Path) -> None:
    page = json.loads(retrain("man", "--json", "--topic", "metrics", cwd=tmp_path).out)["content"]
    for spec in _specs():
        assert f"| `{spec.name}` |" in page


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
