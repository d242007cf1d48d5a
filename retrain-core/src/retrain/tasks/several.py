"""Several tasks in one run: loaded one by one, sampled in one step, each scored by its own verifier.

The ids of a task's examples begin with its name, so that records and random streams keep the tasks apart. A group is of
one example, and so of one task.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, Reward, RolloutBatch, Rollouts, Streams, TimedScore
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Completion, Example, SamplingParams, Score
from retrain.tasks.prompts import PromptPool
from retrain.tasks.task_tables import TaskTable, read_tasks
from retrain.tasks.tasks import Tasks, load_task
from retrain.text.chat import prompt_text

LOG = logging.getLogger("retrain")
T = TypeVar("T")


def load_several(context: PluginContext) -> Tasks:
    """Load every task of `[[data.tasks]]`; a text that one of them holds out is trained on by none."""
    tables, problems = read_tasks(context.config)
    if problems:
        raise ConfigError(*problems)
    with ExitStack() as opened:
        loaded = list[Tasks]()
        for table in tables:
            loaded.append(load_task(replace(context, config=table.config), table.name))
            opened.callback(loaded[-1].verifier.close)
        held_out = {prompt_text(prompt.example) for tasks in loaded for prompt in tasks.pool.held_out}
        several = tuple(_apart(tasks, held_out, table) for tasks, table in zip(loaded, tables, strict=True))
        opened.pop_all()
    return Tasks(
        pool=PromptPool(
            train=tuple(prompt for tasks in several for prompt in tasks.pool.train),
            held_out=tuple(prompt for tasks in several for prompt in tasks.pool.held_out),
            seeds=context.seeds,
        ),
        verifier=SeveralVerifiers(several),
        context_length=several[0].context_length,
        notes=tuple(f"{tasks.name}: {note}" for tasks in several for note in tasks.notes),
        context=context,
        several=several,
    )


def _apart(tasks: Tasks, held_out: set[str], table: TaskTable) -> Tasks:
    """Return the task with its weight, times a power of its size by `[data] schedule`, and without these prompts."""
    # An environment often opens all its episodes with the same words.
    others = set() if tasks.context.config.environment.provider else held_out
    kept = tuple(prompt for prompt in tasks.pool.train if prompt_text(prompt.example) not in others)
    if lost := len(tasks.pool.train) - len(kept):
        LOG.info("Task %s: %d training examples left out: another task holds out the same prompt", tasks.name, lost)
    if not kept:
        what, fix = "other tasks hold out all of its prompts", "give it other data, or hold out fewer there"
        raise ConfigError(Problem(code="data.no-examples", where=table.place, what=what, fix=fix))
    return replace(tasks, pool=replace(tasks.pool, train=kept), weight=table.weight * len(kept) ** table.power)


def task_of(example: Example) -> str:
    """Return the task of an example of a run of several tasks."""
    return example.id.partition("/")[0]


class SeveralVerifiers:
    """The verifiers of all tasks as one."""

    def __init__(self, several: Sequence[Tasks]) -> None:
        self._several = several
        verifiers = [tasks.verifier for tasks in several]
        self.names: tuple[str, ...] = tuple(dict.fromkeys(name for each in verifiers for name in each.names))
        self.rewards: tuple[Reward, ...] = tuple(reward for each in verifiers for reward in each.rewards)
        self.timeout_s: float | None = min(filter(None, (each.timeout_s for each in verifiers)), default=None)

    def start(self) -> None:
        for tasks in self._several:
            tasks.verifier.start()

    def score_texts(self, pairs: Sequence[tuple[Example, str]]) -> list[TimedScore]:
        found = dict[int, TimedScore]()
        for tasks in self._several:
            own = [number for number, (example, _) in enumerate(pairs) if task_of(example) == tasks.name]
            found |= zip(own, tasks.verifier.score_texts([pairs[number] for number in own]), strict=True)
        return [found[number] for number in range(len(pairs))]

    def rollouts(
        self, backend: Backend, context: PluginContext, params: SamplingParams, context_length: int | None
    ) -> Rollouts:
        several = self._several
        return SeveralRollouts(
            {t.name: t.verifier.rollouts(backend, t.context, params, context_length) for t in several}
        )

    def close(self) -> None:
        for tasks in self._several:
            tasks.verifier.close()


class SeveralRollouts:
    """Samples the prompts of one task after another; the first are scored meanwhile."""

    def __init__(self, by_task: Mapping[str, Rollouts]) -> None:
        self._by_task = by_task
        self.has_verifier = any(getattr(each, "has_verifier", True) for each in by_task.values())

    @contextmanager
    def batch(self, label: str, failures: Path | None = None) -> Iterator[RolloutBatch]:
        with ExitStack() as stack:
            by_task = {name: each.batch(f"{label}_{name}", failures) for name, each in self._by_task.items()}
            yield SeveralBatches({name: stack.enter_context(each) for name, each in by_task.items()})

    def close(self) -> None:
        for rollouts in self._by_task.values():
            rollouts.close()


class SeveralBatches:
    def __init__(self, by_task: Mapping[str, RolloutBatch]) -> None:
        self._by_task = by_task
        self._places: dict[str, list[int]] = {}  # of each task's groups in the step

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        for number, prompt in enumerate(prompts):
            self._places.setdefault(task_of(prompt.example), []).append(number)
        of_task = {name: [prompts[number] for number in own] for name, own in self._places.items()}
        return self._joined({n: self._by_task[n].sample(own, group_size, streams) for n, own in of_task.items()})

    def scores(self) -> list[tuple[Score, ...]]:
        return self._joined({name: self._by_task[name].scores() for name in self._places})

    def metrics(self) -> Mapping[str, float]:
        """Return sums of all tasks, the largest of `_max`, and means and rates weighted by the groups of each."""
        found = [(len(own), self._by_task[name].metrics()) for name, own in self._places.items()]
        joined = dict[str, float]()
        for field in dict.fromkeys(field for _, fields in found for field in fields):
            groups, values = zip(*((number, fields[field]) for number, fields in found if field in fields), strict=True)
            if "_max" in field:
                joined[field] = max(values)
            else:
                is_mean = "_mean" in field or "_rate" in field
                joined[field] = float(np.average(values, weights=groups)) if is_mean else sum(values)
        return joined

    def _joined(self, found: Mapping[str, Sequence[T]]) -> list[T]:
        places = [place for name in found for place in self._places[name]]
        joined = dict(zip(places, (each for own in found.values() for each in own), strict=True))
        return [joined[number] for number in range(len(joined))]
