"""The prompts of a run of several tasks: the share of each, its place in its own order, and tasks that teach nothing.

Shares of step s depend on outcomes up to step s - 1 - d, with d = the number of steps that sampling is ahead, as for a
sampler that learns (see `learned_order`): they are the same whether a run was interrupted or not.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import GroupStatus, groups_of, num_correct, verdicts
from retrain.run.steps.learned_order import LearnedOrder
from retrain.run.steps.sampling_order import PassOrder
from retrain.tasks.tasks import Tasks
from retrain.verdicts.stats.teaching import RateBook

STATE = "tasks"
FOR_GOOD = -1
# As `thompson` explores: a task that seems hopeless is still seen now and then.
EXPLORE = 0.1
TEACHES = (GroupStatus.INFORMATIVE, GroupStatus.SURPLUS)
LOG = logging.getLogger("retrain")
Places = dict[str, tuple[int, float]]  # of each task: the prompts drawn of it, and the share of one that it is owed


class TaskOrder:
    """Draws prompts of every task in turn (see `Prompts`), each task in its own order."""

    def __init__(self, tasks: Sequence[Tasks], orders: Sequence[PassOrder | LearnedOrder], config: Config) -> None:
        self._orders = {each.name: order for each, order in zip(tasks, orders, strict=True)}
        self._shares = TaskShares(tasks, config)
        self._places: dict[int, Places] = {0: dict.fromkeys(self._orders, (0, 0.0))}  # by the run's cursor
        self._starts: dict[int, int] = {}  # cursor of each step that is not over
        self._lock = Lock()

    def draw_ahead(self, steps: int) -> None:
        self._shares.ahead = steps
        for order in self._orders.values():
            order.draw_ahead(steps)

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        with self._lock:
            self._starts.setdefault(step, cursor)
            before = self._places[cursor]
            turns, self._places[cursor + count] = in_turn(self._shares.of(step), before, count)
            counts = {name: turns.count(name) for name in self._orders if name in turns}
            found = {name: iter(self._orders[name].draw(before[name][0], n, step)) for name, n in counts.items()}
            return [next(found[name]) for name in turns]

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None, credit: Credit | None) -> Mapping[str, Any]:
        """Learn from a step's groups; return each task's share of the next prompts, and the fields of its sampler."""
        if groups is None or credit is None:
            return {}
        fields: dict[str, Any] = {}
        with self._lock:
            # Positions of earlier steps are no longer needed: a step that is taken again begins at its own.
            start = self._starts.pop(groups.step, 0)
            self._places = {at: places for at, places in self._places.items() if at >= start}
            self._shares.observe(groups, credit)
            for name, order in self._orders.items():
                own = replace(groups, groups=tuple(groups_of(name, groups.groups)))
                learned = order.retrain_extra_metrics(own) if isinstance(order, LearnedOrder) else {}
                fields |= {f"task_{name}_{field}": value for field, value in learned.items()}
                fields[f"task_{name}_share"] = len(own.groups) / len(groups.groups)
        out = self._shares.out_after(groups.step)
        return fields | ({"tasks_out": ", ".join(out)} if out else {})

    @hookimpl
    def retrain_save_state(self) -> Mapping[str, Any]:
        with self._lock:
            places = {str(at): {name: list(place) for name, place in each.items()} for at, each in self._places.items()}
            orders = {
                n: each.retrain_save_state() for n, each in self._orders.items() if isinstance(each, LearnedOrder)
            }
            return {STATE: {"places": places, "orders": orders, "shares": self._shares.state()}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        saved = state.get(STATE)
        if saved is None or saved["shares"]["idle"].keys() != self._orders.keys():
            # Accepted by --resume-anyway: other tasks begin at their first prompts.
            LOG.warning("The tasks begin without the steps before: the checkpoint has no state of them")
            self._places = defaultdict(lambda: dict.fromkeys(self._orders, (0, 0.0)))
            return
        with self._lock:
            for at, places in saved["places"].items():
                self._places[int(at)] = {name: (int(place[0]), place[1]) for name, place in places.items()}
            self._shares.restore(saved["shares"])
            for name, order in self._orders.items():
                if isinstance(order, LearnedOrder):
                    order.retrain_load_state(saved["orders"][name])


def in_turn(shares: Mapping[str, float], before: Places, count: int) -> tuple[list[str], Places]:
    """Return the task of each of the next `count` prompts, and the places after them.

    Every prompt adds each task's share to its debt, and the task with the largest debt gets the prompt. So
    each stays near its share after any number of prompts, and the batch size does not matter.
    """
    drawn, owed = ({name: place[side] for name, place in before.items()} for side in (0, 1))
    turns = []
    for _ in range(count):
        owed = {name: due + shares[name] for name, due in owed.items()}
        name = max((each for each in owed if shares[each]), key=lambda each: owed[each])
        owed[name] -= 1.0
        drawn[name] += 1
        turns.append(name)
    return turns, {name: (int(drawn[name]), owed[name]) for name in drawn}


class TaskShares:
    """Shares by `[data] schedule`, without the tasks that `dead_task` pauses or ends."""

    def __init__(self, tasks: Sequence[Tasks], config: Config) -> None:
        data = self._data = config.data
        self.ahead, self._group_size = 0, config.training.group_size
        self._ids = {each.name: [prompt.example.id for prompt in each.pool.train] for each in tasks}
        self._base = _shares({each.name: each.weight for each in tasks})
        self._books = {name: RateBook() for name in self._ids} if data.schedule == "posterior" else {}
        self._idle = dict.fromkeys(self._ids, 0)  # steps in a row without a group that taught
        self._until: dict[str, int] = {}  # of the tasks that are out: the step before which they stay out
        self._known: list[tuple[int, dict[str, float]]] = [(-1, self._base)]  # shares as of the end of a step

    def of(self, step: int) -> Mapping[str, float]:
        return next((shares for known, shares in reversed(self._known) if known < step - self.ahead), self._base)

    def out_after(self, step: int) -> list[str]:
        return [name for name, until in self._until.items() if until == FOR_GOOD or step < until]

    def observe(self, view: GroupsView, credit: Credit) -> None:
        step, pairs = view.step, list(zip(view.groups, credit.statuses_P, strict=True))
        for name in self._ids:
            own = [(group, status) for group, status in pairs if groups_of(name, [group])]
            for group, _ in own if self._books else ():
                self._books[name].observe(group.example.id, step, num_correct(group), len(verdicts(group)))
            if own:
                self._idle[name] = 0 if any(status in TEACHES for _, status in own) else self._idle[name] + 1
            if self._idle[name] >= self._data.dead_steps and self._data.dead_task != "keep":
                is_end, self._idle[name] = self._data.dead_task == "end", 0
                self._until[name] = FOR_GOOD if is_end else step + self._data.dead_steps
                how = "ended" if is_end else f"paused until step {self._until[name]}"
                LOG.warning("Task %s %s: nothing taught in its last %d steps", name, how, self._data.dead_steps)
        out, weights = self.out_after(step), self._base
        if self._books:
            chances = {
                name: float(book.chances(self._ids[name], step + 1, self._group_size).mean())
                for name, book in self._books.items()
            }
            weights = {n: (1.0 - EXPLORE) * share + EXPLORE / len(chances) for n, share in _shares(chances).items()}
        left = {name: 0.0 if name in out else weight for name, weight in weights.items()}
        # With no task left the run's own rules apply, such as the health monitors'.
        self._known.append((step, _shares(left if any(left.values()) else weights)))
        self._known = self._known[-self.ahead - 2 :]

    def state(self) -> dict[str, Any]:
        books = {name: book.state() for name, book in self._books.items()}
        return {"idle": self._idle, "until": self._until, "known": [list(each) for each in self._known], "books": books}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._idle, self._until = dict(state["idle"]), dict(state["until"])
        self._known = [(step, shares) for step, shares in state["known"]]
        for name, book in self._books.items():
            book.restore(state["books"][name])


def _shares(weights: Mapping[str, float]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total if total else 1.0 / len(weights) for name, weight in weights.items()}
