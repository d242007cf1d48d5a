"""Objects for child processes: well-behaved ones and every way of not behaving."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time

from retrain.api import ConfigError, Example, Problem


class OwnError(ConfigError):
    """A kind of error that the parent does not know."""


class Target:
    """Answers what it is asked."""

    prepared = False

    def prepare(self):
        self.prepared = True

    def is_prepared(self):
        return self.prepared

    def echo(self, *arguments):
        return arguments

    def example_text(self, example: Example):
        return f"{type(example).__name__} {example.id} {example.prompt}"

    def surroundings(self):
        return [os.getcwd(), sys.path, os.environ.get("RETRAIN_SOMETHING", "")]

    def nap(self, seconds):
        time.sleep(seconds)
        return seconds

    def set_value(self):
        return {1, 2}

    def raise_problems(self):
        raise OwnError(Problem(code="a.b", where="here", what="this", why="that", fix="so"), Problem(what="more"))

    def raise_silly(self):
        class SillyError(Exception):
            def __str__(self):
                raise RuntimeError("no text")

        raise SillyError

    def raise_long(self):
        raise ValueError("x" * 10**7)


class Prepared(Target):
    """Leaves a line in a file when it is prepared; `ballast` makes it large."""

    def __init__(self, file, ballast=0):
        self.file, self.ballast = file, "x" * ballast

    def prepare(self):
        super().prepare()
        with open(self.file, "a") as stream:
            stream.write("prepared\n")


class Hostile(Target):
    """Each method is an attack; those that return are no failure."""

    def leave_exit(self):
        sys.exit(3)

    def leave_os_exit(self):
        os._exit(3)

    def interrupt(self):
        raise KeyboardInterrupt

    def base_exception(self):
        raise BaseException("base")

    def generator_exit(self):
        raise GeneratorExit

    def kill_self(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_group(self):
        os.kill(0, signal.SIGKILL)

    def kill_parent(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    def terminate_self(self):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR1)
        return "alive"

    def stop_self(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def spin_in_c(self):
        re.match(r"(a+)+$", "a" * 64 + "b")

    def tower(self):
        return len(str(10**10**9))

    def allocate(self):
        return len(bytearray(50 * 2**30))

    def recurse(self):
        return self.recurse()

    def huge_integer(self):
        return 10**100_000

    def crash(self):
        ctypes.string_at(0)

    def close_all(self):
        os.closerange(0, 512)

    def write_into_descriptors(self):
        for descriptor in range(3, 512):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\xff" * 64)
        return 1

    def chatter(self):
        print("y" * 10**6)
        os.write(1, b"x" * 10**6)
        os.write(2, b"x" * 10**6)
        return 1

    def fork_and_return(self):
        os.fork()
        return os.getpid()

    def fork_and_hang(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        return pid

    def leave_processes(self):
        plain = subprocess.Popen(["sleep", "1000"])
        apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        line = "sleep 1000 >/dev/null 2>&1 & echo $!"
        orphan = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, check=True)
        return [plain.pid, apart.pid, int(orphan.stdout)]

    def leave_processes_and_hang(self, file):
        with open(file, "w") as stream:
            stream.write(" ".join(map(str, self.leave_processes())))
        self.spin_in_c()

    def set_alarm(self):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return 1

    def close_streams(self):
        sys.stdout.close()
        sys.stderr.close()
        os.close(1)
        os.close(2)
        return 1


class Broken:
    """Cannot prepare."""

    def prepare(self):
        raise ImportError("no module named sympathy")


class Sleepy:
    """Prepares for ever."""

    def prepare(self):
        time.sleep(1000)


class Helped:
    """Keeps a process of its own from the beginning."""

    def prepare(self):
        self.helper = subprocess.Popen(["sleep", "1000"])

    def helper_pid(self):
        subprocess.Popen(["sleep", "1000"])
        return self.helper.pid


class Locked:
    """Cannot be pickled."""

    def __init__(self):
        self.stream = open(os.devnull)  # noqa: SIM115
