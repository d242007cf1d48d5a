"""Runs an agent, a Python function or a command, once per episode in a process that can be killed."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.process import import_from_here

# In characters; an agent that prints without end must not fill the memory of the run.
MOST_ANSWER = 2**20
# In characters; the reason is at the end of a traceback.
TAIL = 1500


class AgentFailure(Exception):  # noqa: N818 - an outcome of an episode, not an error of retrain
    """The agent ended without an answer; the text says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionAgent:
    """`module:function`, called with the task; it may be a coroutine function.

    Its process plays one episode at a time, and keeps its imports.
    """

    entry: str
    where: str

    def prepare(self) -> None:
        self._function()

    def play(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
        # OpenAI's clients read address and key from the environment.
        os.environ.update(variables)
        answer = self._function()(dict(task))
        if inspect.iscoroutine(answer):
            answer = asyncio.run(answer)
        if answer is None or isinstance(answer, str):
            return _checked(answer)
        raise AgentFailure(f"{self.entry} returned {type(answer).__name__}, neither text nor None")

    def _function(self) -> Callable[[dict[str, Any]], object]:
        module, _, name = self.entry.partition(":")
        import_from_here()
        try:
            function = getattr(import_module(module), name)
        except Exception as error:
            # Importing an agent runs its author's code, and that may raise anything.
            fix = 'write id = "module:function", of a module in this folder or an installed one'
            what = f"{self.entry!r} cannot be imported: {type(error).__name__}: {error}"
            problem = Problem(code="environment.agent-not-importable", where=self.where, what=what, fix=fix)
            raise ConfigError(problem) from error
        if not callable(function):
            what = f"{self.entry!r} is a {type(function).__name__}, not a function"
            fix = "name a function that takes the task"
            raise ConfigError(Problem(code="environment.agent-not-callable", where=self.where, what=what, fix=fix))
        return function  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """A command: reads the task as a line of JSON on stdin, and writes its answer to stdout."""

    command: str
    where: str

    def prepare(self) -> None:
        words = shlex.split(self.command)
        if not words or shutil.which(words[0]) is None:
            what = f"the command {self.command!r} names no program that is found"
            fix = 'for example command = "python my_agent.py"'
            raise ConfigError(Problem(code="environment.command-missing", where=self.where, what=what, fix=fix))

    def play(self, task: Mapping[str, Any], variables: Mapping[str, str]) -> str | None:
        done = subprocess.run(
            shlex.split(self.command),
            input=json.dumps(task) + "\n",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **variables},
            check=False,
        )
        if done.returncode:
            said = done.stderr.strip()[-TAIL:]
            raise AgentFailure(f"exit code {done.returncode}" + (f": {said}" if said else ""))
        return _checked(done.stdout.strip() or None)


Program = FunctionAgent | CommandAgent  # sent to the process that plays it


def _checked(answer: str | None) -> str | None:
    if answer is not None and len(answer) > MOST_ANSWER:
        raise AgentFailure(f"the answer has {len(answer)} characters, and {MOST_ANSWER} are allowed")
    return answer
