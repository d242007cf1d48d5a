"""Where a scenario takes place: its folder, the processes of it, and what is known of how far they are."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.records.files import owner_of
from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end import killing
from tests.end_to_end.campaigns import session_of
from tests.servers.fleet import StandIn
from tests.soak.configurations import CAMPAIGN, Configuration
from tests.soak.referee import require

PATIENCE_S = 400.0  # for a whole leg, on a machine that does other things as well
NAME = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


class Ground:
    """`run` is where the records are now; a run that was rescued goes on in another folder."""

    def __init__(self, configuration: Configuration, folder: Path, stream: random.Random) -> None:
        self.configuration, self.folder, self.stream = configuration, folder, stream
        self.run = folder / NAME
        self.servers: Sequence[StandIn] = ()
        self._processes: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        """The files of the configuration, and its servers."""
        if self.configuration.shape == "server":
            self.servers = [StandIn(BUILTIN_MODELS["tiny"]) for _ in range(2)]
        self.configuration.write(self.folder, [server.url for server in self.servers])

    @property
    def runs(self) -> list[Path]:
        if not self.configuration.is_campaign:
            return [self.run]
        return [file.parent for file in sorted(self.run.glob("runs/*/run.json"))]

    @property
    def victim(self) -> Path:
        """The run whose files are damaged: of a campaign the first that has not ended well, or none."""
        state = {run: json.loads((run / "run.json").read_text(encoding="utf-8"))["status"] for run in self.runs}
        return next((run for run in self.runs if state[run] != "done"), self.folder / "nowhere")

    def arguments(self) -> Sequence[str]:
        if self.configuration.is_campaign:
            return (CAMPAIGN, "--log-dir", NAME)
        return ("--resume", self.run.name) if (self.run / "run.json").exists() else ()

    def start(self, patch: str = "", *files: str) -> subprocess.Popen[str]:
        """The run goes on, in a process that `patch` has altered; a campaign in a session of its own, unaltered."""
        if self.configuration.is_campaign:
            process = subprocess.Popen(
                [sys.executable, "-m", "retrain", *self.arguments()],
                cwd=self.folder,
                env={**os.environ, **killing.ONE_CORE},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        else:
            process = killing.start(*files, *self.arguments(), cwd=self.folder, patch=patch)
        self._processes.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> Ended:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.end(process)
            raise
        return Ended(code=process.returncode, out=out, err=err)

    def num_records(self) -> int:
        """Lines of `metrics.jsonl` so far, of all runs."""
        found = 0
        for run in self.runs:
            with suppress(OSError):
                found += (run / "metrics.jsonl").read_bytes().count(b"\n")
        return found

    def wait_for_records(self, process: subprocess.Popen[str], wanted: int) -> None:
        """Until there are that many, and the process has written one of them; or it is gone.

        A resume cuts lines off before it writes: what counts is that there are more than there were at the least.
        """
        least = self.num_records()

        def is_there() -> bool:
            nonlocal least
            now = self.num_records()
            least = min(least, now)
            return now > least and now >= wanted

        self.wait_until(process, is_there)

    def wait_for_lock(self, process: subprocess.Popen[str]) -> None:
        self.wait_until(process, lambda: owner_of(self.run) == process.pid)

    def wait_until(self, process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
        last = time.monotonic() + PATIENCE_S
        while not condition() and process.poll() is None:
            require(time.monotonic() < last, f"nothing came of it in {PATIENCE_S:g} s")
            time.sleep(0.01)

    def pause(self, longest_s: float) -> None:
        time.sleep(self.stream.uniform(0.0, longest_s))

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                self.end(process)
        for server in self.servers:
            server.close()

    def end(self, process: subprocess.Popen[str]) -> None:
        for pid in (*descendants_of(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        process.communicate()


def descendants_of(pid: int) -> list[int]:
    """Children, their children, and so on; and who else is in a session that the process leads."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, generation = [], [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        found += generation
    return [*found, *(each for each in session_of(pid) if each not in found and each != pid)]


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
