"""Measures a few real steps of a configuration in a process of its own.

That process is `python -m retrain.tools.capacity.pilot [CONFIG] [overrides]`; its run.json holds the measurements.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from retrain.kernel.errors import BackendError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner
from retrain.records.run import Run
from retrain.run.configure import load_checked
from retrain.tools import capacity
from retrain.tools.capacity.forecast import Past, eval_completion_s

TAIL_LINES = 12
# A pilot leaves nothing behind: no records, no checkpoint, nothing sent. Every step has the same size.
QUIET = (
    *("--eval-examples", "0", "--save-every", "0", "--set", "backend.adapter_path=", "--set", "logging.recorders=[]"),
    *("--wandb-project", "", "--set", "resume.from="),
)


def run_pilot(arguments: Sequence[str], steps: int) -> Past:
    """Measure `steps` steps of `[CONFIG] [overrides]`; BackendError with the end of the output if the pilot fails."""
    with tempfile.TemporaryDirectory(prefix="retrain-pilot-") as temporary:
        log_dir = Path(temporary) / "run"
        own = ["--max-steps", str(steps), "--log-dir", str(log_dir), *QUIET]
        command = [sys.executable, "-m", "retrain.tools.capacity.pilot", *arguments, *own]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = "\n    ".join((done.stdout + done.stderr).strip().splitlines()[-TAIL_LINES:])
            what = f"the pilot of {steps} steps failed with exit code {done.returncode}"
            raise BackendError(Problem(where="capacity --pilot", what=what, why=tail, fix="fix that, then try again"))
        manifest = Run(Path(log_dir)).started_manifest()
    measured = manifest["capacity"]["measured"]
    return Past(
        runs=1,
        median_step_time_s=measured.get("median_step_time_s"),
        peak_memory_bytes=measured.get("peak_memory_bytes"),
        memory_at_start_bytes=measured.get("memory_at_start_bytes"),
        prompt_tokens=measured.get("longest_prompt_tokens"),
        eval_completion_s=eval_completion_s(measured, manifest["config"]),
    )


def main(arguments: list[str]) -> int:
    """Train with the arguments; returns 0, or the exit code of the error."""
    plugins = load_plugins()
    if not plugins.pluggy.is_registered(capacity):
        plugins.add(capacity, Owner(distribution="retrain-core", source="retrain.tools.capacity"))
    try:
        checked = load_checked(arguments, plugins)
        from retrain.run.session import train

        train(checked, plugins)
    except RetrainError as error:
        print(f"{error.label}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
