"""The environment `agent`: what `[environment]` says about it, and the rollouts that it plays."""

from __future__ import annotations

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Rollouts
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.build import validated_params
from retrain.kernel.types import SamplingParams
from retrain.tasks.scoring.service import ScoringService
from retrain.use.agents.programs import CommandAgent, FunctionAgent, Program
from retrain.use.agents.rollouts import AgentRollouts, Gateway
from retrain.use.agents.stage import Stage

MOST_CALLS = 64


class AgentArgs(Table):
    """`[environment] args` of an agent."""

    command: str = key("", "The agent as a command, in place of a Python function in `id`.")
    concurrency: int = key(16, "Episodes that are played at once.", ge=1)


def make_agent(context: PluginContext) -> AgentPlayer:
    """The agent that `[environment]` names; ConfigError lists every fault."""
    config = context.config
    entry, most_calls = str(config.environment.id), config.environment.max_turns
    places = {name: config.place(f"environment.{name}") for name in ("id", "args", "max_turns")}
    args, problems = validated_params(AgentArgs, config.environment.args, where=places["args"])
    command = str(config.environment.args.get("command", ""))
    if bool(entry) == bool(command):
        fix = 'set one: id = "my_agent:play", or args = { command = "python my_agent.py" }'
        what = "the agent is a Python function or a command, and neither or both are given"
        problems.append(Problem(where=places["id"], what=what, fix=fix))
    elif entry and not all(part for part in (entry.count(":") == 1, *entry.split(":"))):
        problems.append(Problem(where=places["id"], what=f"{entry!r} names no function", fix='write "module:function"'))
    if most_calls == 0:
        fix = f"use 1 or more, or -1 for {MOST_CALLS}"
        problems.append(Problem(where=places["max_turns"], what="an agent without a call cannot learn", fix=fix))
    if problems:
        raise ConfigError(*problems)
    assert isinstance(args, AgentArgs)
    program: Program = FunctionAgent(entry=entry, where=places["id"])
    if command:
        program = CommandAgent(command=command, where=places["args"])
    stage = Stage(
        program,
        name="agent",
        concurrency=args.concurrency,
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
