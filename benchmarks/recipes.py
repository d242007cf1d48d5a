"""What every recipe reaches on sums, each at a learning rate of its own: `python benchmarks/recipes.py FOLDER`.

1. Rates: each condition with two seeds at two rates. The best is the one with the highest mean of the task's metric
   at the end, the lower of two equal ones.
2. Seeds: each condition at its rate with six other seeds, in a campaign with a plan.

`--task rewards` has two rewards instead, one of them ten times as large, for `gdpo`. FOLDER keeps both campaigns, and
the same command again finishes what is missing. `--pages FOLDER` puts the tables into the pages, between their markers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
from harness.machine import machine
from harness.report import paste

RATES = (1e-3, 2e-3)
CHOOSING_SEEDS, SEEDS = (1, 2), (11, 12, 13, 14, 15, 16)
BASE: Mapping[str, Mapping[str, Any]] = {
    "model": {"model": "builtin:tiny"},
    "backend": {"devices": "cpu"},
    "data": {"source": "arithmetic"},
    "training": {"group_size": 8, "minibatches": 2, "max_tokens": 64, "temperature": 1.0},
    "eval": {"examples": 128, "samples": 2},
}
WORDS = '''"""A reward that has nothing to do with being right: the words of a completion, up to ten."""

import re


class Words:
    def score(self, example, text):
        return float(min(10, len(re.findall("[A-Za-z]+", text.replace("boxed", "")))))


def words(context):
    return Words()
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Conditions by the name that a table gives them, the first of which is the baseline; `metric` chooses rates.

    `decides` is the metric of the plan, `columns` the metrics of the table by heading, `page` the page with the table,
    and `base` holds what the runs have in addition to `BASE`.
    """

    conditions: Mapping[str, Mapping[str, Any]]
    metric: str
    decides: str
    columns: Mapping[str, str]
    page: str
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


RECIPES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
TASKS = {
    "sums": Task(
        conditions={name: {"recipe": name} for name in RECIPES},
        metric="eval_correct_rate:final",
        decides="eval_correct_rate:final",
        columns={"held out at the end": "eval_correct_rate:final", "area in training": "correct_rate:auc"},
        page="recipes",
    ),
    "rewards": Task(
        conditions={
            "grpo": {"recipe": "grpo"},
            "gdpo": {"recipe": "grpo", "advantage_mode": "gdpo"},
        },
        metric="eval_mean_reward:final",
        decides="eval_reward_match_mean:final",
        columns={"right": "eval_reward_match_mean:final", "words": "eval_reward_words.words_mean:final"},
        page="group-advantages",
        base={
            "reward": {"weights": {"match": 1.0, "words.words": 1.0}},
            "scoring": {"audit": "warn"},  # it rewards wrong answers as well, and the audit says so
        },
    ),
}


def main() -> None:
    """Run both campaigns, print the table, and write figures and pages where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", choices=list(TASKS), default="sums")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two steps, one seed for the rates and two for the rest")
    parser.add_argument("--pages", type=Path, help="put the tables into the pages of this folder")
    options = parser.parse_args()
    task, folder = TASKS[options.task], options.folder / options.task
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.py").write_text(WORDS, encoding="utf-8")
    choosing, seeds = (CHOOSING_SEEDS[:1], SEEDS[:2]) if options.quick else (CHOOSING_SEEDS, SEEDS)
    steps = 2 if options.quick else options.steps
    runner = Runner(folder=folder, task=task, steps=steps, workers=options.workers, choosing=choosing)
    best = runner.best_rates()
    runner.campaign(
        "seeds",
        [{**task.conditions[name], "lr": rate} for name, (rate, _) in best.items()],
        seeds,
        plan={
            "hypothesis": "another condition ends above or below the first, each at its best learning rate",
            "primary_metric": task.decides,
            "baseline": next(iter(best.values()))[1],
            "stop_rule": f"{len(seeds)} seeds of {steps} steps, none added or left out because of its result",
        },
    )
    here = machine("cpu")
    where = f"`python benchmarks/recipes.py FOLDER --task {options.task}`, {here['date']}, commit {here['commit']}"
    table = Table(runner, best, where)
    print(table.markdown(list(best)))
    if options.pages:
        mark = f"recipes {'recipes' if options.task == 'sums' else 'gdpo'}"
        paste(options.pages / f"{task.page}.md", mark, table.markdown(list(best)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Starts campaigns of one task in one folder and reads what `retrain compare` says of them."""

    folder: Path
    task: Task
    steps: int
    workers: int
    choosing: Sequence[int]

    def best_rates(self) -> dict[str, tuple[float, str]]:
        """The rate of each condition, and the label that campaigns give to both together."""
        tried = [(name, rate) for name in self.task.conditions for rate in RATES]
        self.campaign("rates", [{**self.task.conditions[name], "lr": rate} for name, rate in tried], self.choosing)
        best: dict[str, tuple[float, float, str]] = {}
        for (name, rate), each in zip(tried, self.compare("rates", self.task.metric)["conditions"], strict=True):
            reached = each["metrics"][self.task.metric]["mean"]
            if name not in best or reached > best[name][0]:
                best[name] = (reached, rate, each["condition"])
        return {name: (rate, label) for name, (_, rate, label) in best.items()}

    def campaign(
        self,
        name: str,
        conditions: Sequence[Mapping[str, Any]],
        seeds: Sequence[int],
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        """Run it, or what is missing of it."""
        table = {"seeds": list(seeds), "max_steps": self.steps, "conditions": [dict(each) for each in conditions]}
        table |= {"parallel": True, "max_workers": self.workers, "stagger_seconds": 0.0}
        table |= {"plan": dict(plan)} if plan else {}
        content = {"campaign": table, **BASE, **self.task.base}
        (self.folder / f"{name}.toml").write_text(tomli_w.dumps(content), encoding="utf-8")
        subprocess.run(
            [sys.executable, "-m", "retrain", f"{name}.toml", "--log-dir", name],
            check=True,
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )

    def compare(self, name: str, metric: str, *options: str) -> dict[str, Any]:
        """What `retrain compare --json` says."""
        command = [sys.executable, "-m", "retrain", "compare", name, "--json", "--metric", metric, *options]
        found: dict[str, Any] = json.loads(subprocess.check_output(command, cwd=self.folder, text=True))
        return found


class Table:
    """The table of some conditions, from the records of the campaign `seeds`."""

    def __init__(self, runner: Runner, best: Mapping[str, tuple[float, str]], where: str) -> None:
        self._task, self._best, self._where = runner.task, best, where
        found = {metric: runner.compare("seeds", metric) for metric in runner.task.columns.values()}
        self._metrics = {
            (each["condition"], metric): each["metrics"].get(metric)
            for metric, compared in found.items()
            for each in compared["conditions"]
        }
        self._against = {each["condition"]: each for each in found[runner.task.decides]["comparisons"]}
        self._seeds = max(len(each["seeds"]) for each in found[runner.task.decides]["conditions"])
        manifest = json.loads((runner.folder / "seeds/manifest.json").read_text(encoding="utf-8"))
        folders: dict[str, list[Path]] = {}
        for run in manifest["runs"]:
            folders.setdefault(run["condition"], []).append(runner.folder / "seeds/runs" / run["run_name"])
        self._spent = {label: [_spent(folder) for folder in mine] for label, mine in folders.items()}

    def markdown(self, names: Sequence[str]) -> str:
        """Rows of these conditions, and below them how and where they were measured."""
        first = next(iter(self._best))
        head = ["", "`lr`", *self._task.columns, "clipped in the second update", "tokens sampled"]
        head += [f"against {first} [interval]", "p", "p (Holm)", "`compare` says"]
        lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(self._row(name) for name in names)]
        task = "[The task and the columns](recipes.md#what-was-measured)."
        over = f"over {self._seeds} seeds, of held-out rates on other examples as well"
        told = f"{self._where}. Mean and 95 % interval {over}. {task}"
        return "\n".join([*lines, "", *textwrap.wrap(told, 128, break_long_words=False, break_on_hyphens=False)])

    def _row(self, name: str) -> str:
        rate, label = self._best[name]
        cells = [f"`{name}`", f"{rate:g}"]
        cells += [_mean(self._metrics[label, metric]) for metric in self._task.columns.values()]
        spent = self._spent[label]
        cells.append(f"{100 * statistics.mean(each.clipped for each in spent):.1f} %")
        cells.append(f"{statistics.mean(each.tokens for each in spent):,.0f}")
        against = self._against.get(label)
        cells += _verdict(against) if against else ["-"] * 4
        return f"| {' | '.join(cells)} |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of a run: the mean share of tokens that its second updates clipped, and the tokens sampled for training."""

    clipped: float
    tokens: int


def _spent(folder: Path) -> Spent:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clipped = [line["clip_fraction_updates"][1] for line in lines if len(line.get("clip_fraction_updates", ())) > 1]
    return Spent(clipped=statistics.mean(clipped), tokens=sum(line.get("sampled_tokens", 0) for line in lines))


def _mean(metric: Mapping[str, Any]) -> str:
    low, high = metric["interval"]
    if not 0 <= metric["mean"] <= 1:
        return f"{metric['mean']:.2f} [{low:.2f}, {high:.2f}]"
    return f"{100 * metric['mean']:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def _verdict(against: Mapping[str, Any]) -> list[str]:
    limits = ("no limit" if each is None else f"{100 * each:+.1f}" for each in against["interval"])
    difference = f"{100 * against['difference']:+.1f} [{', '.join(limits)}], {100 * against['level']:.4g} %"
    return [difference, f"{against['p']:.3f}", f"{against['p_holm']:.2f}", against["verdict"]]


if __name__ == "__main__":
    main()
