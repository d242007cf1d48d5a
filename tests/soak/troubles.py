"""Faults that a run's process survives: it goes on, and to the same bytes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from tests.end_to_end.running import retrain
from tests.soak.blows import breaks_down, struck_already
from tests.soak.configurations import Configuration
from tests.soak.fault import Fault, Process, anywhere, of_campaigns, of_runs, of_shapes
from tests.soak.ground import Ground, command_of, descendants_of
from tests.soak.referee import require

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
    """With jumps of its own."""
    return CLOCK.format(seed=ground.stream.randrange(10**9))


def stop_and_continue(ground: Ground, process: Process) -> Process:
    """SIGSTOP, and a while later SIGCONT."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGSTOP)
        ground.pause(3.0)
        os.kill(process.pid, signal.SIGCONT)
    return process


def to_a_scorer(number: signal.Signals) -> Callable[[Ground, Process], Process]:
    """A signal to one of the processes that score."""

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
    """One of a campaign's, which then is tried again."""
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
    """Its reward is ours."""
    return of_runs(configuration) and configuration.shape not in ("game", "agent")


def trouble_a_server(ground: Ground, process: Process) -> Process:
    """One of the two, by what befalls servers in a fleet; for a while."""
    server = ground.stream.choice(ground.servers)
    getattr(server, ground.stream.choice(server.faults))()
    ground.pause(5.0)
    server.mend()
    return process


def kill_all_servers(ground: Ground, process: Process) -> Process:
    """Nobody samples for a while."""
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
