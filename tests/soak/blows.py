"""Faults that end a run's process: at once, with a checkpoint, or with an error after which the run can go on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.end_to_end.campaigns import kill_all
from tests.end_to_end.test_resume import SOURCE_OF_PATCHES
from tests.servers.fleet import answers
from tests.soak.configurations import Configuration
from tests.soak.fault import Fault, Process, anywhere, of_campaigns, of_runs, of_shapes
from tests.soak.ground import PATIENCE_S, Ground, command_of, descendants_of

STOPPED, KILLED, FAILED = 75, -9, 1
# Root would not notice that a folder may not be written to; so its right to ignore that goes.
OBEYS_PERMISSIONS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE, effective
assert libc.capset(header, sets) == 0
"""
SMALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
"""
BALLAST = "ballast"


def kill(ground: Ground, process: Process) -> Process:
    """SIGKILL; to a campaign and all its runs."""
    if ground.configuration.is_campaign:
        kill_all(process)
    else:
        process.kill()
    return process


def kill_leader(ground: Ground, process: Process) -> Process:
    """SIGKILL to a campaign alone, whose runs stop by themselves."""
    members = descendants_of(process.pid)
    process.kill()
    last = time.monotonic() + 120
    while any(map(command_of, members)) and time.monotonic() < last:
        time.sleep(0.05)
    return process


def signalled(*names: str) -> Callable[[Ground, Process], Process]:
    """One after the other, a moment apart."""

    def strike(ground: Ground, process: Process) -> Process:
        for name in names:
            with suppress(ProcessLookupError):
                process.send_signal(getattr(signal, name))
            ground.pause(0.3)
        return process

    return strike


def at_a_place(ground: Ground) -> str:
    """Killed by itself in the worst of places."""
    return SOURCE_OF_PATCHES[ground.stream.choice(sorted(SOURCE_OF_PATCHES))]


def struck_already(ground: Ground, process: Process) -> Process:
    """The patch does it."""
    return process


def small_files(ground: Ground) -> str:
    """No file grows beyond a limit, a little above what the records have now."""
    sizes = [file.stat().st_size for file in ground.run.rglob("*.jsonl")]
    return SMALL_FILES.format(limit=max([8_000, *sizes]) + ground.stream.randrange(20_000))


def fill_disk(ground: Ground, process: Process) -> Process:
    """Until nothing more fits."""
    with suppress(OSError), (ground.folder / BALLAST).open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(2**16))
    return process


def empty_disk(ground: Ground) -> None:
    """Room again."""
    (ground.folder / BALLAST).unlink(missing_ok=True)


def take_permission(ground: Ground, process: Process) -> Process:
    """A folder of the run becomes read-only."""
    ground.stream.choice(_folders(ground)).chmod(0o555)
    return process


def give_permission(ground: Ground) -> None:
    """And writable again."""
    for folder in _folders(ground):
        folder.chmod(0o755)


def _folders(ground: Ground) -> list[Path]:
    """What a run writes to, as far as it is there."""
    named = (ground.run, ground.run / "adapter", ground.run / "emergence", ground.run / "emergence/tokens")
    return [folder for folder in named if folder.exists()]


def delete_run(ground: Ground, process: Process) -> Process:
    """Moved away in one go and deleted, since the run may write meanwhile."""
    ground.run.rename(ground.folder / "gone")
    shutil.rmtree(ground.folder / "gone")
    return process


def delete_record(ground: Ground, process: Process) -> Process:
    """One of the record files."""
    files = [ground.run / name for name in ("metrics.jsonl", "emergence/generations.jsonl", "emergence/steps.jsonl")]
    ground.stream.choice([file for file in files if file.exists()]).unlink()
    return process


def delete_checkpoints(ground: Ground, process: Process) -> Process:
    """All of them, with their folder."""
    with suppress(FileNotFoundError):  # there is none before the first
        (ground.run / "adapter").rename(ground.folder / "gone")
    shutil.rmtree(ground.folder / "gone", ignore_errors=True)
    return process


def move_rescued_back(ground: Ground) -> None:
    """As the message says; what the deleted folder has left is in the way."""
    rescued = ground.run / "adapter.rescued"
    if rescued.exists():
        shutil.rmtree(ground.run / "adapter", ignore_errors=True)
        rescued.rename(ground.run / "adapter")


def go_to_rescued(ground: Ground) -> None:
    """Where the message says that the run goes on."""
    rescued = ground.run.with_name(f"{ground.run.name}.rescued")
    if rescued.exists():
        ground.run = rescued


def kill_rank(ground: Ground, process: Process) -> Process:
    """One of the other ranks."""
    ranks = [pid for pid in descendants_of(process.pid) if "ranks.worker" in command_of(pid)]
    if ranks:
        os.kill(ground.stream.choice(ranks), signal.SIGKILL)
    return process


def breaks_down(name: str) -> Callable[[Ground, Process], Process]:
    """The reward, the game or the agent, from now on."""

    def strike(ground: Ground, process: Process) -> Process:
        _tell(ground, name)
        return process

    return strike


def come_to_terms(ground: Ground) -> None:
    """It works again."""
    (ground.folder / "trouble").unlink(missing_ok=True)


def _tell(ground: Ground, name: str) -> None:
    part = ground.folder / ".trouble"
    part.write_text(name, encoding="utf-8")
    part.rename(ground.folder / "trouble")


def replace_servers(ground: Ground, process: Process) -> Process:
    """Both come back with other weights under the model's name."""
    for server in ground.servers:
        server.other_model()
    return process


def mend_servers(ground: Ground) -> None:
    """The model again; a run that begins before they answer ends after retry_s."""
    for server in ground.servers:
        server.mend()
    last = time.monotonic() + PATIENCE_S
    while not all(map(answers, ground.servers)) and time.monotonic() < last:
        time.sleep(0.1)


def trains_only(configuration: Configuration) -> bool:
    """A single run without evaluations, where a score that failed would count as wrong."""
    return of_runs(configuration) and not configuration.evaluates


def can_mount(folder: Path) -> bool:
    """Whether a small disk may be mounted here."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], capture_output=True)
    return mounted.returncode == 0 and subprocess.run(["umount", folder], check=True).returncode == 0


def on_small_disk(configuration: Configuration) -> bool:
    """A run whose checkpoints are small: its folder becomes a disk in memory."""
    return of_runs(configuration) and configuration.shape != "full"


BLOWS = (
    Fault(name="SIGKILL", strike=kill, suits=anywhere, codes=(KILLED,)),
    Fault(name="SIGKILL at a bad place", strike=struck_already, codes=(KILLED,), patch=at_a_place),
    Fault(name="SIGKILL to the campaign alone", strike=kill_leader, suits=of_campaigns, codes=(KILLED,)),
    *(
        Fault(name=name, strike=signalled(name), suits=anywhere, codes=(STOPPED,), says="resume")
        for name in ("SIGTERM", "SIGINT")
    ),
    Fault(name="SIGUSR1", strike=signalled("SIGUSR1"), codes=(STOPPED,), says="resume"),
    Fault(name="two signals", strike=signalled("SIGTERM", "SIGINT"), codes=(STOPPED, FAILED), says="SIG"),
    Fault(name="file size limit", strike=struck_already, codes=(FAILED,), says="File too large", patch=small_files),
    Fault(name="disk full", strike=fill_disk, suits=on_small_disk, codes=(FAILED,), mend=empty_disk),
    Fault(
        name="folder read-only",
        strike=take_permission,
        codes=(FAILED,),
        says="Permission denied",
        patch=lambda _: OBEYS_PERMISSIONS,
        mend=give_permission,
    ),
    *(
        Fault(
            name=f"{name} deleted",
            strike=delete,
            codes=(FAILED,),
            says="rescued",
            mend=go_to_rescued,
            loses=("emergence/tokens/", "adapter/checkpoint_step_"),  # or they stay in the other folder
        )
        for name, delete in (("run folder", delete_run), ("record file", delete_record))
    ),
    Fault(
        name="checkpoints deleted",
        strike=delete_checkpoints,
        codes=(FAILED,),
        says="adapter.rescued",
        mend=move_rescued_back,
        loses=("adapter/checkpoint_step_",),
    ),
    Fault(name="rank killed", strike=kill_rank, suits=of_shapes("ranks"), codes=(FAILED,), says="signal 9"),
    Fault(name="SIGHUP", strike=signalled("SIGHUP"), suits=of_campaigns, codes=(STOPPED,), says="resume"),
    Fault(
        name="all servers wrong",
        strike=replace_servers,
        suits=of_shapes("server"),
        codes=(FAILED,),
        says="http://",
        mend=mend_servers,
    ),
    Fault(
        name="environment or agent exits",
        strike=breaks_down("exits"),
        suits=lambda each: each.shape in ("game", "agent") and not each.evaluates,
        codes=(FAILED,),
        says="max_failed_frac",
        mend=come_to_terms,
    ),
    *(
        Fault(
            name=f"reward {name}",
            strike=breaks_down(name),
            suits=lambda each: trains_only(each) and each.shape not in ("game", "agent"),
            codes=(FAILED,),
            says="max_failed_frac",
            mend=come_to_terms,
        )
        for name in ("raises", "nan", "exits", "hangs")
    ),
)
