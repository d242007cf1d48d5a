"""Samplers on tasks a third of which is trivial and a third impossible: `python benchmarks/samplers.py FOLDER`.

A campaign with a plan, `uniform` against `thompson`, on the built-in model: two-digit arithmetic, which it learns;
products of three digits, which it never gets right; and questions to which any answer is right. FOLDER keeps the
campaign, and the same command again finishes what is missing. Printed are the share of groups that taught, up to the
tokens that both runs of a seed drew; how well the forecast of it was calibrated; and what `retrain compare` says.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from harness.machine import machine

from retrain.verdicts.stats.teaching import Calibration, RateBook, calibration

REWARD = '''"""1 for the right number in the last box, and for anything where any answer is right."""

import re


def score(response, reference):
    boxes = re.findall(r"\\\\boxed\\{([^{}]*)\\}", response)
    return float(reference == "any" or bool(boxes) and boxes[-1].strip() == reference)
'''
GROUP = 8
SIGNS = {"+": (operator.add, 10, 100), "-": (operator.sub, 10, 100), "*": (operator.mul, 2, 10)}  # second operand
BASELINE, SAMPLERS = "uniform", ("uniform", "thompson")
DECIDES, MIXTURE = "eval_arithmetic_correct_rate:final", "eval_correct_rate:final"
AT_TOKENS = "eval_arithmetic_correct_rate:auc"  # the area goes up to the same tokens, where no evaluation need be
DATA = {"source": "files", "prompt_key": "prompt", "answer_key": "answer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A group as the run recorded it: its completions, those that are right, and tokens."""

    step: int
    example_id: str
    judged: int
    correct: int
    tokens: int

    @property
    def teaches(self) -> bool:
        """Whether it is neither all right nor all wrong."""
        return 0 < self.correct < self.judged


def main() -> None:
    """Run the campaign, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--each", type=int, default=40, metavar="N", help="tasks of each third")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_tasks(options.folder, options.each)
    seeds = list(range(1, options.seeds + 1))
    write_campaign(options.folder, seeds, options.steps, options.workers)
    retrain(options.folder, "samplers.toml", "--log-dir", "logs")
    here = machine("cpu")
    print(f"{here['date']}, commit {here['commit']}, {seeds[-1]} seeds of {options.steps} steps\n")
    report(options.folder, seeds)
    for words in ((DECIDES,), (MIXTURE,), (AT_TOKENS, "--align", "tokens")):
        print(retrain(options.folder, "compare", "logs", "--metric", *words))


def write_tasks(folder: Path, each: int) -> None:
    """`mixed.jsonl` with `each` tasks of every third, `arithmetic.jsonl` with others of the first, and the reward."""
    rng = random.Random(0)
    learnt = []
    for sign, (value, low, high) in SIGNS.items():
        for a, b in rng.sample([(a, b) for a in range(10, 100) for b in range(low, high)], (each + 64) // 3 + 1):
            learnt.append((f"What is {a} {sign} {b}?", str(value(a, b))))
    rng.shuffle(learnt)
    never = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(each)]
    tasks = learnt[:each] + [(f"What is {a} * {b}?", str(a * b)) for a, b in never]
    tasks += [(f"What is your number {number}?", "any") for number in range(each)]
    for name, rows in (("mixed", tasks), ("arithmetic", learnt[each : each + 64])):
        lines = (json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "mixed_reward.py").write_text(REWARD, encoding="utf-8")


def write_campaign(folder: Path, seeds: Sequence[int], steps: int, workers: int) -> None:
    """`samplers.toml`: both samplers with the seeds, and the plan."""
    credit = {"advantage_mode": "grpo", "transform_mode": "none"}
    plan = {
        "hypothesis": "thompson ends above or below uniform on held-out arithmetic",
        "primary_metric": DECIDES,
        "baseline": "grpo+none",
        "stop_rule": f"{len(seeds)} seeds of {steps} steps, none added or left out because of its result",
    }
    campaign = {
        "seeds": list(seeds),
        "max_steps": steps,
        "parallel": True,
        "max_workers": workers,
        "stagger_seconds": 0.0,
        "conditions": [credit, *(credit | {"data.sampler": name} for name in SAMPLERS if name != BASELINE)],
        "plan": plan,
    }
    content = {
        "campaign": campaign,
        "model": {"model": "builtin:tiny", "lora_rank": 16},
        "backend": {"backend": "local", "devices": "cpu"},
        "training": {
            "batch_size": 8,
            "group_size": GROUP,
            "max_tokens": 48,
            "temperature": 1.0,
            "lr": 1e-3,
            "save_every": 0,
        },
        "data": DATA | {"path": "mixed.jsonl"},
        "reward": {"type": "custom", "custom_module": "mixed_reward.py"},
        "scoring": {"audit": "off"},  # the reward pays for any answer to a trivial task, as the audit would say
        "eval": {
            "every": 10,
            "examples": 24,
            "samples": 2,
            "seed": 0,
            "sets": {"arithmetic": DATA | {"path": "arithmetic.jsonl", "samples": 2}},
        },
    }
    (folder / "samplers.toml").write_text(tomli_w.dumps(content), encoding="utf-8")


def retrain(folder: Path, *words: str) -> str:
    """What a command prints, with one thread per run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "retrain", *words]
    return subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True).stdout


def report(folder: Path, seeds: Sequence[int]) -> None:
    """Shares and calibration of both samplers, and the ratio of their shares."""
    manifest = json.loads((folder / "logs/manifest.json").read_text(encoding="utf-8"))
    runs: dict[str, dict[int, Path]] = {name: {} for name in SAMPLERS}
    for run in manifest["runs"]:
        name = run["overrides"].get("data_sampler", BASELINE)
        runs[name][run["seed"]] = folder / "logs/runs" / run["run_name"]
    groups = {name: {seed: list(read_groups(runs[name][seed])) for seed in seeds} for name in SAMPLERS}
    limits = {seed: min(sum(each.tokens for each in groups[name][seed]) for name in SAMPLERS) for seed in seeds}
    head = "sampler", "tokens of a run", "groups", "teach", "calibration error", "by bins: forecast, happened"
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    shares: dict[str, list[float]] = {}
    for name in SAMPLERS:
        cut = {seed: list(up_to(groups[name][seed], limits[seed])) for seed in seeds}
        shares[name] = [statistics.mean(each.teaches for each in cut[seed]) for seed in seeds]
        found = calibrated([groups[name][seed] for seed in seeds])
        bins = ", ".join(f"{forecast:.2f} {share:.2f}" for forecast, share, _ in found.bins)
        tokens, count = statistics.mean(limits.values()), statistics.mean(map(len, cut.values()))
        share = statistics.mean(shares[name])
        print(f"| `{name}` | {tokens:,.0f} | {count:.0f} | {100 * share:.1f} % | {found.error:.3f} | {bins} |")
    ratios = [mine / theirs for mine, theirs in zip(shares["thompson"], shares[BASELINE], strict=True)]
    whole = statistics.mean(shares["thompson"]) / statistics.mean(shares[BASELINE])
    print(f"\nShare of thompson to that of uniform: {whole:.2f}, by seed {', '.join(f'{each:.2f}' for each in ratios)}")
    said = [said_and_recomputed(runs["thompson"][seed], groups["thompson"][seed]) for seed in seeds]
    print(f"Largest difference of a step's mean forecast, the sampler's own and recomputed: {max(said):.1e}\n")


def read_groups(run: Path) -> Iterator[Drawn]:
    """The groups of a run, in the order of its records."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with (run / "emergence/generations.jsonl").open(encoding="utf-8") as stream:
        for line in map(json.loads, stream):
            found.setdefault((line["step"], line["group"]), []).append(line)
    for (step, _), group in found.items():
        judged = [line for line in group if line["outcome"] == "scored"]
        yield Drawn(
            step=step,
            example_id=group[0]["example_id"],
            judged=len(judged),
            correct=sum(line["reward"] >= 1.0 for line in judged),
            tokens=sum(line["num_tokens"] for line in group),
        )


def up_to(groups: Sequence[Drawn], tokens: int) -> Iterator[Drawn]:
    """The groups of the first `tokens` tokens."""
    for each in groups:
        tokens -= each.tokens
        if tokens < 0:
            return
        yield each


def forecasts(groups: Sequence[Drawn]) -> list[float]:
    """The chance of each group to teach as it was forecast before its step, from the groups of earlier steps alone."""
    book, found = RateBook(), []
    for each in groups:
        found.append(min(1.0, float(book.chances([each.example_id], each.step, GROUP)[0])))
        book.observe(each.example_id, each.step, each.correct, each.judged)
    return found


def calibrated(runs: Sequence[Sequence[Drawn]]) -> Calibration:
    """Of the forecasts of all runs together, in ten bins of equal counts."""
    found = calibration(
        [chance for groups in runs for chance in forecasts(groups)],
        [each.teaches for groups in runs for each in groups],
    )
    if found is None:
        raise SystemExit("no run has groups")
    return found


def said_and_recomputed(run: Path, groups: Sequence[Drawn]) -> float:
    """The largest difference between a step's recorded mean forecast and the recomputed one."""
    by_step: dict[int, list[float]] = {}
    for each, chance in zip(groups, forecasts(groups), strict=True):
        by_step.setdefault(each.step, []).append(chance)
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    said = {line["step"]: line["sampler_chance_mean"] for line in lines if "sampler_chance_mean" in line}
    return max(abs(said[step] - statistics.mean(chances)) for step, chances in by_step.items())


if __name__ == "__main__":
    main()
