"""v1, played by two agents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateConfig(vf.EnvConfig):
    """Two seats."""

    speaker: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class DebateEnv(vf.Env[DebateConfig]):
    """One speaks, one judges."""

    async def run(self, task: Any, agents: Any) -> None:
        """Both, in order."""
        await agents.speaker.run(task)
        await agents.judge.run(task)


class DebateTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterable[vf.Task]:
        """In order."""
        yield vf.Task(vf.TaskData(prompt="Discuss."), self.config.task)
