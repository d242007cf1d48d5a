"""Where the steps of a run go: `python account.py SETTINGS.json`, which runs `retrain` in this process; Linux only.

A thread looks at all others every few milliseconds. A tick belongs to the threads that run then, in equal shares, and
of each to the part that its stack is in: the parts add up to the time that passed. `settings` names the arguments of
`retrain`, the file that gets the seconds of each part, the records, and how many of them come before the first tick.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

PERIOD_S = 0.003
TASKS = Path("/proc/self/task")
BACKWARD = "_engine_run_backward"
# Of the innermost of our frames, by the end of its file; what is not here is Python's own time, and all that is small.
KINDS = {
    "model/projection.py": "products",
    "model/adapter.py": "products",
    "training/head.py": "head and loss",
    "training/loss_formulas.py": "head and loss",
    "training/step_loss.py": "head and loss",
    "model/operations.py": "norms, rotary, swiglu",
    "attention/packed.py": "attention",
    "attention/rows.py": "attention",
    "sampling/gathered_decoding.py": "attention",
    "sampling/cache.py": "attention",
    "sampling/draw.py": "draw",
}
WHOLE = {"retrain/tasks/scoring/": "scoring", "retrain/records/": "records", "retrain/observe/": "records"}
PHASES = {
    "retrain_local/sampling/prefill.py": "prefill",
    "retrain_local/sampling/": "decode",
    "retrain_local/training/trainer.py": "train",
    "retrain_local/backend.py": "publish and heap",
}
IDLE, PYTHON, OTHER = "nothing runs", "Python and the rest", "the other operations"


def main() -> None:
    """Run and write."""
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spent_s, stopped = Counter[str](), threading.Event()
    given = (Path(settings["records"]), settings["warm_up"], spent_s, stopped)
    watcher = threading.Thread(target=watch, args=given, daemon=True)
    watcher.start()
    from retrain.cli import main as retrain

    sys.argv = ["retrain", *settings["arguments"]]
    try:
        retrain()
    finally:
        stopped.set()
        watcher.join()
        Path(settings["file"]).write_text(json.dumps(spent_s), encoding="utf-8")


def watch(records: Path, warm_up: int, spent_s: Counter[str], stopped: threading.Event) -> None:
    """Count the ticks between the last record of the warm-up and the last record."""
    counted, pending, last = 0, Counter[str](), time.perf_counter()
    while not stopped.wait(PERIOD_S):
        now = time.perf_counter()
        seen = records.read_bytes().count(b"\n") if records.exists() else 0
        if seen > counted:
            # A step ends with its record: what comes after the last one is no step.
            spent_s.update(pending if counted >= warm_up else {})
            counted, pending = seen, Counter[str]()
        parts = running_parts()
        for part in parts or [IDLE]:
            pending[part] += (now - last) / max(1, len(parts))
        last = now


def running_parts() -> list[str]:
    """Return the part of every Python thread that has a processor, or waits for one."""
    running = [thread.ident for thread in threading.enumerate() if _state(thread.native_id) == "R"]
    # After the last read of a file, which lets the other threads go on: stacks are walked while they stand still.
    frames = sys._current_frames()
    return [part_of(frames[ident]) for ident in running if ident in frames and ident != threading.get_ident()]


def _state(native_id: int | None) -> str:
    try:
        return (TASKS / str(native_id) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def part_of(frame: FrameType | None) -> str:
    """Return the part of a stack, from its innermost frame outwards."""
    kind, phase, is_backward = "", "", False
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        for place, whole in WHOLE.items():
            if place in file:
                return whole
        if file.endswith("training/trainer.py") and name == "_update":
            return "optimizer"
        is_backward |= name == BACKWARD
        if not kind and "retrain_local/" in file:
            kind = next((part for end, part in KINDS.items() if file.endswith(end)), OTHER if is_backward else PYTHON)
        if name == "logits":
            kind = "head and loss"
        phase = phase or next((found for place, found in PHASES.items() if place in file), "")
        frame = frame.f_back
    if not phase:
        return PYTHON
    phase = f"{phase}, backward" if is_backward else phase
    return f"{phase}: {kind or PYTHON}"


if __name__ == "__main__":
    main()
