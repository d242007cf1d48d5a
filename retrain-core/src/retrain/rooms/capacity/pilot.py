"""A few real steps of a configuration, in a process of their own, to measure instead of estimate."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from retrain.kernel.errors import BackendError, Problem
from retrain.rooms.capacity.history import Past

TAIL_LINES = 12
# A pilot leaves nothing behind: no records, no checkpoint, nothing sent anywhere; and every step is of the same size.
QUIET = (
    *("--eval-examples", "0", "--save-every", "0", "--set", "backend.adapter_path=", "--set", "logging.recorders=[]"),
    *("--wandb-project", "", "--set", "resume.from="),
)


def run_pilot(arguments: Sequence[str], steps: int) -> Past:
    """What `steps` steps of `[CONFIG] [overrides]` took; BackendError with the end of its output when it fails."""
    with tempfile.TemporaryDirectory(prefix="retrain-pilot-") as temporary:
        result, log_dir = Path(temporary) / "measured.json", Path(temporary) / "run"
        own = ["--max-steps", str(steps), "--log-dir", str(log_dir), *QUIET]
        command = [sys.executable, "-m", "retrain.rooms.capacity.pilot_process", str(result), *arguments, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not result.is_file():
            tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-TAIL_LINES:])
            what = f"the pilot of {steps} steps failed with exit code {done.returncode}"
            raise BackendError(Problem(where="capacity --pilot", what=what, why=tail, fix="mend that, then ask again"))
        measured = json.loads(result.read_text(encoding="utf-8"))
    return Past(
        runs=1,
        median_step_time_s=measured.get("median_step_time_s"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        memory_at_start_bytes=measured.get("memory_at_start_bytes"),
        prompt_tokens=measured.get("longest_prompt_tokens"),
    )
