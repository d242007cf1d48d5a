"""v1, played by two agents."""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        await agents.speaker.run(task)
        await agents.judge.run(task)


class DebateTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterable[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="Discuss."), self.config.task)
