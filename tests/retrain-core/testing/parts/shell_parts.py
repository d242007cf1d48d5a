"""Launchers, commands, tables and templates: sound ones, and one for each fault."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

import click
from pydantic import BaseModel
from variants import variant

from retrain.api import Table, key


class Job:
    """A process in a group of its own."""

    def __init__(self, process):
        self.process, self.pid = process, process.pid

    def poll(self):
        return self.process.poll()

    def stop(self):
        self.process.terminate()

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Launcher:
    """Starts processes here."""

    job, mode, uses_cwd = Job, "ab", True

    def __init__(self, context):
        pass

    def start(self, job):
        with (job.folder / "stdout.log").open(self.mode) as out, (job.folder / "stderr.log").open(self.mode) as err:
            process = subprocess.Popen(
                job.argv,
                cwd=job.cwd if self.uses_cwd else None,
                env={**os.environ, **job.environ},
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        return self.job(process)

    def close(self):
        pass


class Strict(Launcher):
    """Reports a missing program as the contract says."""

    def start(self, job):
        from retrain.api import BackendError

        try:
            return super().start(job)
        except OSError as error:
            raise BackendError(str(error)) from error


def always_done(self):
    return None if Job.poll(self) is None else 0


SwallowsCodes = variant(Strict, job=variant(Job, poll=always_done))
StaysHere = variant(Strict, uses_cwd=False)
StartsLogsAnew = variant(Strict, mode="wb")
NeverAsks = variant(Strict, job=variant(Job, stop=Job.kill))
LeavesChildren = variant(Strict, job=variant(Job, kill=lambda self: self.process.kill()))


@click.command("sound")
@click.option("--many", is_flag=True, help="More of it.")
def sound(many):
    """Do something."""


@click.command("bare")
@click.option("--many", is_flag=True)
def bare(many):
    click.echo("done")


@click.command("greedy", context_settings={"ignore_unknown_options": False})
@click.argument("rest", nargs=-1)
def refuses(rest):
    """Do something."""


def no_command():
    return None


class SoundTable(Table):
    """Keys of a plugin."""

    much_ado: float = key(0.5, "How much.", ge=0.0)


class LaxTable(BaseModel):
    much_ado: float = 0.5


class NoDefault(Table):
    much_ado: float = key(..., "How much.")


class Unexplained(Table):
    much_ado: float = key(0.5, "")


class TakesAFlag(Table):
    lr: float = key(0.5, "How much.", ge=0.0)


SOUND_TEMPLATE = "# a short run\n[training]\nmax_steps = 3  # few\n"
NOT_TOML = "# a short run\n[training\n"
UNKNOWN_KEY = "# a short run\n[training]\nmax_stepps = 3\n"
UNKNOWN_NAME = '# a short run\n[algorithm]\ntransform_mode = "no_such_transform"\n'
NO_COMMENT = "[training]\nmax_steps = 3\n"


def no_text():
    return None


SOUND_RECIPE = {"algorithm.advantage_mode": "grpo", "algorithm.loss": "ppo", "algorithm.clip_eps": 0.1}
EMPTY_RECIPE = {}
MISSPELT_RECIPE = {"algorithm.los": "ppo"}
RUN_RECIPE = {"training.max_steps": 3}
NAMES_NOTHING = {"algorithm.advantage_mode": "grpoo"}


class Agreeing(str):
    """Equal to every text, so that no departure from it shows."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__


HIDES_THE_USER = {"algorithm.advantage_mode": Agreeing("grpo")}
HOLDS_A_TUPLE = {"algorithm.params": {"sizes": (1, 2)}}


def no_recipe():
    return SOUND_RECIPE
