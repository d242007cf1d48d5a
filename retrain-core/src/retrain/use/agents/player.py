"""The environment `agent`: what `[environment]` says about it, and the rollouts that it plays."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Rollouts
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import SamplingParams
from retrain.tasks.scoring.service import ScoringService
from retrain.use.agents.gateway import Gateway
from retrain.use.agents.programs import CommandAgent, FunctionAgent, Program
from retrain.use.agents.rollouts import AgentRollouts
from retrain.use.agents.stage import Stage

ARGUMENTS = ("command", "concurrency")
CONCURRENCY, MOST_CALLS = 16, 64


def make_agent(context: PluginContext) -> AgentPlayer:
    """The agent that `[environment]` names; ConfigError lists every fault."""
    config = context.config
    args: Mapping[str, Any] = config.environment.args
    entry, command = str(config.environment.id), args.get("command", "")
    concurrency, most_calls = args.get("concurrency", CONCURRENCY), config.environment.max_turns
    places = {name: config.place(f"environment.{name}") for name in ("id", "args", "max_turns")}
    problems = [_unknown(name, places["args"]) for name in args if name not in ARGUMENTS]
    if not isinstance(command, str) or bool(entry) == bool(command):
        fix = 'set one: id = "my_agent:play", or args = { command = "python my_agent.py" }'
        what = "the agent is a Python function or a command, and neither or both are given"
        problems.append(Problem(where=places["id"], what=what, fix=fix))
    elif entry and not all(part for part in (entry.count(":") == 1, *entry.split(":"))):
        problems.append(Problem(where=places["id"], what=f"{entry!r} names no function", fix='write "module:function"'))
    if type(concurrency) is not int or concurrency < 1:
        what = f"concurrency must be a whole number of at least 1, not {concurrency!r}"
        problems.append(Problem(where=places["args"], what=what, fix=f"leave it out for {CONCURRENCY}"))
    if most_calls == 0:
        fix = f"use 1 or more, or -1 for {MOST_CALLS}"
        problems.append(Problem(where=places["max_turns"], what="an agent without a call cannot learn", fix=fix))
    if problems:
        raise ConfigError(*problems)
    program: Program = FunctionAgent(entry=entry, where=places["id"])
    if command:
        program = CommandAgent(command=command, where=places["args"])
    stage = Stage(
        program,
        name="agent",
        concurrency=concurrency,
        timeout_s=config.environment.timeout_s,
        memory_gb=config.scoring.memory_gb,
    )
    return AgentPlayer(stage, name=entry or command, most_calls=most_calls if most_calls > 0 else MOST_CALLS)


class AgentPlayer:
    """See `retrain.tasks.tasks.Player`."""

    def __init__(self, stage: Stage, *, name: str, most_calls: int) -> None:
        self.name = name
        self._stage, self._most_calls = stage, most_calls
        self._gateway: Gateway | None = None

    def start(self) -> None:
        """Load the agent once."""
        self._stage.start()

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        """Episodes of the agent."""
        self._gateway = self._gateway or Gateway()
        return AgentRollouts(
            backend=backend,
            tokenizer=context.tokenizer,
            scoring=scoring,
            stage=self._stage,
            gateway=self._gateway,
            params=params,
            config=context.config,
            most_calls=self._most_calls,
            context_length=context_length,
            progress=context.sampling_progress,
        )

    def close(self) -> None:
        """End the agent's processes and the gateway."""
        self._stage.close()
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None


def _unknown(name: str, where: str) -> Problem:
    near = get_close_matches(name, ARGUMENTS, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"use {' or '.join(ARGUMENTS)}"
    return Problem(where=where, what=f"unknown argument {name!r}", fix=fix)
