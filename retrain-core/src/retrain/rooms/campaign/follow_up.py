"""What plugins do when a run of a campaign is done (`retrain_campaign_run_done`), beside the runs that go on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.errors import RetrainError
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.campaign.load import Campaign
from retrain.rooms.campaign.planned import PlannedRun

HOOK = "retrain_campaign_run_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What came of one run: fields for the manifest, or the error that ended it."""

    run: PlannedRun
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class FollowUps:
    """Calls the hook for one run after the other, in a thread that dies with the process."""

    def __init__(self, campaign: Campaign, plugins: Plugins, folder: Path, tables: frozenset[str]) -> None:
        self._campaign, self._plugins, self._folder, self._tables = campaign, plugins, folder, tables
        self._wanted: queue.SimpleQueue[tuple[PlannedRun, bool]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Followed] = queue.SimpleQueue()
        self.num_open = 0
        self._thread: threading.Thread | None = None

    def submit(self, run: PlannedRun, *, is_first: bool) -> None:
        """Let the plugins know of a run that is done."""
        self.num_open += 1
        self._wanted.put((run, is_first))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="campaign-follow-up", daemon=True)
            self._thread.start()

    def finished(self) -> Iterator[Followed]:
        """What has come out since the last time."""
        while not self._results.empty():
            self.num_open -= 1
            yield self._results.get()

    def _work(self) -> None:
        while True:
            run, is_first = self._wanted.get()
            self._results.put(self._call(run, is_first))

    def _call(self, run: PlannedRun, is_first: bool) -> Followed:
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
            return Followed(run=run, fields=fields)
        except RetrainError as error:
            return Followed(run=run, error=str(error))
        except BaseException as error:  # a thread that dies in silence would be waited for
            return Followed(run=run, error=f"{type(error).__name__}: {error}")
