"""The prompts of a run as its sampler chooses them, exactly the same whether or not the run was interrupted.

The rule, with d = the number of steps that sampling is ahead (0 in turn): **the prompts of step s are chosen by a
sampler that has observed the steps up to s - 1 - d**. It depends on no clock. Outcomes of the last d steps wait, here
and in checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from threading import Lock
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.errors import PluginError, Problem, RetrainError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import MetricSpec
from retrain.kernel.plugins.build import build_part
from retrain.kernel.types import Group, GroupStatus, Kind, group_status, num_correct, verdicts
from retrain.tasks.prompts import PromptPool
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest, Sampler

KEY, PARAMS, STATE = "data.sampler", "data.sampler_params", "sampler"
UNIFORM = "uniform"
NOT_UNIFORM = "[data] sampler is uniform, or the step was rejected"
METRICS = (
    MetricSpec(
        name="sampler",
        unit="text",
        absent=NOT_UNIFORM,
        meaning="What chose the prompts; no importance weight makes up for it.",
    ),
    MetricSpec(
        name="sampler_chance_mean",
        absent=f"{NOT_UNIFORM}, or the sampler forecasts nothing",
        meaning="Mean forecast of the sampler that the group of a drawn prompt teaches.",
    ),
    MetricSpec(
        name="sampler_uniform_share",
        absent=NOT_UNIFORM,
        meaning="Share of the step's prompts that were drawn with equal probability, to explore.",
    ),
    MetricSpec(
        name="sampler_uniform_correct_rate",
        absent=f"{NOT_UNIFORM}, or no such prompt has a verdict",
        meaning="Correct completions of the prompts that were drawn with equal probability: the share of this policy.",
    ),
)
LOG = logging.getLogger("retrain")


@dataclass(slots=True)
class _Follower:
    """A sampler, and the last step whose outcomes it knows."""

    sampler: Sampler
    observed: int = -1


class SamplingOrder:
    """Draws what a sampler chooses (see `Prompts`), shows it what became of it, and keeps its state in checkpoints.

    `_sampler_state` is the sampler that a resume must restore: it knows the steps that the next one to train is chosen
    by. Where sampling is ahead, the sampler that draws knows more and is a second one, made of the first one's state.
    When a step is drawn anew, because its training ran out of memory, it is made again. A thread may draw while the
    run's observes.
    """

    def __init__(self, pool: PromptPool, name: str, build: Callable[[], Sampler], place: str) -> None:
        """`build` makes a sampler of the pool's training examples; `place` is where the configuration names it."""
        self._pool, self._name, self._build, self._place, self._ahead = pool, name, build, place, 0
        self._prompts = {prompt.example.id: prompt for prompt in pool.train}
        self._lock = Lock()
        self._sampler_state = self._drawing = _Follower(build())
        self._newest = -1  # the step drawn last
        self._in_passes = bool(getattr(self._sampler_state.sampler, "in_passes", False))
        self._waiting: list[tuple[int, list[GroupOutcome]]] = []  # by step, not yet known to `_sampler_state`
        self._choices: dict[int, dict[int, PromptChoice]] = {}  # by step and cursor, of steps that are not over

    def draw_ahead(self, steps: int) -> None:
        """Choose the prompts of each step this many steps before it is trained. Once, before anything is drawn."""
        self._ahead = steps

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        """The next `count` prompts of a step; from the cursor of an earlier call for it on, they replace those."""
        with self._lock:
            if not self._in_passes:
                self._prepare(step)
            before = {at: choice for at, choice in self._choices.get(step, {}).items() if at < cursor}
            chosen = self._chosen(step, cursor, count, [choice.example_id for choice in before.values()])
            self._choices[step] = before | dict(enumerate(chosen, start=cursor))
        size = len(self._pool.train)
        return [
            replace(self._prompts[choice.example_id], epoch=at // size if self._in_passes else at)
            for at, choice in enumerate(chosen, start=cursor)
        ]

    def _prepare(self, step: int) -> None:
        """Have a sampler that knows just the steps that this one is chosen by."""
        if self._ahead and (self._drawing is self._sampler_state or step < self._newest):
            self._drawing = _Follower(self._build(), self._sampler_state.observed)
            with self._named("restore"):
                self._drawing.sampler.restore(_stored(self._sampler_state.sampler))
        self._newest = step
        self._show(self._drawing, step - 1 - self._ahead)

    def _chosen(self, step: int, cursor: int, count: int, drawn: list[str]) -> list[PromptChoice]:
        """What the sampler chooses, checked; it is asked again each time the step has gone through the pool."""
        chosen: list[PromptChoice] = []
        while len(chosen) < count:
            taken = frozenset(drawn[len(drawn) - len(drawn) % len(self._prompts) :])
            left = count - len(chosen)
            wanted = left if self._in_passes else min(left, len(self._prompts) - len(taken))
            request = PromptRequest(step=step, cursor=cursor + len(chosen), count=wanted, taken=taken)
            with self._named("choose"):
                found = list(self._drawing.sampler.choose(request))
                self._check(found, request)
            chosen += found
            drawn += [choice.example_id for choice in found]
        return chosen

    def _check(self, found: Sequence[PromptChoice], request: PromptRequest) -> None:
        ids = [choice.example_id for choice in found]
        wrong = next((each for each in ids if each not in self._prompts), None)
        chances = [choice.chance for choice in found if choice.chance is not None]
        if wrong is not None:
            what, fix = f"chose {wrong!r:.80}, which is no training example", "choose from the given examples alone"
        elif len(ids) != request.count:
            what, fix = f"chose {len(ids)} prompts instead of {request.count}", "choose `request.count`"
        elif not self._in_passes and (len(set(ids)) < len(ids) or request.taken.intersection(ids)):
            what, fix = "chose a prompt twice within a step", "leave out what it chose, and `request.taken`"
        elif not all(math.isfinite(chance) and 0.0 <= chance <= 1.0 for chance in chances):
            what, fix = "gave a chance that is no number from 0 to 1", "give a probability, or None"
        else:
            return
        raise PluginError(self._problem(f"{what}, for step {request.step}", fix))

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None) -> Mapping[str, Any]:
        """Show the sampler what became of its choices; the fields about them."""
        if groups is None:
            return {}
        with self._lock:
            chosen = list(self._choices.get(groups.step, {}).values())
            for step in [step for step in self._choices if step <= groups.step]:
                del self._choices[step]
            if self._in_passes:
                return {}
            outcomes = [_outcome(group) for group in groups.groups]
            self._waiting.append((groups.step, outcomes))
            self._observe_up_to(groups.step - self._ahead)
        chances = [choice.chance for choice in chosen if choice.chance is not None]
        fields: dict[str, Any] = {"sampler": self._name}
        fields |= {"sampler_chance_mean": math.fsum(chances) / len(chances)} if chances else {}
        explored = {choice.example_id for choice in chosen if choice.is_uniform}
        judged = [outcome for outcome in outcomes if outcome.example_id in explored and outcome.judged]
        if judged:
            right = sum(outcome.correct for outcome in judged)
            fields["sampler_uniform_correct_rate"] = right / sum(outcome.judged for outcome in judged)
        return fields | {"sampler_uniform_share": sum(choice.is_uniform for choice in chosen) / max(len(chosen), 1)}

    def _observe_up_to(self, last: int) -> None:
        """Let both samplers know the steps up to `last`: what is drawn from now on may know them."""
        for follower in (self._sampler_state, self._drawing):
            self._show(follower, last)
        self._waiting = [(step, outcomes) for step, outcomes in self._waiting if step > self._sampler_state.observed]

    def _show(self, follower: _Follower, last: int) -> None:
        for step, outcomes in self._waiting:
            if follower.observed < step <= last:
                with self._named("observe"):
                    follower.sampler.observe(step, outcomes)
                follower.observed = step

    @hookimpl
    def retrain_save_state(self) -> Mapping[str, Any] | None:
        """The sampler state and what it does not know yet; None for a fixed order, which needs no state."""
        if self._in_passes:
            return None
        with self._lock, self._named("state"):
            waiting = [
                [step, [asdict(outcome) for outcome in outcomes]]
                for step, outcomes in self._waiting
                if step > self._sampler_state.observed
            ]
            state = _stored(self._sampler_state.sampler)
            return {
                STATE: {
                    "name": self._name,
                    "observed": self._sampler_state.observed,
                    "state": state,
                    "waiting": waiting,
                }
            }

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue as the checkpoint says; after a change of sampler that was insisted on, from nothing."""
        saved = state.get(STATE)
        if self._in_passes:
            return
        if saved is None or saved["name"] != self._name:
            LOG.warning("Sampler %r begins without the steps before: the checkpoint has no state of it", self._name)
            return
        with self._lock, self._named("restore"):
            self._sampler_state.sampler.restore(saved["state"])
            self._sampler_state.observed = int(saved["observed"])
            self._waiting = [
                (int(step), [GroupOutcome(**each) for each in outcomes]) for step, outcomes in saved["waiting"]
            ]

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """An exception of a sampler becomes a PluginError with its name."""
        try:
            yield
        except RetrainError:
            raise
        except Exception as error:
            what = f"{method}() raised {type(error).__name__}: {error}"
            raise PluginError(self._problem(what, "repair that sampler, or use another")) from error

    def _problem(self, what: str, fix: str) -> Problem:
        return Problem(where=self._place, what=f"sampler {self._name!r} {what}", fix=fix)


def sampling_order(pool: PromptPool, context: PluginContext) -> SamplingOrder:
    """The prompts of a run, chosen by its `[data] sampler`."""
    name: str = context.config.value(KEY, UNIFORM)
    params: dict[str, Any] = context.config.value(PARAMS, {})
    examples = tuple(prompt.example for prompt in pool.train)

    def build() -> Sampler:
        sampler: Sampler = build_part(Kind.SAMPLER, name, KEY, context, params, PARAMS, [examples])
        return sampler

    return SamplingOrder(pool, name, build, context.config.place(KEY))


def _stored(sampler: Sampler) -> dict[str, Any]:
    """Its state as a checkpoint has it, which shares nothing with the sampler."""
    state: dict[str, Any] = json.loads(json.dumps(dict(sampler.state())))
    return state


def _outcome(group: Group) -> GroupOutcome:
    return GroupOutcome(
        example_id=group.example.id,
        correct=num_correct(group),
        judged=len(verdicts(group)),
        is_informative=group_status(group) in (GroupStatus.INFORMATIVE, GroupStatus.SURPLUS),
    )
