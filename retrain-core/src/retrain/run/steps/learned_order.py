"""The prompts of a run as a sampler chooses them that learns from outcomes, the same whether interrupted or not.

The rule, with d = the number of steps that sampling is ahead (0 in turn): **the prompts of step s are chosen by a
sampler that has observed the steps up to s - 1 - d**. It depends on no clock. Outcomes of the last d steps wait, here
and in checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from threading import Lock
from typing import Any

from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.declared import MetricSpec
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import Group, GroupStatus, group_status, num_correct, verdicts
from retrain.run.steps.sampling_order import NamedSampler
from retrain.tasks.prompts import PromptPool
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest

STATE = "sampler"
NOT_UNIFORM = "[data] sampler is uniform, or the step was rejected"
METRICS = tuple(
    MetricSpec(name=name, meaning=meaning, unit=unit, absent=NOT_UNIFORM + more)
    for name, meaning, unit, more in (
        ("sampler", "Sampler that chose the prompts; no importance weight makes up for it.", "text", ""),
        (
            "sampler_chance_mean",
            "Mean forecast of the sampler that the group of a drawn prompt teaches.",
            "",
            ", or the sampler forecasts nothing",
        ),
        (
            "sampler_uniform_share",
            "Share of the step's prompts that were drawn with equal probability, to explore.",
            "",
            "",
        ),
        (
            "sampler_uniform_correct_rate",
            "Correct completions of the prompts that were drawn with equal probability: the share of this policy.",
            "",
            ", or no such prompt has a verdict",
        ),
    )
)
LOG = logging.getLogger("retrain")


class LearnedOrder:
    """Draws the choices of a sampler (see `Prompts`), shows it their outcomes, and keeps its state in checkpoints.

    `_sampler_state` is the sampler that a resume must restore: it knows the steps that the next one to train is chosen
    by. While sampling is ahead, a second sampler chooses: it knows more, and begins with the first one's state. When a
    step is chosen again, because its training ran out of memory, it is made again. A thread may draw while the run's
    observes.
    """

    def __init__(self, pool: PromptPool, build: Callable[[], NamedSampler]) -> None:
        self._build, self._ahead = build, 0
        self._prompts = {prompt.example.id: prompt for prompt in pool.train}
        self._lock = Lock()
        self._sampler_state = self._choosing = build()
        self._newest = -1  # the step drawn last
        self._waiting: list[tuple[int, list[GroupOutcome]]] = []  # by step, not yet known to `_sampler_state`
        self._choices: dict[int, dict[int, PromptChoice]] = {}  # by step and cursor, of steps that are not over

    def draw_ahead(self, steps: int) -> None:
        """Choose the prompts of each step this many steps before it is trained. Once, before anything is drawn."""
        self._ahead = steps

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        """The next `count` prompts of a step; from the cursor of an earlier call for it on, they replace those."""
        with self._lock:
            # A sampler that knows only the steps that this one is chosen by.
            if self._ahead and (self._choosing is self._sampler_state or step < self._newest):
                self._choosing = self._build()
                self._choosing.restore(self._sampler_state.state(), self._sampler_state.observed)
            self._newest = step
            self._show(self._choosing, step - 1 - self._ahead)
            before = {at: choice for at, choice in self._choices.get(step, {}).items() if at < cursor}
            chosen = self._chosen(step, cursor, count, [choice.example_id for choice in before.values()])
            self._choices[step] = before | dict(enumerate(chosen, start=cursor))
        return [replace(self._prompts[each.example_id], epoch=at) for at, each in enumerate(chosen, start=cursor)]

    def _chosen(self, step: int, cursor: int, count: int, sampled: list[str]) -> list[PromptChoice]:
        """Return the sampler's choices; it chooses again each time the step has gone through the pool."""
        chosen: list[PromptChoice] = []
        while len(chosen) < count:
            # Only the current pass counts: a step larger than the pool has to repeat prompts.
            taken = frozenset(sampled[len(sampled) - len(sampled) % len(self._prompts) :])
            wanted = min(count - len(chosen), len(self._prompts) - len(taken))
            request = PromptRequest(step=step, cursor=cursor + len(chosen), count=wanted, taken=taken)
            found = self._choosing.choose(request, self._prompts)
            chosen += found
            sampled += [choice.example_id for choice in found]
        return chosen

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None) -> Mapping[str, Any]:
        """Show the sampler the outcomes of its choices; return the fields about them."""
        if groups is None:
            return {}
        with self._lock:
            chosen = list(self._choices.get(groups.step, {}).values())
            self._choices = {step: choices for step, choices in self._choices.items() if step > groups.step}
            outcomes = [_outcome(group) for group in groups.groups]
            self._waiting.append((groups.step, outcomes))
            for sampler in (self._sampler_state, self._choosing):
                self._show(sampler, groups.step - self._ahead)
            self._waiting = [(step, each) for step, each in self._waiting if step > self._sampler_state.observed]
        chances = [choice.chance for choice in chosen if choice.chance is not None]
        fields: dict[str, Any] = {"sampler": self._sampler_state.name}
        fields |= {"sampler_chance_mean": math.fsum(chances) / len(chances)} if chances else {}
        explored = {choice.example_id for choice in chosen if choice.is_uniform}
        judged = [outcome for outcome in outcomes if outcome.example_id in explored and outcome.judged]
        if judged:
            right = sum(outcome.correct for outcome in judged)
            fields["sampler_uniform_correct_rate"] = right / sum(outcome.judged for outcome in judged)
        return fields | {"sampler_uniform_share": sum(choice.is_uniform for choice in chosen) / max(len(chosen), 1)}

    def _show(self, sampler: NamedSampler, last: int) -> None:
        for step, outcomes in self._waiting:
            if sampler.observed < step <= last:
                sampler.observe(step, outcomes)

    @hookimpl
    def retrain_save_state(self) -> Mapping[str, Any]:
        with self._lock:
            known = self._sampler_state
            waiting = [[step, [asdict(each) for each in outcomes]] for step, outcomes in self._waiting]
            saved = {"name": known.name, "observed": known.observed, "state": known.state(), "waiting": waiting}
            return {STATE: saved}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue as the checkpoint says; after an accepted change of sampler, from nothing."""
        saved, known = state.get(STATE), self._sampler_state
        if saved is None or saved["name"] != known.name:
            LOG.warning("Sampler %r begins without the steps before: the checkpoint has no state of it", known.name)
            return
        with self._lock:
            known.restore(saved["state"], int(saved["observed"]))
            self._waiting = [(int(step), [GroupOutcome(**each) for each in found]) for step, found in saved["waiting"]]


def _outcome(group: Group) -> GroupOutcome:
    return GroupOutcome(
        example_id=group.example.id,
        correct=num_correct(group),
        judged=len(verdicts(group)),
        is_informative=group_status(group) in (GroupStatus.INFORMATIVE, GroupStatus.SURPLUS),
    )
