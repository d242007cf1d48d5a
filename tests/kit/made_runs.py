"""Made-up campaigns on disk, in the files that real runs leave; seeded, and fast enough for a thousand runs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BATCH_SIZE, GROUP_SIZE = 8, 16
EVAL_EXAMPLES, EVAL_SAMPLES = 64, 4
STARTED = "2026-03-01T12:00:05+00:00"
WRITTEN = "2026-03-01T12:00:00+00:00"
CONTROLS = ("random_reward", "format_only", "no_update")
GONE = 2**22 + 1  # above the largest process id that Linux and macOS hand out
SAFE = re.compile(r"[^A-Za-z0-9+~=,._-]+")


@dataclass(frozen=True, kw_only=True)
class MadeRun:
    """One run. `effect` is added to the correct rate that it learns up to; `spread` is that of seeds around it.

    `completions` are written per step; `texts` are mixed into them, for hostile ones. `tokens` is the mean length.
    With `example_spread` the run has an `eval.jsonl`: examples differ in difficulty by so many logits, in the same way
    in every run, and their clusters by `interaction` logits from condition to condition; there are so many `clusters`,
    0 = one for each example.
    """

    condition: str = "maxrl+none"
    seed: int = 1
    steps: int = 50
    max_steps: int | None = None
    effect: float = 0.0
    spread: float = 0.02
    status: str = "done"
    error: str = ""
    eval_every: int = 20
    completions: int = 0
    texts: Sequence[str] = ()
    tokens: float = 24.0
    step_time_s: float = 0.6
    example_spread: float | None = None
    interaction: float = 0.0
    clusters: int = 0
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_campaign(
    folder: Path,
    effects: Mapping[str, float],
    *,
    seeds: Sequence[int],
    steps: int = 50,
    states: Mapping[tuple[str, int], str] | None = None,
    plan: Mapping[str, Any] | None = None,
    squeeze: Mapping[str, Any] | None = None,
    **run: Any,
) -> Path:
    """A campaign of every condition in `effects` with every seed; `states` says which runs did not end well."""
    entries = []
    for condition, effect in effects.items():
        for seed in seeds:
            name, status = SAFE.sub("-", f"{condition}_s{seed}"), (states or {}).get((condition, seed), "done")
            done = steps if status == "done" else max(1, steps // 2)
            made = MadeRun(
                condition=condition, seed=seed, steps=done, max_steps=steps, effect=effect, status=status, **run
            )
            write_run(folder / "runs" / name, made)
            advantage, _, transform = condition.partition("~")[0].partition("+")
            modes = {"condition": condition, "advantage_mode": advantage, "transform_mode": transform, "overrides": {}}
            place = {"run_name": name, "log_dir": str(folder / "runs" / name)}
            entries.append({**modes, "seed": seed, **place, "returncode": 0 if status == "done" else 1})
    content = {"timestamp": "20260301_120000", "campaign_toml": "campaign.toml", "conditions": list(effects)}
    content |= {"seeds": list(seeds), "max_steps": steps, "parallel": False, "num_runs": len(entries)}
    content |= {"runner_pid": GONE, "runs": entries}
    content |= {"plan": dict(plan)} if plan else {}
    content |= {"squeeze": dict(squeeze)} if squeeze else {}
    (folder / "manifest.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    return folder


def write_run(folder: Path, run: MadeRun) -> Path:
    """`run.json`, `config.toml`, `metrics.jsonl`, `emergence/` and `trainer_state.json` of one run."""
    emergence = folder / "emergence"
    emergence.mkdir(parents=True)
    rng = np.random.default_rng([run.seed, len(run.condition), *run.condition.encode()])
    columns = _columns(run, rng)
    (folder / "run.json").write_text(json.dumps(_manifest(run, folder), indent=2), encoding="utf-8")
    (folder / "config.toml").write_text(
        f"[training]\nseed = {run.seed}\nmax_steps = {_max_steps(run)}\n", encoding="utf-8"
    )
    lines, examples = _metrics_lines(run, columns, rng)
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    if run.example_spread is not None:
        (folder / "eval.jsonl").write_text("".join(examples), encoding="utf-8")
    (emergence / "steps.jsonl").write_text("".join(_summaries(run, columns)), encoding="utf-8")
    (emergence / "generations.jsonl").write_text("".join(_generations(run, columns, rng)), encoding="utf-8")
    name = "final" if run.status == "done" else f"checkpoint_step_{run.steps}"
    state = {"step": run.steps - 1, "checkpoint_name": name}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


def _max_steps(run: MadeRun) -> int:
    return run.steps if run.max_steps is None else run.max_steps


def _columns(run: MadeRun, rng: np.random.Generator) -> dict[str, list[Any]]:
    progress_S = np.arange(run.steps) / max(1, _max_steps(run))
    level = 0.45 + (0.35 + run.effect + run.spread * rng.standard_normal()) * (1 - np.exp(-4 * progress_S))
    size = BATCH_SIZE * GROUP_SIZE
    right_S = rng.binomial(size, np.clip(level, 0.01, 0.99))
    tokens_S = np.maximum(1, rng.normal(run.tokens, 1.0, run.steps) * size).astype(int)
    noise_KS = np.abs(rng.standard_normal((6, run.steps)))
    columns = {
        "step": np.arange(run.steps),
        "loss": 0.02 * noise_KS[0],
        "grad_norm": 0.03 + 0.01 * noise_KS[1],
        "rate": right_S / size,
        "running": np.cumsum(right_S) / (size * np.arange(1, run.steps + 1)),
        "uniform": rng.integers(0, 3, run.steps),
        "lambda": np.clip((np.arange(run.steps) - 5) / 40, 0.0, 1.0),
        "tokens": tokens_S,
        "mean_tokens": tokens_S / size,
        "truncated": rng.integers(0, 3, run.steps) / size,
        "exec_mean": 0.25 - 0.15 * progress_S + 0.01 * noise_KS[2],
        "exec_var": 0.5 - 0.3 * progress_S + 0.02 * noise_KS[3],
        "plan_mean": 0.4 + 0.4 * progress_S,
        "plan_var": 0.7 + 0.5 * progress_S,
        "pooled_var": (0.5 - 0.3 * progress_S) * (1 - progress_S) ** 2,
        "step_time": run.step_time_s * (1 + 0.1 * noise_KS[4]),
        "level": level,
    }
    return {name: values.tolist() for name, values in columns.items()}


LINE = (
    '{"step": %(step)d, "algorithm_mode": "", %(names)s, "backend_reports_sync_loss": true, '
    '"backend_preserves_token_advantages": true, "loss": %(loss)r, "reported_loss": %(loss)r, '
    '"loss_is_placeholder": false, "trained_tokens": %(tokens)d, "grad_norm": %(grad_norm)r, '
    '"ratio_mean": 0.9999999798799842, "ratio_max": 1.000007629423635, "logprob_gap_mean": 4.363620799517504e-07, '
    '"logprob_gap_p99": 1.9073486328125e-06, "logprob_gap_max": 7.62939453125e-06, "k3": 1.7252786438e-13, '
    '"ess_frac": 0.9999999999996554, "clip_fraction": 0.0, "mean_reward": %(rate)r, "correct_rate": %(rate)r, '
    '"no_verdict_count": 0, "failed_score_count": 0, "reward_tie_eligible_groups": 8, "reward_tie_groups": 8, '
    '"reward_uniform_groups": %(uniform)d, "reward_tie_group_rate": 1.0, "reward_uniform_group_rate": 0.125, '
    '"reward_tie_pair_rate": 0.5010416666666667, "reward_unique_fraction_mean": 0.125, '
    '"running_correct_rate": %(running)r, "useful_groups": 7, "all_right_groups": %(uniform)d, "all_wrong_groups": 0, '
    '"tied_groups": 0, "no_verdict_groups": 0, "sepa_lambda": %(lambda)r, "num_datums": 112, '
    '"max_token_hit_rate": %(truncated)r, "mean_tokens": %(mean_tokens)r, "max_tokens_seen": 40, '
    '"sampled_tokens": %(tokens)d, "exec_surprisal_mean": %(exec_mean)r, "exec_surprisal_var": %(exec_var)r, '
    '"plan_surprisal_mean": %(plan_mean)r, "plan_surprisal_var": %(plan_var)r, "exec_entropy_mean": %(exec_mean)r, '
    '"exec_entropy_var": %(exec_var)r, "plan_entropy_mean": %(plan_mean)r, "plan_entropy_var": %(plan_var)r, '
    '"post_exec_surprisal_mean": %(exec_mean)r, "post_exec_surprisal_var": %(pooled_var)r, '
    '"post_plan_surprisal_mean": %(plan_mean)r, "post_plan_surprisal_var": %(plan_var)r, "batch_size": 8, '
    '"group_size": 16, "sepa_gate_open": true, "step_time_s": %(step_time)r, "sample_time_s": 0.22509874400020635, '
    '"score_time_s": 0.0005990980007481994, "train_time_s": 0.3406205230001433'
)


def _names(run: MadeRun) -> str:
    advantage, _, transform = run.condition.partition("~")[0].partition("+")
    modes = {"advantage_mode": advantage, "transform_mode": transform, "uncertainty_kind": "surprisal"}
    return json.dumps({**modes, "condition": run.condition}, ensure_ascii=False)[1:-1]


def _metrics_lines(
    run: MadeRun, columns: Mapping[str, list[Any]], rng: np.random.Generator
) -> tuple[list[str], list[str]]:
    """The lines of `metrics.jsonl` and of `eval.jsonl`."""
    line = LINE.replace("%(names)s", _names(run).replace("%", "%%"))
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lines = [line % row for row in rows]
    examples: dict[int, list[str]] = {}
    if run.eval_every:
        due = {*range(run.eval_every - 1, run.steps, run.eval_every)}
        due |= {run.steps - 1} if run.status == "done" else set()
        for step in due:
            right_E = _right(run, columns["level"][step], rng)
            lines[step] += ", " + _evaluation(right_E)
            examples[step] = _example_lines(run, step, right_E)
        right_E = _right(run, 0.45, rng)
        lines.insert(0, '{"step": -1, ' + _evaluation(right_E))
        examples[-1] = _example_lines(run, -1, right_E)
    return [f"{text}}}\n" for text in lines], [text for step in sorted(examples) for text in examples[step]]


def _right(run: MadeRun, level: float, rng: np.random.Generator) -> Any:
    """Correct samples of each held-out example."""
    level_E = np.full(EVAL_EXAMPLES, float(np.clip(level, 0.01, 0.99)))
    if run.example_spread is not None:
        shift_E = run.example_spread * np.random.default_rng(64).standard_normal(EVAL_EXAMPLES)
        own = np.random.default_rng([*run.condition.encode()])
        shift_E += run.interaction * own.standard_normal(EVAL_EXAMPLES)[np.arange(EVAL_EXAMPLES) % _clusters(run)]
        level_E = 1 / (1 + (1 / level_E - 1) * np.exp(-shift_E))
    return rng.binomial(EVAL_SAMPLES, level_E)


def _clusters(run: MadeRun) -> int:
    return run.clusters or EVAL_EXAMPLES


def _example_lines(run: MadeRun, step: int, right_E: Any) -> list[str]:
    lines = []
    for index, right in enumerate(right_E.tolist()):
        name = f"made-{index}"
        record = {
            "step": step,
            "set": "held_out",
            "example": name,
            "cluster": f"source-{index % _clusters(run)}",
            "scores": [float(sample < right) for sample in range(EVAL_SAMPLES)],
            "correct": [sample < right for sample in range(EVAL_SAMPLES)],
            "lengths": [24] * EVAL_SAMPLES,
            "stops": ["eos"] * EVAL_SAMPLES,
        }
        lines.append(json.dumps(record) + "\n")
    return lines


def _evaluation(right_E: Any) -> str:
    rate = float(right_E.mean() / EVAL_SAMPLES)
    wrong_E = 1 - right_E / EVAL_SAMPLES
    fields = {
        "eval_correct_rate": rate,
        "eval_ci_low": max(0.0, rate - 0.05),
        "eval_ci_high": min(1.0, rate + 0.05),
        "eval_examples": EVAL_EXAMPLES,
        "eval_samples": EVAL_SAMPLES,
        "eval_pass_at_1": rate,
        "eval_pass_at_2": float(1 - np.mean(wrong_E**2)),
        "eval_pass_at_4": float(np.mean(right_E > 0)),
        "eval_time_s": 0.38145835700015596,
    }
    return json.dumps(fields)[1:-1]


def _summaries(run: MadeRun, columns: Mapping[str, list[Any]]) -> list[str]:
    line = (
        '{"step": %d, "mean_reward": %r, "correct_count": %d, "total_count": 128, "condition": '
        + json.dumps(run.condition).replace("%", "%%")
        + ', "uncertainty_kind": "surprisal", "exec_surprisal_mean": %r, "exec_surprisal_var": %r}\n'
    )
    rows = zip(columns["step"], columns["rate"], columns["exec_mean"], columns["exec_var"], strict=True)
    return [line % (step, rate, round(rate * 128), mean, var) for step, rate, mean, var in rows]


def _generations(run: MadeRun, columns: Mapping[str, list[Any]], rng: np.random.Generator) -> list[str]:
    lines = []
    for step in range(run.steps):
        for index in range(run.completions):
            a, b = (int(n) for n in rng.integers(10, 99, 2))
            is_right = bool(rng.random() < columns["rate"][step])
            text = f"Let me think. {a} * {b}. \\boxed{{{a * b if is_right else a + b}}}"
            if run.texts:
                text += str(run.texts[(step * run.completions + index) % len(run.texts)])
            record = {
                "step": step,
                "group": index // GROUP_SIZE,
                "index": index % GROUP_SIZE,
                "example_id": f"made-{a}-{b}",
                "prompt": f"What is {a} * {b}?",
                "completion": text,
                "reference": str(a * b),
                "reward": float(is_right),
                "outcome": "scored",
                "num_tokens": 20 + index % 9,
                "stop_reason": "eos",
                "policy_version": step,
                "trained": True,
                "top_surprisal_tokens": [{"pos": 0, "surprisal": 2.094496, "token": "Let"}],
            }
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    return lines


def _manifest(run: MadeRun, folder: Path) -> dict[str, Any]:
    config: dict[str, dict[str, Any]] = {
        "algorithm": {"advantage_mode": "maxrl", "transform_mode": "none", "uncertainty_kind": "surprisal"},
        "backend": {"backend": "local", "devices": "cpu", "adapter_path": "", "options": {}},
        "data": {"source": "arithmetic", "options": {}},
        "eval": {"every": run.eval_every, "examples": EVAL_EXAMPLES, "samples": EVAL_SAMPLES, "seed": 0},
        "logging": {"log_dir": str(folder), "recorders": []},
        "model": {"model": "builtin:tiny", "lora_rank": 16},
        "training": {"seed": run.seed, "max_steps": _max_steps(run), "batch_size": 8, "group_size": 16, "lr": 0.003},
    }
    if (control := run.condition.rpartition("+")[2]) in CONTROLS:
        config["training"]["control"] = control
    for table, keys in run.config.items():
        config[table] = config.get(table, {}) | dict(keys)
    content: dict[str, Any] = {
        "status": run.status,
        "pid": GONE,
        "started": STARTED,
        "condition": run.condition,
        "seed": run.seed,
        "config_file": "retrain.toml",
        "config_sha256": "0" * 64,
        "config": config,
        "origins": {"training.seed": "--seed"},
        "distributions": {"retrain-core": "0.1.0"},
        "libraries": {"torch": "2.13.0+cpu", "numpy": "2.4.6"},
        "python": "3.11.7",
        "git": {"commit": "c" * 40, "dirty": False},
        "hardware": {"machine": "x86_64", "system": "Linux", "cores": 2},
        "command": ["campaign.toml"],
    }
    content |= {"ended": "2026-03-01T12:10:05+00:00"} if run.status != "running" else {}
    return content | ({"error": run.error} if run.error else {})
