"""The time of a run's training and of its evaluations, apart."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import partial

from retrain.kernel.config.resolved import Config
from retrain.run.configure import evaluations
from retrain.text.terminal_text import counted, duration
from retrain.tools.capacity.history import Past
from retrain.tools.capacity.walltime import Schedule, is_campaign, schedule_of
from retrain.tools.capacity.workload import eval_completions_of

ASSUMED_SHARE = 0.5  # of the time of a step is sampling, until a run has measured it
FEWEST_EXAMPLES = 8  # an estimate from fewer says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Work and time that are left of a run, or of all runs of a campaign.

    Seconds are None until a past run or a pilot has measured them. `warning` names the keys to change where the
    evaluations take longer than the training; otherwise it is empty.
    """

    schedule: Schedule
    training: str
    evaluation: str
    training_s: float | None
    evaluation_s: float | None
    warning: str

    @property
    def total_s(self) -> float | None:
        """Seconds of training and evaluations together, as far as both are known."""
        return None if self.training_s is None else self.training_s + (self.evaluation_s or 0.0)

    def rows(self) -> dict[str, str]:
        """Rows for `retrain explain`; empty for a run that evaluates nothing, or of unknown time."""
        if not self.evaluation_s:
            return {}
        return {
            "training_time": f"{duration(self.training_s)} ({self.training})",
            "evaluation_time": f"{duration(self.evaluation_s)} ({self.evaluation})",
        }


def run_time(config: Config, past: Past, *, steps_done: int = 0) -> RunTime:
    """Count the steps and evaluations after the first `steps_done` steps, and estimate the time of both."""
    schedule, completions = schedule_of(config), eval_completions_of(config)
    steps = max(schedule.max_steps - steps_done, 0)
    number = evaluations(schedule.max_steps, config.eval.every, steps_done) if completions else 0
    step_size = config.training.batch_size * config.training.group_size
    step_s, each_s = past.median_step_time_s, past.eval_completion_s if completions else 0.0
    share = partial(_share, config, each_s * step_size / step_s if each_s is not None and step_s else ASSUMED_SHARE)
    runs = f"{schedule.runs} runs x " if schedule.runs > 1 else ""
    longer = f"the evaluations take longer than the training, about {share():.1f} times its time"
    return RunTime(
        schedule=schedule,
        training=f"{runs}{counted(steps, 'step')}",
        evaluation=f"{runs}{counted(number, 'evaluation')} of {counted(completions, 'completion')}" if number else "",
        training_s=None if step_s is None else schedule.seconds(steps * step_s),
        evaluation_s=None if each_s is None else schedule.seconds(number * completions * each_s),
        warning=f"{longer}: {_fix(config, share)}" if share() > 1.0 else "",
    )


def _share(config: Config, of_step: float, **changes: int) -> float:
    """Time of all evaluations divided by the time of all steps.

    `of_step` is the time to evaluate as many completions as a step samples, divided by the time of a step.
    """
    evaluation = config.eval.model_copy(update=changes)
    completions = eval_completions_of(replace(config, tables={**config.tables, "eval": evaluation}))
    steps, training = schedule_of(config).max_steps, config.training
    work = steps * training.batch_size * training.group_size
    return evaluations(steps, evaluation.every) * completions * of_step / work


def _fix(config: Config, share: partial[float]) -> str:
    """One key, or several if no single one is enough, with which evaluations take no longer than training."""
    now, steps = config.eval, schedule_of(config).max_steps
    if now.every and share(every=0) <= 1.0:
        values = range(now.every, steps + 1)
        return f"set [eval] every = {values[bisect_left(values, -1.0, key=lambda every: -share(every=every))]}"
    for name, least in (("examples", FEWEST_EXAMPLES), ("samples", 1)):
        if value := _largest(range(least, getattr(now, name)), name, share):
            return _set({name: value})
    fewer = {name: value for name, value in {"samples": 1, "every": 0}.items() if getattr(now, name) != value}
    if value := _largest(range(FEWEST_EXAMPLES, now.examples + 1), "examples", partial(share, **fewer)):
        return _set(fewer | ({"examples": value} if value < now.examples else {}))
    enough = f"[{'campaign' if is_campaign(config) else 'training'}] max_steps = {math.ceil(steps * share(**fewer))}"
    return f"{_set(fewer)} and {enough}" if fewer else f"set {enough}"


def _largest(values: range, name: str, share: partial[float]) -> int:
    """The largest value of a key with which its evaluations are short enough; 0 if there is none."""
    count = bisect_right(values, 1.0, key=lambda value: share(**{name: value}))
    return values[count - 1] if count else 0


def _set(changes: dict[str, int]) -> str:
    return "set " + " and ".join(f"[eval] {name} = {value}" for name, value in changes.items())
