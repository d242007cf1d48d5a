"""A child answers, or ends in one known way, and nothing of it outlives us; values arrive as they were sent."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.tasks import Action, EpisodeResult, LoadedData, Observation
from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.types import Example, Outcome, Score, StopReason
from retrain.tasks.child import wire
from retrain.tasks.child.process import Child, ChildDied, ChildError, ChildFailure, ChildTimeout
from retrain.tasks.child.system import descendants
from tests.kit import child_targets as targets
from tests.kit.interrupts import Stop, interrupted_after
from tests.kit.problems import codes_in


@pytest.fixture(scope="module")
def shared_child():
    """A child with a hostile target; starting one for every test would take most of the time."""
    child = Child(targets.Hostile(), memory_gb=4, name="scoring")
    yield child
    child.close()


@pytest.fixture
def child(shared_child):
    """The same child, running."""
    if not shared_child.is_running:
        shared_child.start()
    return shared_child


@pytest.fixture
def gone():
    """`gone(pid, ...)`: whether all these processes have ended; waits for it, within reason."""

    def wait(*pids):
        left = set(pids)
        for _ in range(400):
            left = {pid for pid in left if _is_alive(pid)}
            if not left:
                return True
            time.sleep(0.05)
        return False

    return wait


def _is_alive(pid):
    told = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(told.stdout.strip()) and not told.stdout.strip().startswith("Z")


LONG_S = 60.0
SHORT_S = 0.1
SCRIPT = """
import os, sys, time
from tests.kit.child_targets import Hostile
from retrain.tasks.child.process import Child
child = Child(Hostile(), name="test")
child.start()
copy = os.fork()  # holds everything open that we do
if copy == 0:
    time.sleep(1000)
print(child.pid, copy, flush=True)
child.call("leave_processes_and_hang", sys.argv[1], timeout_s=1000)
"""


def test_values_go_there_and_back(child):
    sent = (None, 1.5, float("inf"), "\ud800\0", [1, (2,)], {1: "x"})
    assert child.call("echo", *sent, timeout_s=LONG_S) == sent
    assert child.call("echo", "x" * 5_000_000, timeout_s=LONG_S) == ("x" * 5_000_000,)
    example = Example(id="e", prompt="p", reference="r")
    assert child.call("example_text", example, timeout_s=LONG_S) == "Example e p"
    assert child.call("is_prepared", timeout_s=LONG_S) is True
    assert child.call("huge", timeout_s=LONG_S) == 10**400
    with pytest.raises(ConfigError) as caught:
        child.call("raise_problems", timeout_s=LONG_S)
    first = Problem(code="a.b", where="here", what="this", why="that", fix="so")
    assert caught.value.problems == (first, Problem(what="more")), "an error for users is raised as itself"
    with pytest.raises(ChildFailure):
        child.call("garbage", timeout_s=LONG_S)  # in our own line
    child.start()
    assert child.call("echo", timeout_s=LONG_S) == ()
    child.call("chatter", timeout_s=LONG_S)
    with pytest.raises(ChildDied) as died:
        child.call("os_exit", timeout_s=LONG_S)
    assert died.value.output.endswith("x" * 1000), "the last words of the dead"
    assert len(died.value.output) <= 4096


def test_a_child_has_our_surroundings_and_closes_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RETRAIN_SOMETHING", "here")
    child = Child(targets.Target())
    child.close()
    child.start()
    assert child.call("surroundings", timeout_s=LONG_S) == [str(tmp_path), sys.path, "here"]
    child.close()
    child.close()
    assert child.pid == 0


@pytest.mark.parametrize(
    ("method", "text"),
    [
        *(("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt"), ("base", "BaseException: base")),
        *(("generator_exit", "GeneratorExit"), ("allocate", "MemoryError")),
        ("recurse", "RecursionError: maximum recursion depth exceeded"),
        *(("raise_silly", "SillyError: (its text cannot be shown)"), ("raise_long", "ValueError: xxx")),
        ("set", "TypeError: a set cannot be sent to another process"),
        ("no_such_method", "AttributeError: 'Hostile' object has no attribute 'no_such_method'"),
    ],
)
def test_whatever_is_raised_is_reported_and_the_child_goes_on(method, text, child):
    with pytest.raises(ChildError) as caught:
        child.call(method, timeout_s=LONG_S)
    assert str(caught.value).startswith(text)
    assert len(str(caught.value)) < 5000
    assert len(caught.value.traceback) < 5000
    has_no_frame = method in ("raise_long", "raise_silly", "set", "no_such_method")
    assert has_no_frame or "hostile_acts.py" in caught.value.traceback
    assert child.call("echo", 1, timeout_s=LONG_S) == (1,)


@pytest.mark.parametrize(
    ("method", "end"),
    [
        *(("os_exit", "exited with code 3"), ("kill", "died with signal 9"), ("kill_group", "died with signal 9")),
        *(("kill_parent", "died with signal 9"), ("crash", "died with signal 11"), ("close", "exited with code 1")),
    ],
)
def test_a_death_is_reported_and_the_child_can_be_started_again(method, end, child):
    with pytest.raises(ChildDied) as caught:
        child.call(method, timeout_s=LONG_S)
    assert str(caught.value) == f"the scoring process {end}"
    assert caught.value.has_started
    assert not child.is_running
    with pytest.raises(ChildDied, match="is not running"):
        child.call("echo", timeout_s=LONG_S)
    child.start()
    assert child.call("echo", 1, timeout_s=LONG_S) == (1,)


@pytest.mark.parametrize("method", ["stop", "spin", "tower"])
def test_what_never_ends_is_killed_at_its_limit(method, child, gone):
    pid = child.pid
    with pytest.raises(ChildTimeout, match="timed out after"):
        child.call(method, timeout_s=SHORT_S)
    assert gone(pid)


def test_a_child_that_is_stopped_while_idle_is_dead_after_the_limit_of_its_call(child, gone, monkeypatch):
    monkeypatch.setattr("retrain.tasks.child.process.HANDOVER_S", (SHORT_S, 60.0))
    (worker,) = descendants(child.pid)
    os.kill(worker, signal.SIGSTOP)
    with pytest.raises(ChildDied, match="did not take a call") as caught:
        child.call("echo", 1, timeout_s=0.05)
    assert not caught.value.has_started
    assert gone(worker)


@pytest.mark.parametrize("method", ["terminate", "chatter", "set_alarm", "close_streams", "fork_and_return"])
def test_what_returns_has_done_no_harm(method, child, capfd):
    child.start()  # afresh: another test may have closed its outputs
    child.call(method, timeout_s=LONG_S)
    assert child.call("nap", 0.06, timeout_s=LONG_S) == 0.06  # as long as the alarm, and more
    assert child.seconds >= 0.06
    assert capfd.readouterr() == ("", "")


def test_forked_copies_end_with_the_call(child, gone):
    first = child.call("pid_after", "fork_and_return", timeout_s=LONG_S)
    assert child.call("pid_after", "fork_and_return", timeout_s=LONG_S) == first  # the same process answers
    assert gone(child.call("fork_and_hang", timeout_s=LONG_S))
    assert gone(*child.call("leave_processes", timeout_s=LONG_S))
    with closing(Child(targets.Helped())) as child:
        child.start()
        helper = child.call("helper_pid", timeout_s=LONG_S)
        assert child.call("helper_pid", timeout_s=LONG_S) == helper
        os.kill(helper, 0)
    assert gone(helper)


def test_nothing_outlives_a_parent_that_is_killed(tmp_path, gone):
    file = tmp_path / "pids"
    path = os.pathsep.join([str(Path(targets.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout:
        group, copy = map(int, parent.stdout.readline().split())
    while not file.exists() or len(file.read_text().split()) < 3:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert gone(group, *map(int, file.read_text().split()))
    os.kill(copy, signal.SIGKILL)


def test_a_target_that_cannot_prepare_is_reported():
    child = Child(targets.Broken())
    with pytest.raises(ChildError, match="ImportError: no module named sympathy"):
        child.start()
    assert not child.is_running
    child = Child(targets.Sleepy())
    with pytest.raises(ChildTimeout, match="did not start within"):
        child.start(timeout_s=SHORT_S)
    assert child.pid == 0
    child = Child(targets.Locked(), name="scoring")
    child.launch()
    with pytest.raises(PluginError, match="scoring: a Locked cannot be sent") as caught:
        child.start()
    assert (codes_in(caught), child.is_running, child.pid) == (["plugin.not-picklable"], False, 0)
    child = Child({"any": "target"}, name="scoring")
    child.launch()
    os.killpg(child.pid, signal.SIGKILL)
    with pytest.raises(ChildDied, match="the scoring process"):
        child.start()
    assert not child.is_running
    child.start()
    child.close()


def test_a_call_can_be_interrupted_and_leaves_no_answer_behind(child):
    with interrupted_after(0.05), pytest.raises(Stop):
        child.call("nap", 100.0, timeout_s=LONG_S)
    assert not child.is_running
    child.start()
    assert child.call("echo", 2, timeout_s=LONG_S) == (2,)
    timer = threading.Timer(0.05, child.kill)
    timer.start()
    with pytest.raises(ChildDied, match=r"the scoring process (was killed|died|exited)"):
        child.call("nap", 100.0, timeout_s=LONG_S)
    timer.join()


def test_a_launched_child_prepares_before_it_is_waited_for(tmp_path):
    """A target sent at the launch is not sent again; one too large for the socket is sent at the start."""
    small, large = tmp_path / "small", tmp_path / "large"
    child, other = Child(targets.Prepared(small)), Child(targets.Prepared(large, ballast=2**16))
    with closing(child), closing(other):
        child.launch()
        first = child.pid
        for each in (child, other):
            each.launch()
            assert not each.is_running
        limit = time.monotonic() + LONG_S
        while not small.exists():
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert not large.exists()
        for each, file in ((child, small), (other, large)):
            each.start()
            assert each.call("is_prepared", timeout_s=LONG_S) is True
            assert (each.is_running, file.read_text()) == (True, "prepared\n")
            assert each.pid != first, "launched again is another process"
        second = child.pid
        child.start()
        assert child.pid != second
        child.launch()
        third = child.pid
        child.kill()
        child.kill()
        for pid in (first, second, third):
            with pytest.raises(ProcessLookupError):
                os.killpg(pid, 0)
        assert not child.is_running


TEXTS = st.text(st.characters(codec=None, exclude_categories=()))
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
KEYS = st.booleans() | st.integers() | TEXTS | st.tuples(st.integers(), TEXTS)
DATA = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=20
)


def same(first, second):
    return repr(first) == repr(second)  # NaN equals itself here, and 1, 1.0 and True differ


@settings(max_examples=50)
@given(DATA)
def test_plain_data_arrives_as_it_was_sent(value):
    assert same(wire.loads(wire.dumps(value)), value)


@settings(max_examples=25)
@given(TEXTS, DATA)
def test_records_arrive_as_they_were_sent(text, data):
    example = Example(id=text, prompt=[{"role": "user", "content": text}], reference=text, info={"data": data})
    score = Score(outcome=Outcome.SCORED, value=0.5, parts={text: 1.0})
    records = [
        *(example, score, Score.failed(text), Observation(prompt=text, tools=({"type": "function"},))),
        *(Action(text=text, stop_reason=StopReason.TURNS), EpisodeResult(score=score, hit_turn_limit=True)),
        *(LoadedData(examples=(example,), notes=(text,)), Problem(code="a.b", what=text, fix=text)),
    ]
    arrived = wire.loads(wire.dumps({1: records}))[1]
    assert [repr(each) for each in arrived] == [repr(each) for each in records]
    assert arrived[1].outcome is Outcome.SCORED
    assert arrived[4].stop_reason is StopReason.TURNS


def test_what_json_has_looks_like_json_and_the_rest_arrives_as_plain_python():
    assert json.loads(wire.dumps({"a": [1, 2.5, "x", None, True]})) == {"a": [1, 2.5, "x", None, True]}
    assert wire.loads(wire.dumps(MappingProxyType({"!a": 1}))) == {"!a": 1}
    assert wire.loads(wire.dumps(10**6000)) == 10**6000
    for value in (np.float32(1.5), np.float64("nan"), np.int64(7), np.bool_(True), np.str_("x")):
        assert same(wire.loads(wire.dumps(value)), value.item())
    with_reward = LoadedData(examples=(), reward=object())
    for value in ({1, 2}, b"x", object(), np.zeros(2), 1j, np.complex64(1), print, [{"a": {3}}], with_reward):
        with pytest.raises(TypeError, match="cannot be sent to another process"):
            wire.dumps(value)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"{", b'{"!os.system": "x"}', b'{"!Score": {"outcome": "perfect"}}'),
        *(b'{"!Score": {"unknown": 1}}', b'{"!Score": []}', b'{"!int": "x"}', b'{"!int": 3}', b'{"!dict": 3}'),
        *(b'{"!dict": [[[], 1]]}', b"[" * 100_000, b'{"a":' * 100_000),
    ],
)
def test_anything_else_is_an_error_of_the_wire(content):
    with pytest.raises(wire.WireError):
        wire.loads(content)


def test_frames_of_any_size_and_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for content in (b"", b"x", b"y" * 100_000):
            wire.send(ours, content, timeout_s=5.0)
            assert wire.receive(theirs, timeout_s=5.0) == content
        with pytest.raises(TimeoutError):
            wire.receive(theirs, timeout_s=0.01)
        ours.sendall(b"\0" * 7 + b"\5" + b"abc")  # five announced, three sent
        with pytest.raises(TimeoutError):
            wire.receive(theirs, timeout_s=0.01)
        ours.close()
        assert wire.receive(theirs, timeout_s=5.0) is None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff" * 8)  # a header that lies
        with pytest.raises(wire.WireError, match="a frame of"):
            wire.receive(theirs, timeout_s=5.0)
        with pytest.raises(TimeoutError):
            wire.send(theirs, b"x" * 10_000_000, timeout_s=0.01)
