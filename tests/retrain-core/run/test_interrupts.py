"""Signals stop a run where it may stop, once; shielded work is finished first, and the collector rests meanwhile."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from retrain.kernel.errors import StopRequested
from retrain.run.collector import paused_collector, resume_collector
from retrain.run.interrupts import SIGNALS, Interrupts

PROGRAM = """
import os, signal, sys, threading, time
from retrain.kernel.errors import StopRequested
from retrain.run.interrupts import Interrupts
stops = Interrupts(grace_s={grace})
{resumable}
with stops.installed(), stops.shield():
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    {then}
    time.sleep(30)
"""


def program(*, grace, resumable, then=""):
    """A process that is stopped inside a shield that does not end."""
    text = PROGRAM.format(grace=grace, resumable="stops.may_resume()" if resumable else "", then=then)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_at_once_outside_of_a_shield(number):
    stops = Interrupts(grace_s=60)
    before = signal.getsignal(number)
    with stops.installed(), pytest.raises(StopRequested) as caught:  # noqa: PT012
        send(number)
        pytest.fail("went on")
    assert caught.value.reason == stops.reason == signal.Signals(number).name
    assert signal.getsignal(number) == before


def test_a_shield_is_finished_first_and_may_stop_where_it_says_so():
    stops, done = Interrupts(grace_s=60), []
    with stops.installed(), pytest.raises(StopRequested):  # noqa: PT012
        with stops.shield():
            with stops.shield():
                send(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        pytest.fail("went on")
    assert done == ["inner", "outer"]
    stops = Interrupts(grace_s=60)
    with stops.installed(), pytest.raises(StopRequested), stops.shield():  # noqa: PT012
        stops.check()
        send(signal.SIGTERM)
        stops.check()
        pytest.fail("went on")
    stops = Interrupts(grace_s=60)
    with stops.installed(), pytest.raises(ZeroDivisionError), stops.shield():  # noqa: PT012
        send(signal.SIGTERM)
        _ = 1 / 0


def test_a_swallowed_stop_comes_again_and_only_the_main_thread_listens():
    stops = Interrupts(grace_s=60)
    with stops.installed():
        with suppress(BaseException):
            send(signal.SIGTERM)
        with pytest.raises(StopRequested), stops.shield():
            pass
        stops.acknowledge()
        with stops.shield():
            stops.check()
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work():
        with Interrupts(grace_s=60).installed():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_run_that_stopped_in_time_does_not_end_a_process_that_continues():
    stops = Interrupts(grace_s=0.05)
    with pytest.raises(StopRequested), stops.installed():
        send(signal.SIGTERM)
    time.sleep(0.2)  # longer than the grace period: this process would be gone
    assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]


@pytest.mark.parametrize(("resumable", "code"), [(True, 75), (False, 1)])
def test_the_grace_period_ends_it(resumable, code):
    done = program(grace=0.3, resumable=resumable)
    assert (done.returncode, done.stdout) == (code, "still here\n")
    assert "not stopped within 0.3 s" in done.stderr


@pytest.mark.parametrize(("resumable", "code"), [(True, 75), (False, 1)])
def test_a_second_signal_ends_it_at_once_even_while_it_writes_to_its_console(resumable, code):
    # inside of a write to stderr another write through the same stream is an error of its own
    then = "sys.stderr.flush = None; sys.stderr.write = None; os.kill(os.getpid(), signal.SIGINT)"
    done = program(grace=60, resumable=resumable, then=then)
    assert done.returncode == code
    assert "second request (SIGINT): leaving at once" in done.stderr


def test_work_exposed_within_a_shield_is_torn_and_what_follows_is_shielded_again():
    stops, done = Interrupts(grace_s=60), []

    def work():
        send(signal.SIGTERM)
        pytest.fail("went on")

    with stops.installed(), pytest.raises(StopRequested):  # noqa: PT012
        with stops.shield():
            with suppress(StopRequested):
                stops.exposed(work)
            done.append("after")
        pytest.fail("went on")
    assert done == ["after"]


def test_exposed_work_is_not_begun_when_a_stop_is_pending_and_its_errors_come_through():
    stops = Interrupts(grace_s=60)
    with stops.installed(), pytest.raises(StopRequested), stops.shield():  # noqa: PT012
        assert stops.exposed(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            stops.exposed(lambda: 1 / 0)
        send(signal.SIGTERM)  # shielded
        with pytest.raises(StopRequested):
            stops.exposed(lambda: pytest.fail("was begun"))


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_rests_until_resumed_and_is_left_as_it_was():
    with paused_collector():
        assert not gc.isenabled()
        kept = [[] for _ in range(100)]
        resume_collector()
        assert gc.isenabled()
        assert gc.get_freeze_count() > len(kept)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="inside"), paused_collector():
        raise ValueError("inside")
    assert gc.isenabled()
    resume_collector()  # nothing was paused
    assert gc.get_freeze_count() == 0
    gc.disable()
    with paused_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()
