"""Everything that user code may do to the process that runs it, by name; a child process imports this module too."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np

from retrain.api import Outcome, Score


def raise_(error):
    raise error


def recurse():
    return recurse()


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def terminate():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    return 1.0


def garbage():
    for descriptor in range(3, 512):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff" * 64)


def chatter():
    print("y" * 10**6)
    os.write(1, b"x" * 10**6)
    os.write(2, b"x" * 10**6)
    return 1.0


def fork_and_return():
    os.fork()
    return 1.0


def fork_and_hang():
    if os.fork() == 0:
        time.sleep(1000)
    return 1.0


def leave_processes():
    """Process ids: a child, one in a session of its own, an orphan."""
    plain = subprocess.Popen(["sleep", "1000"])
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    line = "sleep 1000 >/dev/null 2>&1 & echo $!"
    orphan = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, check=True)
    return [plain.pid, apart.pid, int(orphan.stdout)]


def set_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


def close_streams():
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)
    return 1.0


ATTACKS = {
    "exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(3),
    "sleep": lambda: time.sleep(1000),
    "spin": lambda: re.match(r"(a+)+$", "a" * 64 + "b"),
    "tower": lambda: len(str(10**10**9)),
    "allocate": lambda: len(bytearray(50 * 2**30)),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda: os.kill(0, signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "close": lambda: os.closerange(0, 512),
    "recurse": recurse,
    "base": lambda: raise_(BaseException("base")),
    "interrupt": lambda: raise_(KeyboardInterrupt()),
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "huge": lambda: 10**400,
    "array": lambda: np.ones(3),
    "set": lambda: {1},
    "parts": lambda: Score(outcome=Outcome.SCORED, value=1.0, parts={"a": float("inf")}),
    "by_hand": lambda: Score(outcome=Outcome.SCORED, value=float("nan")),
    "empty": lambda: Score(outcome=Outcome.SCORED),
    "outcome": lambda: Score(outcome="perfect", value=1.0),
}
HARMLESS = {
    "leave_process": lambda: float(bool(leave_processes())),
    "fork_and_hang": fork_and_hang,
    "fork_and_return": fork_and_return,
    "chatter": chatter,
    "true": lambda: True,
    "fraction": lambda: Fraction(1, 1),
    "numpy": lambda: np.float32(1.0),
    "scalar_array": lambda: np.array(1.0),
}
OTHERS = {
    "generator_exit": lambda: raise_(GeneratorExit()),
    "kill_parent": kill_parent,
    "crash": lambda: ctypes.string_at(0),
    "terminate": terminate,
    "garbage": garbage,
    "set_alarm": set_alarm,
    "close_streams": close_streams,
}
