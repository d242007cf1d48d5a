"""Objects for child processes: well-behaved ones and every way of not behaving."""

import os
import subprocess
import sys
import time

from retrain.api import ConfigError, Example, Problem
from tests.kit.hostile_acts import ATTACKS, HARMLESS, OTHERS, leave_processes


class OwnError(ConfigError):
    """The parent does not know it."""


class Target:
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

    def pid_after(self, act):
        getattr(self, act)()
        return os.getpid()

    def fork_and_hang(self):
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)
        return pid

    def leave_processes(self):
        return leave_processes()

    def leave_processes_and_hang(self, file):
        with open(file, "w") as stream:
            stream.write(" ".join(map(str, leave_processes())))
        time.sleep(1000)


for name, act in (ATTACKS | HARMLESS | OTHERS).items():
    if not hasattr(Hostile, name):
        setattr(Hostile, name, staticmethod(act))


class Broken:
    def prepare(self):
        raise ImportError("no module named sympathy")


class Sleepy:
    def prepare(self):
        time.sleep(1000)


class Helped:
    def prepare(self):
        self.helper = subprocess.Popen(["sleep", "1000"])

    def helper_pid(self):
        subprocess.Popen(["sleep", "1000"])
        return self.helper.pid


class Locked:
    def __init__(self):
        self.stream = open(os.devnull)  # noqa: SIM115
