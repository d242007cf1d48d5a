"""`sbatch`, `squeue`, `scancel` and `sinfo` that execute jobs on this machine, with the states and answers of Slurm.

`install(folder)` writes the four programs; with `folder` first on PATH they keep their jobs in `folder/jobs`, a file
for each task. The session `server-slurm` runs the same tests with Slurm itself. The file `away` is a controller that
does not answer, `full` a cluster without room; `fail_node()` loses the node with all that runs on it.
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "squeue", "scancel", "sinfo")
HERE = Path(os.environ.get("SLURM_CONF", ".")).parent
AWAY = "Unable to contact slurm controller (connect failure)"
MINUTE_S = 1.0  # of a time limit
KILL_WAIT_S = 2.0
GRES = "gpu:4"


def install(folder: Path) -> Path:
    """Write the programs into `folder`, which is to be first on PATH; what SLURM_CONF is to be."""
    (folder / "jobs").mkdir(parents=True)
    for name in PROGRAMS:
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {name} "$@"\n')
        file.chmod(0o755)
    return folder / "slurm.conf"


def main() -> int:
    """Answer as the program that the first argument names."""
    program, *arguments = sys.argv[1:]
    if program == "watch":
        watch(Path(arguments[0]))
        return 0
    with (HERE / "calls").open("a") as stream:
        stream.write(f"{json.dumps([program, *arguments])}\n")
    if (HERE / "away").exists():
        print(f"{program}: error: {AWAY}", file=sys.stderr)
        return 1
    return {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "sinfo": sinfo}[program](arguments)


def sbatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    parser.add_argument("--parsable", action="store_true")
    parser.add_argument("--no-requeue", action="store_true")
    for name in ("partition", "account", "qos", "time", "mem", "gres", "nodes", "ntasks", "cpus-per-task", "chdir"):
        parser.add_argument(f"--{name}", default="")
    for name in ("signal", "output", "job-name", "array"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args(arguments)
    if options.partition not in ("", "main"):
        print("sbatch: error: invalid partition specified: " + options.partition, file=sys.stderr)
        print("sbatch: error: Batch job submission failed: Invalid partition name specified", file=sys.stderr)
        return 1
    script = sys.stdin.read()
    first, _, last = options.array.partition("-")
    with changing():
        number = 1 + max((int(file.name.partition("_")[0]) for file in HERE.glob("jobs/*_*")), default=0)
        for task in range(int(first), int(last or first) + 1):
            file = HERE / "jobs" / f"{number}_{task}"
            write(
                file,
                {
                    "id": number,
                    "task": task,
                    "name": options.job_name,
                    "state": "PENDING",
                    "code": 0,
                    "script": script,
                    "cwd": options.chdir,
                    "limit": options.time,
                    "signal": options.signal,
                },
            )
            watcher = [sys.executable, "-S", "-E", __file__, "watch", str(file)]
            null = subprocess.DEVNULL
            subprocess.Popen(watcher, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(number)
    return 0


def watch(file: Path) -> None:
    """Run one task to its end, as slurmd does."""
    while (HERE / "full").exists() and read(file)["state"] == "PENDING":
        time.sleep(0.02)
    with changing():
        task = read(file)
        if task["state"] != "PENDING":
            return
        environ = {**os.environ, "SLURM_JOB_ID": str(task["id"]), "SLURM_ARRAY_TASK_ID": str(task["task"])}
        process = subprocess.Popen(["/bin/sh", "-c", task["script"]], cwd=task["cwd"], env=environ, process_group=0)
        write(file, task | {"state": "RUNNING", "pid": process.pid})
    limit_s = float(task["limit"].partition(":")[0] or "inf") * MINUTE_S
    warned, began = False, time.monotonic()
    while process.poll() is None:
        time.sleep(0.02)
        if time.monotonic() - began > limit_s / 2 and not warned and task["signal"].startswith("B:TERM"):
            warned = True
            process.terminate()
        if time.monotonic() - began > limit_s:
            change(file, state="TIMEOUT")
            end(process.pid, KILL_WAIT_S)
            break
    code = process.wait()
    with changing():
        task = read(file)
        if task["state"] == "RUNNING":
            write(
                file, task | {"state": "COMPLETED" if code == 0 else "FAILED", "code": -code if code < 0 else code << 8}
            )


def squeue(arguments: list[str]) -> int:
    columns = next(each for each in arguments if each.startswith("--Format=")).partition("=")[2].split(",")
    assert set(arguments) == {"--me", "--array", "--states=all", "--noheader", f"--Format={','.join(columns)}"}
    tasks = [read(file) for file in HERE.glob("jobs/*_*")]
    open_arrays = {task["id"] for task in tasks if task["state"] == "PENDING"}
    for task in tasks:
        is_unstarted = task["state"] == "CANCELLED" and "pid" not in task
        if is_unstarted and task["id"] in open_arrays:  # a task cancelled out of a waiting array leaves no line
            continue  # and when none waits any more, they share that of the array
        reason = "Resources" if task["state"] == "PENDING" else "None"
        known = {
            "ArrayJobID": task["id"],
            "ArrayTaskID": "N/A" if is_unstarted else task["task"],
            "Reason": reason,
            "State": task["state"],
            "exit_code": task["code"],
            "Name": task["name"],
            "NodeList": "here",
        }
        cells = [column.partition(":") for column in columns]
        print("".join(str(known[name])[: int(width)].ljust(int(width)) for name, _, width in cells))
    return 0


def scancel(arguments: list[str]) -> int:
    ids = [each for each in arguments if not each.startswith("-")]
    number = next((each.partition("=")[2] for each in arguments if each.startswith("--signal=")), "")
    code = 0
    for each in ids:
        file = HERE / "jobs" / each
        with changing():
            task = read(file) if file.exists() else {"state": ""}
            if task["state"] == "PENDING" and not number:
                write(file, task | {"state": "CANCELLED"})
            elif task["state"] != "RUNNING":
                print(f"scancel: error: Kill job error on job id {each}: Invalid job id specified", file=sys.stderr)
                code = 1
            elif number == "TERM":
                assert "--batch" in arguments
                os.kill(task["pid"], signal.SIGTERM)
            else:
                write(file, task | {"state": "CANCELLED"})
                end(task["pid"], 0.0 if number == "KILL" else KILL_WAIT_S)
    return code


def sinfo(arguments: list[str]) -> int:
    partition = next((each.partition("=")[2] for each in arguments if each.startswith("--partition=")), "main")
    print(GRES if partition == "main" else "", end="\n" * (partition == "main"))
    return 0


def fail_node(folder: Path) -> None:
    """Lose the node."""
    for file in (folder / "jobs").iterdir():
        task = read(file)
        if task["state"] == "RUNNING":
            write(file, task | {"state": "NODE_FAIL"})
            end(task["pid"], 0.0)


def end(pid: int, wait_s: float) -> None:
    """SIGTERM to everything in the job, and SIGKILL to what is left after the wait."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGTERM if wait_s else signal.SIGKILL)
        stop = time.monotonic() + wait_s
        while time.monotonic() < stop:
            time.sleep(0.02)
            os.killpg(pid, 0)
        os.killpg(pid, signal.SIGKILL)


@contextmanager
def changing() -> Iterator[None]:
    """One change of a job at a time."""
    with (HERE / "lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def change(file: Path, **fields: Any) -> None:
    with changing():
        write(file, read(file) | fields)


def read(file: Path) -> dict[str, Any]:
    task: dict[str, Any] = json.loads(file.read_text())
    return task


def write(file: Path, task: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(task))
    temporary.rename(file)


if __name__ == "__main__":
    sys.exit(main())
