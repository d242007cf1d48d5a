"""State of one run, from `run.json`, the last line of `metrics.jsonl`, its process and its heartbeat."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import LOCK_FILE, owner_of
from retrain.records.reading import Record, number, read_if_any, text, time_of
from retrain.records.record_names import HEARTBEAT, METRICS, RUN_FILE
from retrain.records.run import RATE, Run, accepted_changes, eval_sets, task_rates

DONE = "done"
# Steps of large models take minutes; twice that long without a line is more often a hang.
STALE_AFTER_S = 300.0
LIVE = ("running", "stale")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run; numbers that it has not written yet are None.

    `state` is `status` of `run.json` (`running`, `done`, `failed`, `interrupted`, ...), but a running one is `dead`
    when its process is gone and `stale` when its metrics have not moved for five minutes, and one with unreadable files
    is `unreadable`. `step` counts finished steps. Rates and `health` are from the last line; `held_out_rate` is
    from the last evaluation, after `held_out_step` steps. `accepted` are the changes accepted by `--resume-anyway`.
    `phase` and the fields after it are from the heartbeat of a live run.
    """

    path: Path
    state: str
    condition: str = ""
    step: int = 0
    max_steps: int | None = None
    correct_rate: float | None = None
    shadow_correct_rate: float | None = None
    health: tuple[str, ...] = ()
    gaming_example: str = ""
    eval_rates: Mapping[str, float] = field(default_factory=dict)
    task_rates: Mapping[str, float] = field(default_factory=dict)
    tasks_out: str = ""
    held_out_rate: float | None = None
    held_out_step: int | None = None
    loss: float | None = None
    mean_reward: float | None = None
    wall_time_s: float | None = None
    pid: int | None = None
    is_alive: bool = False
    trainer: str = "retrain"
    last_activity_s: float = 0.0
    error: str = ""
    accepted: tuple[str, ...] = ()
    phase: str = ""
    phase_step: float | None = None
    phase_elapsed_s: float | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """True if its process is alive, even if it hangs."""
        return self.state in LIVE

    @property
    def left_s(self) -> float | None:
        """The remaining seconds at the pace so far; None before the first step."""
        if not (self.step and self.max_steps and self.wall_time_s):
            return None
        return max(0, self.max_steps - self.step) * self.wall_time_s / self.step

    def as_data(self) -> dict[str, Any]:
        data = asdict(self) | {"path": str(self.path), "health": list(self.health), "accepted": list(self.accepted)}
        data |= {"status": data.pop("state"), "alive": data.pop("is_alive")}
        data |= {"completed": self.state == DONE, "stale": self.state == "stale"}
        return data | {"last_activity": iso_time(data.pop("last_activity_s"))}


def status_of_run(folder: Path) -> RunStatus:
    """Return the status of the run in `folder`; a damaged one is `unreadable`."""
    run, activity_s = Run(folder), last_change_s(folder / RUN_FILE, folder / METRICS)
    try:
        manifest, metrics = run.manifest, run.last_step()
    except ConfigError as error:
        problem = error.problems[0]
        reason = f"{problem.where.removeprefix(f'{folder}/')}: {problem.what}"
        return RunStatus(path=folder, state="unreadable", last_activity_s=activity_s, error=reason)
    pid = process_id(manifest.get("pid"))
    state = text(manifest.get("status")) or "unknown"
    is_held = pid is not None and process_is_alive(pid)
    if (folder / LOCK_FILE).is_file():
        # certain, whereas a process id may be reused
        is_held = owner_of(folder) != 0
    is_alive = state == "running" and is_held
    if state == "running":
        state = "dead" if not is_alive else "stale" if time.time() - activity_s > STALE_AFTER_S else "running"
    training = run.table("training")
    beat = read_if_any(folder / HEARTBEAT) if state in LIVE else {}
    # A heartbeat may be an earlier process's; a run without one is as live as any other.
    beat = beat if beat.get("pid") == pid else {}
    step, max_steps = number(metrics.get("step")), number(training.get("max_steps"))
    rates = {name: number(metrics.get(field)) for name, field in {"held_out": RATE, **eval_sets(metrics)}.items()}
    return RunStatus(
        path=folder,
        state=state,
        condition=text(manifest.get("condition")),
        step=0 if step is None else max(0, int(step) + 1),
        max_steps=None if max_steps is None else int(max_steps),
        correct_rate=number(metrics.get("correct_rate")),
        shadow_correct_rate=number(metrics.get("shadow_correct_rate")),
        health=tuple(filter(text, states)) if isinstance(states := metrics.get("health"), list) else (),
        gaming_example=text(metrics.get("gaming_example")),
        eval_rates={name: rate for name, rate in rates.items() if rate is not None},
        task_rates=task_rates(metrics),
        tasks_out=text(metrics.get("tasks_out")),
        **_held_out(run, metrics),
        loss=number(metrics.get("loss")),
        mean_reward=number(metrics.get("mean_reward")),
        wall_time_s=_wall_time_s(manifest, is_alive=is_alive, activity_s=activity_s),
        pid=pid,
        is_alive=is_alive,
        trainer=text(training.get("trainer")) or "retrain",
        last_activity_s=activity_s,
        error=text(manifest.get("error")),
        accepted=tuple(accepted_changes(manifest)),
        phase=text(beat.get("phase")),
        phase_step=number(beat.get("step")),
        phase_elapsed_s=number(beat.get("phase_elapsed_s")),
        progress=progress if isinstance(progress := beat.get("progress"), dict) else {},
    )


def _held_out(run: Run, metrics: Record) -> dict[str, Any]:
    """Return rate and step of the last evaluation; earlier lines are read only for a run that evaluates."""
    found = metrics
    if RATE not in metrics and number(run.table("eval").get("examples")) != 0:
        with suppress(ConfigError):  # replaced since its last line was read
            found = run.last_step(field=RATE, skip_damaged=True)
    rate, step = number(found.get(RATE)), number(found.get("step"))
    if rate is None:
        return {}
    return {"held_out_rate": rate, "held_out_step": None if step is None else max(0, int(step) + 1)}


def process_id(value: object) -> int | None:
    """Return a valid process id: zero and negative ones mean process groups."""
    return value if type(value) is int and value > 0 else None


def process_is_alive(pid: int) -> bool:
    """True if a process with this id exists on this machine and has not ended yet."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it belongs to another user
        return True
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # no /proc on this system
        return True
    # The name of a program, in parentheses, may hold spaces and parentheses itself. Z is a zombie: it has ended.
    return status.rpartition(b")")[2].split()[:1] != [b"Z"]


def last_change_s(*files: Path) -> float:
    """Return the time of the latest change of the files, in seconds since the epoch; 0 when none exists."""
    times_s = [0.0]
    for file in files:
        with suppress(OSError):
            times_s.append(file.stat().st_mtime)
    return max(times_s)


def iso_time(seconds: float) -> str | None:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else None


def _wall_time_s(manifest: Record, *, is_alive: bool, activity_s: float) -> float | None:
    """Return seconds from start to end; a live run ends now, a dead one with its last record."""
    started, ended = time_of(manifest.get("started")), time_of(manifest.get("ended"))
    if started is None:
        return None
    ended_s = ended.timestamp() if ended else time.time() if is_alive else activity_s
    return max(0.0, ended_s - started.timestamp())
