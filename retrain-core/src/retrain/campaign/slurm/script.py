"""What a Slurm node executes: one script for a job array, and a file in the folder of each run.

The file holds the run's command line and the variables that differ from the campaign's environment, secrets among
them: only its owner can read it, and it is removed when the run begins. Slurm itself stores the script alone.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.campaign.launching import Job
from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError
from retrain.records.files import write_json

START, RECORD = "slurm.sh", "slurm.json"
NOT_SEEN = 66  # exit code of a task whose node does not see the folders
SCRIPT = """\
#!/bin/sh
# Runs of a retrain campaign, one for each task of the array.
case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
cd {cwd} && [ -f "$folder/{start}" ] || exit {not_seen}
exec </dev/null >>"$folder/stdout.log" 2>>"$folder/stderr.log"
{setup}
. "$folder/{start}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """Which task of which array a run is; `job_id` is empty until Slurm has told it."""

    name: str
    task: int
    job_id: str = ""

    def write(self, folder: Path) -> None:
        """Keep it in the run's folder, for a later session of the campaign."""
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> TaskRecord | None:
        """The record in a run's folder; None if there is none, or none that can be read."""
        with suppress(OSError, ValueError, TypeError, KeyError, ConfigError), open_regular(folder / RECORD) as stream:
            content = json.loads(stream.read())
            return cls(name=str(content["name"]), task=int(content["task"]), job_id=str(content["job_id"]))
        return None


def array_script(folders: Sequence[Path], cwd: Path, setup: Sequence[str]) -> str:
    """The script of an array whose task `n` is the run in `folders[n]`; `setup` are shell lines of the user."""
    cases = "\n".join(f"{task}) folder={shlex.quote(str(folder))} ;;" for task, folder in enumerate(folders))
    return SCRIPT.format(cases=cases, cwd=shlex.quote(str(cwd)), start=START, not_seen=NOT_SEEN, setup="\n".join(setup))


def write_start(job: Job, num_cpus: int) -> None:
    """Write the file that starts one run, for its owner's eyes."""
    variables = {"OMP_NUM_THREADS": str(num_cpus), **job.environ}
    lines = [
        'rm -f -- "$folder/slurm.sh"',
        *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
        f"exec {shlex.join(job.argv)}",  # the run becomes the job's own process, which gets Slurm's signals
    ]
    file = job.folder / START
    file.unlink(missing_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write("\n".join([*lines, ""]))
