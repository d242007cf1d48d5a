"""Faults that befall a run or a campaign: its process ends (blows) or survives them to the same bytes (troubles)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.campaigns import kill_all
from tests.end_to_end.running import retrain
from tests.end_to_end.test_resume import SOURCE_OF_PATCHES
from tests.servers.fleet import answers
from tests.soak.configurations import Configuration
from tests.soak.ground import PATIENCE_S, Ground, command_of, descendants_of
from tests.soak.referee import require

Process = subprocess.Popen[str]


def nothing(ground: Ground) -> None:
    """Nothing to mend."""


def no_patch(ground: Ground) -> str:
    return ""


def of_runs(configuration: Configuration) -> bool:
    return not configuration.is_campaign


def of_campaigns(configuration: Configuration) -> bool:
    return configuration.is_campaign


def anywhere(configuration: Configuration) -> bool:
    return True


def of_shapes(*names: str) -> Callable[[Configuration], bool]:
    """Configurations of these shapes."""
    return lambda configuration: configuration.shape in names


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`strike` is called while the process runs, and returns the one that holds the run then.

    With `codes` it ends the process, with one of them and `says` in what it wrote to stderr; else the run goes on as
    if nothing had been. `patch` alters the program before it starts, and `mend` undoes what would keep the run from
    going on.
    """

    name: str
    strike: Callable[[Ground, Process], Process]
    suits: Callable[[Configuration], bool] = of_runs
    codes: tuple[int, ...] = ()
    says: str = ""
    loses: tuple[str, ...] = ()  # where files lie that the fault itself deletes, and that a run does not hold in memory
    is_at_once: bool = False  # strikes as soon as the process has been started
    patch: Callable[[Ground], str] = no_patch
    mend: Callable[[Ground], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Done to files that nobody has open. `strike` checks what follows, and returns what a refusal said, else nothing.

    It leaves the run so that it can go on.
    """

    name: str
    strike: Callable[[Ground], str]
    suits: Callable[[Configuration], bool] = of_runs


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
    with suppress(OSError), (ground.folder / BALLAST).open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(2**16))
    return process


def empty_disk(ground: Ground) -> None:
    (ground.folder / BALLAST).unlink(missing_ok=True)


def take_permission(ground: Ground, process: Process) -> Process:
    ground.stream.choice(_folders(ground)).chmod(0o555)
    return process


def give_permission(ground: Ground) -> None:
    for folder in _folders(ground):
        folder.chmod(0o755)


def _folders(ground: Ground) -> list[Path]:
    named = (ground.run, ground.run / "adapter", ground.run / "emergence", ground.run / "emergence/tokens")
    return [folder for folder in named if folder.exists()]


def delete_run(ground: Ground, process: Process) -> Process:
    """Moved away in one go and deleted, since the run may write meanwhile."""
    ground.run.rename(ground.folder / "gone")
    shutil.rmtree(ground.folder / "gone")
    return process


def delete_record(ground: Ground, process: Process) -> Process:
    files = [ground.run / name for name in ("metrics.jsonl", "emergence/generations.jsonl", "emergence/steps.jsonl")]
    ground.stream.choice([file for file in files if file.exists()]).unlink()
    return process


def delete_checkpoints(ground: Ground, process: Process) -> Process:
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
    rescued = ground.run.with_name(f"{ground.run.name}.rescued")
    if rescued.exists():
        ground.run = rescued


def kill_rank(ground: Ground, process: Process) -> Process:
    ranks = [pid for pid in descendants_of(process.pid) if "ranks.worker" in command_of(pid)]
    if ranks:
        os.kill(ground.stream.choice(ranks), signal.SIGKILL)
    return process


def breaks_down(name: str) -> Callable[[Ground, Process], Process]:
    def strike(ground: Ground, process: Process) -> Process:
        part = ground.folder / ".trouble"
        part.write_text(name, encoding="utf-8")
        part.rename(ground.folder / "trouble")  # in one go: the run may read it meanwhile
        return process

    return strike


def come_to_terms(ground: Ground) -> None:
    (ground.folder / "trouble").unlink(missing_ok=True)


def replace_servers(ground: Ground, process: Process) -> Process:
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
# Where the program asks for the time of day, it is told another one, up to two days off, and anew again and again.
CLOCK = """
import datetime, random, time
_stream, _offset, _time, _time_ns = random.Random({seed}), [0.0], time.time, time.time_ns

def _off():
    if _stream.random() < 0.2:
        _offset[0] = _stream.uniform(-1.0, 1.0) * 172800
    return _offset[0]

class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=_off())

time.time, time.time_ns = lambda: _time() + _off(), lambda: _time_ns() + int(1e9 * _off())
datetime.datetime = _Day
"""


def jumping_clock(ground: Ground) -> str:
    return CLOCK.format(seed=ground.stream.randrange(10**9))


def stop_and_continue(ground: Ground, process: Process) -> Process:
    """SIGSTOP, and a while later SIGCONT."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
        ground.pause(3.0)
        os.kill(process.pid, signal.SIGCONT)
    return process


def to_a_scorer(number: signal.Signals) -> Callable[[Ground, Process], Process]:
    def strike(ground: Ground, process: Process) -> Process:
        scorers = [pid for pid in descendants_of(process.pid) if "tasks.child" in command_of(pid)]
        if scorers:
            with suppress(ProcessLookupError):
                os.kill(ground.stream.choice(scorers), number)
        return process

    return strike


def start_another(ground: Ground, process: Process) -> Process:
    """The same command at the same time: one of them holds the run, the other one is refused."""
    second = ground.start()
    ground.wait_until(process, lambda: second.poll() is not None)
    loser, winner = (second, process) if second.poll() is not None else (process, second)
    ended = ground.finish(loser)
    is_refused = ended.code == 2 and "in progress" in ended.err  # the other may not have written its number yet
    require(is_refused, f"the other one ended with {ended.code}: {ended.err[-500:]}")
    return winner


def resume_as_well(ground: Ground, process: Process) -> Process:
    """The same command again, while the first one is at work: it is refused, and names the other."""
    ground.wait_for_lock(process)
    if process.poll() is None:
        second = ground.start()
        ended = ground.finish(second)
        is_refused = ended.code == 2 and str(process.pid) in ended.err
        is_too_late = process.poll() is not None or "lready complete" in ended.out
        require(is_refused or is_too_late, f"a second process was let in: {ended.code} {ended.err[-500:]}")
    return process


def kill_a_run(ground: Ground, process: Process) -> Process:
    runs = [pid for pid in descendants_of(process.pid) if "-m retrain run/configs" in command_of(pid)]
    if runs:
        with suppress(ProcessLookupError):
            os.kill(ground.stream.choice(runs), signal.SIGKILL)
    return process


def look_on(ground: Ground, process: Process) -> Process:
    """`retrain status`, which reads what is being written."""
    outcome = retrain("status", ".", cwd=ground.folder)
    require(outcome.code == 0, f"retrain status: {outcome.err[-500:]}")
    return process


def of_own_reward(configuration: Configuration) -> bool:
    return of_runs(configuration) and configuration.shape not in ("game", "agent")


def trouble_a_server(ground: Ground, process: Process) -> Process:
    """One of the two, by what befalls servers in a fleet; for a while."""
    server = ground.stream.choice(ground.servers)
    getattr(server, ground.stream.choice(server.faults))()
    ground.pause(5.0)
    server.mend()
    return process


def kill_all_servers(ground: Ground, process: Process) -> Process:
    for server in ground.servers:
        server.kill()
    time.sleep(2.0)
    for server in ground.servers:
        server.mend()
    return process


TROUBLES = (
    Fault(name="SIGSTOP and SIGCONT", strike=stop_and_continue),
    Fault(name="clock jumps", strike=struck_already, patch=jumping_clock),
    Fault(name="scoring process killed", strike=to_a_scorer(signal.SIGKILL), suits=of_own_reward),
    Fault(name="scoring process stopped", strike=to_a_scorer(signal.SIGSTOP), suits=of_own_reward),
    Fault(name="two at once", strike=start_another, is_at_once=True),
    Fault(name="second resume", strike=resume_as_well, suits=anywhere),
    Fault(name="run of a campaign killed", strike=kill_a_run, suits=of_campaigns),
    Fault(name="somebody looks", strike=look_on, suits=anywhere),
    *(
        Fault(name=f"reward {name} once", strike=breaks_down(f"once {name}"), suits=of_own_reward)
        for name in ("raises", "nan", "exits", "hangs")
    ),
    Fault(name="server in trouble", strike=trouble_a_server, suits=of_shapes("server")),
    Fault(name="all servers killed", strike=kill_all_servers, suits=of_shapes("server")),
)
