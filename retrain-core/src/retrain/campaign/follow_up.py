"""Calls `retrain_campaign_run_done` for finished runs, in a thread, while other runs continue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.campaign.load import Campaign
from retrain.campaign.planned import PlannedRun
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins

HOOK = "retrain_campaign_run_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpResult:
    """What the plugins returned for one run: fields for the manifest, or the error that was raised."""

    run: PlannedRun
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class FollowUps:
    """Calls the hook for one run after another, in a daemon thread."""

    def __init__(self, campaign: Campaign, plugins: Plugins, folder: Path, tables: frozenset[str]) -> None:
        self._campaign, self._plugins, self._folder, self._tables = campaign, plugins, folder, tables
        self._wanted: queue.SimpleQueue[tuple[PlannedRun, bool]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[FollowUpResult] = queue.SimpleQueue()
        self.num_open = 0
        self._thread: threading.Thread | None = None

    def submit(self, run: PlannedRun, *, is_first: bool) -> None:
        """Queue a finished run for the plugins."""
        self.num_open += 1
        self._wanted.put((run, is_first))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="campaign-follow-up", daemon=True)
            self._thread.start()

    def finished(self) -> Iterator[FollowUpResult]:
        """Results that arrived since the last call."""
        while not self._results.empty():
            self.num_open -= 1
            yield self._results.get()

    def _work(self) -> None:
        while True:
            run, is_first = self._wanted.get()
            self._results.put(self._call(run, is_first))

    def _call(self, run: PlannedRun, is_first: bool) -> FollowUpResult:
        try:
            answers = self._plugins.notify(
                HOOK,
                config=self._campaign.config,
                tables=self._tables,
                run=run.folder,
                campaign=self._folder,
                is_first=is_first,
            )
            fields = {name: value for answer in answers if answer for name, value in answer.items()}
            return FollowUpResult(run=run, fields=fields)
        except RetrainError as error:
            return FollowUpResult(run=run, error=str(error))
        except BaseException as error:  # otherwise the campaign would wait for a dead thread
            return FollowUpResult(run=run, error=f"{type(error).__name__}: {error}")
