"""A proof in parts: each a process with a time limit, every figure kept as soon as it is known, resumed where it ended.

The document is the only state, of which a copy may be kept: `parts` maps a part's name to its status ("done", "failed"
or "cut off"), seconds, the figures found so far, and the end of its output. It is rewritten after every figure, so that
a proof that is killed at any instant loses only the figure in the making.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIGURE = "figure "
DONE, FAILED, CUT_OFF = "done", "failed", "cut off"
TAIL_CHARS = 4000
SHOWN_CHARS = 200  # of a figure on the screen
LEAST_S = 20.0  # less time than this is not worth a start


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process that prints its figures: `command` is given a file with `settings`, `had` and `folder` added.

    `had` names the figures of an earlier attempt, without those that say `"ok": false`.
    """

    name: str
    command: Sequence[str]
    settings: Mapping[str, Any]
    limit_s: float


@dataclass(slots=True, kw_only=True)
class Proof:
    """The document of a proof, on disk in `file` and, if it is named, in `copy`, whose folder may vanish any time."""

    file: Path
    copy: Path | None = None
    machine: Mapping[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, file: Path, machine: Mapping[str, Any] | None = None, copy: Path | None = None) -> Proof:
        """Continue the proof in `file`, else in `copy`, if there is one; without a machine, the file's stays."""
        sources = [each for each in (file, copy) if each is not None and each.exists()]
        document = json.loads(sources[0].read_text(encoding="utf-8")) if sources else {}
        parts = document.pop("parts", {})
        return cls(file=file, copy=copy, machine=document if machine is None else machine, parts=parts)

    def write(self) -> None:
        """Replace the file; nothing is visible half-written."""
        document = {"benchmark": "gpu", **self.machine, "parts": self.parts}
        text = json.dumps(document, indent=1, default=str) + "\n"
        for file in filter(None, (self.file, self.copy)):
            file.parent.mkdir(parents=True, exist_ok=True)
            fresh = file.with_name(file.name + ".new")
            fresh.write_text(text, encoding="utf-8")
            os.replace(fresh, file)

    def order(self, parts: Sequence[Part]) -> list[Part]:
        """Those that are not done, in their order; what failed before comes last, since it may fail again."""
        waiting = [part for part in parts if self.status(part) != DONE]
        return sorted(waiting, key=lambda part: self.status(part) == FAILED)

    def status(self, part: Part) -> str:
        """Of a part; empty if it never ran."""
        return str(self.parts.get(part.name, {}).get("status", ""))

    def run(self, parts: Sequence[Part], folder: Path, seconds: float, clock: Callable[[], float]) -> list[str]:
        """Run what is not done until `seconds` have passed; returns the names of the parts that are still not done."""
        folder.mkdir(parents=True, exist_ok=True)
        end_s = clock() + seconds
        for part in self.order(parts):
            left_s = end_s - clock()
            if left_s < LEAST_S:
                break
            self._run_one(part, folder, min(part.limit_s, left_s))
        return [part.name for part in parts if self.status(part) != DONE]

    def _run_one(self, part: Part, folder: Path, limit_s: float) -> None:
        # "cut off" until it ends: a proof that is killed now finds it so
        kept = self.parts.setdefault(part.name, {"figures": {}, "seconds": 0.0})
        kept |= {"status": CUT_OFF, "output": ""}
        self.write()
        settings = folder / "settings.json"
        had = [name for name, figure in kept["figures"].items() if figure.get("ok", True)]
        text = json.dumps({**part.settings, "had": had, "folder": str(folder)})
        settings.write_text(text, encoding="utf-8")
        started, before_s = time.monotonic(), kept["seconds"]
        print(f"{part.name}: at most {limit_s:.0f} s", flush=True)
        process = subprocess.Popen(
            [*part.command, str(settings)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # so that what the part started ends with it, and gives its memory back
        )
        is_late = threading.Event()

        def stop() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(FIGURE):
                    kept["figures"] |= json.loads(line.removeprefix(FIGURE))
                else:
                    kept["output"] = (kept["output"] + line)[-TAIL_CHARS:]
                kept["seconds"] = before_s + time.monotonic() - started
                if line.startswith(FIGURE):
                    self.write()
                    print(f"  {line.rstrip()[:SHOWN_CHARS]}", flush=True)
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
        kept["seconds"] = before_s + time.monotonic() - started
        kept["status"] = DONE if code == 0 else CUT_OFF if is_late.is_set() else FAILED
        self.write()
        print(f"{part.name}: {kept['status']} after {kept['seconds']:.0f} s", flush=True)
        if kept["status"] == FAILED:
            print(kept["output"], file=sys.stderr)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
