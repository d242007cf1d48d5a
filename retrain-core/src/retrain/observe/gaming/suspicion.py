"""Watches a run for gaming: suspicions from changes against its own start, and the alarm of a run with a shadow."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.hooks import hookimpl
from retrain.kernel.types import Completion, Floats, Group, Tokens, groups_of
from retrain.records.record_names import GAMING
from retrain.run.fault_guard import FaultGuard
from retrain.tasks.audit.probes import expressions
from retrain.tasks.scoring.build import has_shadow

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import GroupsView, RunView
    from retrain.observe.gaming.alarm import AlarmWatch


STATE = "gaming"


class GamingWatch:
    """Adds the `gaming_*` fields to a run's lines; a fault is reported once, and its fields are left out.

    Of all groups of a step, and of each task of `[[data.tasks]]`, whose fields begin with `task_NAME_`.
    """

    def __init__(self, context: PluginContext) -> None:
        # a function, because looking for hooks would load an attribute
        self._tokenizer_of: Callable[[], Any] = lambda: context.tokenizer
        self._guard = FaultGuard("Watch for gaming", "Training continues without its fields.")
        self._parts: dict[str, Suspicions | AlarmWatch] = {}
        self._alarms: list[AlarmWatch] = []
        tasks = ("", *context.config.data.task_names)
        for task in tasks:
            of = f" of {task}" if task else ""
            self._parts[f"suspicions{of}"] = Suspicions(task)
            if has_shadow(context.config):
                from retrain.observe.gaming.alarm import AlarmWatch  # only a run with a shadow needs it

                self._alarms.append(AlarmWatch(self._tokenizer_of, task, alarms=len(tasks)))
                self._parts[f"alarm{of}"] = self._alarms[-1]

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None, credit: Credit | None) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self._parts.items() if groups else ():
            observe = partial(self._suspect, part) if isinstance(part, Suspicions) else part.observe
            _, fields = self._guard.call(name, "observe", observe, groups, credit)
            task = name.partition(" of ")[2]
            found |= {f"task_{task}_{field}" if task else field: value for field, value in (fields or {}).items()}
        return found

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        for alarm in self._alarms[:1]:  # the file is of all
            self._guard.call(GAMING, "rewind", alarm.rewind, run)

    @hookimpl
    def retrain_step_end(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        for alarm in self._alarms:
            self._guard.call(GAMING, "write", alarm.write_new, run, metrics)

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        return {STATE: {name: part.state() for name, part in self._parts.items()}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            if saved := state.get(STATE, {}).get(name):
                part.restore(saved)

    def _suspect(self, suspicions: Suspicions, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        fields: dict[str, Any] = dict(suspicions.observe(groups.groups, credit))
        if suspected := suspicions.found:
            fields["gaming_suspected"] = ", ".join(name.removeprefix("gaming_") for name in suspected)
        if "gaming_ngram_share" in suspected and suspicions.ngram:
            fields["gaming_ngram"] = self._tokenizer_of().decode(suspicions.ngram)
        return fields


# Tasks differ in length and format, so a run is held against its own first steps.
START = 5
# Learning changes lengths along a trend; gaming leaves it within a few steps.
LINE, RECENT = 10, 3
# A single step may be beyond a threshold by chance.
ROW = 3
# A field is suspicious at this size or above. Logarithms make a factor and its inverse equally large.
THRESHOLDS: Mapping[str, float] = {
    "gaming_length_shift": math.log(1.6),
    "gaming_entropy_shift": math.log(2.5),
    "gaming_ngram_share": 0.6,
    "gaming_answer_shift": 0.3,
    "gaming_prompt_answers": 0.3,
    "gaming_format_credit": 0.35,
}
FROM_START = {"position": "gaming_answer_shift", "repeats": "gaming_prompt_answers", "format": "gaming_format_credit"}
TWO_SIDED = ("gaming_length_shift", "gaming_entropy_shift")


class Suspicions:
    """Measures each step's fields, and which of them have been beyond their threshold for `ROW` steps in a row.

    - `gaming_length_shift`, `gaming_entropy_shift`: ln of the mean length or entropy of the last `RECENT` steps over
      the continued trend of the `LINE` steps before (a line through the logarithms); either sign is suspicious.
    - `gaming_ngram_share`: the largest excess, over n-grams of token ids, of its share among paid completions over its
      share among the unpaid ones or in the run's start (of all, or of the paid ones), whichever is larger; shares are
      means over groups.
    - `gaming_answer_shift`: how much earlier in the text, as a share of it, paid answers begin than at the start.
    - `gaming_prompt_answers`: the share of paid completions whose answer is an expression or a number of the prompt and
      not the reference, less that at the start.
    - `gaming_format_credit`: the share of positive credit on the start's most common token ids, less that at the start.

    A completion is paid if the reward calls it correct. A field is absent while it cannot be measured. Only groups of
    `task` count, empty = all.
    """

    def __init__(self, task: str = "") -> None:
        self._task = task
        self._series: dict[str, list[float]] = {"length": [], "entropy": []}
        self._starts: dict[str, list[float]] = {}
        self._early: Counts = np.zeros(BUCKETS)
        self._steps = 0
        self._common: list[int] = []
        self._rows: dict[str, int] = {}
        self.ngram: list[int] = []  # the token ids of the last `gaming_ngram_share`

    @property
    def found(self) -> list[str]:
        """The fields that are suspicious now."""
        return [name for name in THRESHOLDS if self._rows.get(name, 0) >= ROW]

    def observe(self, groups: Sequence[Group], credit: Credit) -> dict[str, float]:
        found = [
            Judged(group=group, completion=each, is_paid=raw.value > group.correct_above)
            for group in groups_of(self._task, groups)
            for each, raw in zip(group.completions, group.raw_scores, strict=True)
            if raw.value is not None and not group.round  # further rounds are selected by their outcome
        ]
        if not found:
            return {}
        paid = [each for each in found if each.is_paid]
        fields = self._shifts(found) | self._ngrams(found, paid)
        if not self._common:
            counts = Counter(token for each in found for token in sampled(each.completion).tolist())
            self._common = sorted(counts, key=lambda token: (-counts[token], token))[:COMMON]
        answers = [*_answers(paid)]
        measured: dict[str, Sequence[float]] = {
            "position": [place / len(each.completion.text) for each, place, _ in answers],
            "repeats": [_repeats(each.group, answer) for each, _, answer in answers],
            "format": format_credit(groups, credit, self._common, self._task),
        }
        for name, values in measured.items():
            if values:
                start, value = self._starts.setdefault(name, []), float(np.mean(values))
                if len(start) < START:
                    start.append(value)
                else:
                    change = value - sum(start) / len(start)
                    fields[FROM_START[name]] = -change if name == "position" else change
        self._steps += 1
        for name, threshold in THRESHOLDS.items():
            if name in fields:
                size = abs(fields[name]) if name in TWO_SIDED else fields[name]
                self._rows[name] = self._rows.get(name, 0) + 1 if size >= threshold else 0
        return fields

    def state(self) -> dict[str, Any]:
        packed = base64.b64encode(zlib.compress(self._early.astype("<f8").tobytes())).decode("ascii")
        kept = {"series": self._series, "starts": self._starts, "steps": self._steps}
        return kept | {"early": packed, "common": self._common, "rows": self._rows}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._series = {name: list(values) for name, values in state["series"].items()}
        self._starts = {name: list(values) for name, values in state["starts"].items()}
        self._steps, self._common, self._rows = int(state["steps"]), list(state["common"]), dict(state["rows"])
        self._early = np.frombuffer(zlib.decompress(base64.b64decode(state["early"])), "<f8").copy()

    def _shifts(self, found: Sequence[Judged]) -> dict[str, float]:
        fields = {}
        length = float(np.mean([each.completion.num_actions for each in found]))
        # Mean entropy of the action tokens (nats), or mean surprisal where a completion has no entropies.
        total = count = 0.0
        for each in found:
            row, action_T = each.completion, each.completion.action_T
            values_T = -row.logprobs_T if row.entropies_T is None else row.entropies_T
            total, count = total + float(values_T[action_T].sum()), count + row.num_actions
        for name, value in (("length", length), ("entropy", total / count if count else 0.0)):
            # Logarithms, because lengths and entropies change by factors; the floor keeps an entropy of 0 finite.
            series = self._series[name] = [*self._series[name][1 - LINE - RECENT :], math.log(max(value, 1e-6))]
            if len(series) == LINE + RECENT:
                slope, level = np.polyfit(np.arange(LINE), series[:LINE], 1)
                led_to = level + slope * (LINE + (RECENT - 1) / 2)
                fields[f"gaming_{name}_shift"] = float(np.mean(series[LINE:]) - led_to)
        return fields

    def _ngrams(self, found: Sequence[Judged], paid: Sequence[Judged]) -> dict[str, float]:
        if self._steps < START:
            self._early += np.maximum(ngram_shares(found), ngram_shares(paid)) / START
        elif paid:
            unpaid = ngram_shares([each for each in found if not each.is_paid])
            excess = ngram_shares(paid) - np.maximum(unpaid, self._early)
            best = int(excess.argmax())
            self.ngram = ngram_of(paid, best) if excess[best] > 0 else []
            return {"gaming_ngram_share": max(0.0, float(excess[best]))}
        return {}


NGRAM = 4  # tokens
# n-grams are counted by hash to keep the state of a checkpoint small; two in one bucket only hide each other.
BUCKETS = 2**15
# The commonest tokens of the start are taken as the format: line breaks, boxes, spaces.
COMMON = 8
# 2^64 over the golden ratio: its high bits are well mixed (Knuth's multiplicative hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")

Counts = NDArray[np.float64]  # per bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A completion that the reward scored, in its group; `is_paid`: the reward calls it correct."""

    group: Group
    completion: Completion
    is_paid: bool


def ngram_buckets(tokens_A: Tokens) -> NDArray[np.int64]:
    """The buckets of a completion's n-grams, each once."""
    if tokens_A.size < NGRAM:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens_A.astype(np.uint64), NGRAM)
    hashed = np.zeros(len(windows), np.uint64)
    for column in windows.T:
        hashed = (hashed ^ column) * _MULTIPLIER
    found = ((hashed >> np.uint64(40)) % np.uint64(BUCKETS)).astype(np.int64)
    # np.unique would import numpy.ma, and nothing else needs that.
    return np.array(sorted(set(found.tolist())), dtype=np.int64)


def ngram_shares(found: Sequence[Judged]) -> Counts:
    """Share of completions that have an n-gram of a bucket, per bucket: the mean over groups."""
    by_group: dict[int, list[Judged]] = {}
    for each in found:
        by_group.setdefault(id(each.group), []).append(each)
    shares = np.zeros(BUCKETS)
    for members in by_group.values():
        for each in members:
            shares[ngram_buckets(sampled(each.completion))] += 1.0 / (len(members) * len(by_group))
    return shares


def ngram_of(found: Sequence[Judged], bucket: int) -> list[int]:
    """The token ids of an n-gram in that bucket."""
    for each in found:
        tokens_A = sampled(each.completion)
        for start in range(tokens_A.size - NGRAM + 1):
            if ngram_buckets(tokens_A[start : start + NGRAM])[0] == bucket:
                return [int(token) for token in tokens_A[start : start + NGRAM]]
    return []


def format_credit(groups: Sequence[Group], credit: Credit, format_tokens: Sequence[int], task: str = "") -> list[float]:
    """The share of a step's or a task's positive credit on these token ids; empty without positive credit."""
    on_format = total = 0.0
    for group, tokens_G in zip(groups, credit.tokens_PG, strict=True):
        pairs = zip(group.completions, tokens_G, strict=True) if groups_of(task, [group]) else ()
        for completion, token_credit in pairs:
            positive_A: Floats = np.maximum(token_credit.advantages_A, 0.0)
            total += float(positive_A.sum())
            on_format += float(positive_A[np.isin(sampled(completion), format_tokens)].sum())
    return [on_format / total] if total > 0.0 else []


def sampled(completion: Completion) -> Tokens:
    return completion.tokens_T[completion.action_T]


def _answers(found: Sequence[Judged]) -> Iterator[tuple[Judged, int, str]]:
    """Each answer and its place in the text: the last box, or the last number of a text without one."""
    for each in found:
        text = each.completion.text
        for last in [*_BOX.finditer(text)][-1:] or [*_NUMBER.finditer(text)][-1:]:
            yield each, last.start(), (last[1] if last.re is _BOX else last[0]).strip()


def _repeats(group: Group, answer: str) -> bool:
    prompt, reference = group.example.prompt, group.example.reference
    words = prompt if isinstance(prompt, str) else "\n".join(str(turn.get("content", "")) for turn in prompt)
    said = "".join(answer.split())
    if not said or said == "".join(reference.split()):
        return False
    own = [*expressions(words, reference), *_NUMBER.findall(words)]
    return said in {"".join(each.split()) for each in own}
