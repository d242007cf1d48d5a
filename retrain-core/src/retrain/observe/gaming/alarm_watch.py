"""Watches a run for gaming: adds the `gaming_*` fields to its lines, and writes `gaming.jsonl` when an alarm begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.hooks import hookimpl
from retrain.observe.gaming.alarm import GamingAlarm, verdicts_of
from retrain.observe.gaming.alarm_record import (
    alarm_record,
    drop_from,
    paid_in,
    telling_tokens,
    unconfirmed,
    write_alarm,
)
from retrain.observe.gaming.suspicion import Suspicions
from retrain.records.record_names import GAMING
from retrain.run.fault_guard import FaultGuard

if TYPE_CHECKING:
    from retrain.kernel.contracts.algorithm import Credit
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import GroupsView, RunView

STATE = "gaming"
MOST_CHARS = 160  # of an example in a line


class GamingWatch:
    """The alarm and the suspicions of one run; a fault in either is reported once, and its fields are left out."""

    def __init__(self, context: PluginContext) -> None:
        # a function, because looking for hooks would load an attribute
        self._tokenizer_of: Callable[[], Any] = lambda: context.tokenizer
        self._alarm, self._suspicions = GamingAlarm(), Suspicions()
        self._guard = FaultGuard("Watch for gaming", "Training continues without what it tells.")
        self._is_new = False  # the alarm began at the step under way

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None, credit: Credit | None) -> Mapping[str, Any]:
        """The fields of a step."""
        if groups is None:
            return {}
        _, suspicions = self._guard.call("suspicions", "observe", self._suspect, groups, credit)
        _, alarm = self._guard.call("alarm", "observe", self._judge, groups, credit)
        return {**(suspicions or {}), **(alarm or {})}

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        """Drop the alarms of steps that will be run again."""
        self._guard.call(GAMING, "rewind", drop_from, run.folder, run.first_step)

    @hookimpl
    def retrain_step_end(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Name what was paid and not confirmed since the change, once the records of the step are written."""
        if self._is_new:
            self._is_new = False
            self._guard.call(GAMING, "write", self._write, run, metrics)

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """The state of both."""
        return {STATE: {"alarm": self._alarm.state(), "suspicions": self._suspicions.state()}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved; a run of an earlier version starts afresh."""
        if STATE in state:
            self._alarm.restore(state[STATE]["alarm"])
            self._suspicions.restore(state[STATE]["suspicions"])

    def _suspect(self, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        fields: dict[str, Any] = dict(self._suspicions.observe(groups.groups, credit))
        if suspected := self._suspicions.found:
            fields["gaming_suspected"] = ", ".join(name.removeprefix("gaming_") for name in suspected)
        if "gaming_ngram_share" in suspected and self._suspicions.ngram:
            fields["gaming_ngram"] = self._tokenizer_of().decode(self._suspicions.ngram)
        return fields

    def _judge(self, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        verdicts = verdicts_of(groups.groups)
        if not verdicts:
            return {}
        was_on = self._alarm.is_on
        self._alarm.observe(groups.step, verdicts)
        self._is_new = self._alarm.is_on and not was_on
        fields: dict[str, Any] = {"gaming_evidence": self._alarm.evidence}
        if paid := sum(each.paid for each in verdicts):
            fields["gaming_unconfirmed"] = 1.0 - sum(each.confirmed for each in verdicts) / paid
        if self._alarm.is_on:
            fields |= {"gaming_since": self._alarm.since, **self._example(groups, credit)}
        return fields

    def _example(self, groups: GroupsView, credit: Credit) -> dict[str, str]:
        """The most credited completion of the step that was paid and not confirmed, and the tokens it is known by."""
        paid = paid_in(groups.groups, credit)
        tokens = [self._tokenizer_of().decode([token]) for token in telling_tokens(paid)]
        found = {"gaming_tokens": " | ".join(map(repr, tokens))} if tokens else {}
        for each in unconfirmed(paid)[:1]:
            text = " ".join(each.fields["completion"].split())
            where = f"group {each.fields['group']}, completion {each.fields['index']}"
            found["gaming_example"] = f"{where}: {text[:MOST_CHARS]}{'...' if len(text) > MOST_CHARS else ''}"
        return found

    def _write(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        write_alarm(
            run.folder, alarm_record(run.folder, metrics, run.config.scoring.correct_above, self._tokenizer_of())
        )
