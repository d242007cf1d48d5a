"""Watches a run for gaming: the suspicions of every run, and the alarm of one with a shadow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.config.plugin_tables import ShadowKeys
from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.hooks import hookimpl
from retrain.observe.gaming.suspicion import Suspicions
from retrain.records.record_names import GAMING
from retrain.run.fault_guard import FaultGuard

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import GroupsView, RunView

STATE = "gaming"


class GamingWatch:
    """Adds the `gaming_*` fields to a run's lines; a fault is reported once, and its fields are left out."""

    def __init__(self, context: PluginContext) -> None:
        # a function, because looking for hooks would load an attribute
        self._tokenizer_of: Callable[[], Any] = lambda: context.tokenizer
        self._suspicions = Suspicions()
        self._guard = FaultGuard("Watch for gaming", "Training continues without what it tells.")
        self._alarm = None
        if context.config.table("reward", ShadowKeys).shadow:
            from retrain.observe.gaming.alarm_watch import AlarmWatch  # only a run with a shadow needs it

            self._alarm = AlarmWatch(self._tokenizer_of)

    @hookimpl
    def retrain_extra_metrics(self, groups: GroupsView | None, credit: Credit | None) -> Mapping[str, Any]:
        """The fields of a step."""
        if groups is None:
            return {}
        _, fields = self._guard.call("suspicions", "observe", self._suspect, groups, credit)
        if self._alarm is None:
            return fields or {}
        _, alarm = self._guard.call("alarm", "observe", self._alarm.observe, groups, credit)
        return {**(fields or {}), **(alarm or {})}

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        """Drop the alarms of steps that will be run again."""
        if self._alarm:
            self._guard.call(GAMING, "rewind", self._alarm.rewind, run)

    @hookimpl
    def retrain_step_end(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Write a new alarm, once the records of the step are written."""
        if self._alarm:
            self._guard.call(GAMING, "write", self._alarm.write_new, run, metrics)

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """The state of both."""
        alarm = {"alarm": self._alarm.state()} if self._alarm else {}
        return {STATE: {"suspicions": self._suspicions.state(), **alarm}}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        if saved := state.get(STATE):
            self._suspicions.restore(saved["suspicions"])
            if self._alarm and "alarm" in saved:
                self._alarm.restore(saved["alarm"])

    def _suspect(self, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        fields: dict[str, Any] = dict(self._suspicions.observe(groups.groups, credit))
        if suspected := self._suspicions.found:
            fields["gaming_suspected"] = ", ".join(name.removeprefix("gaming_") for name in suspected)
        if "gaming_ngram_share" in suspected and self._suspicions.ngram:
            fields["gaming_ngram"] = self._tokenizer_of().decode(self._suspicions.ngram)
        return fields
