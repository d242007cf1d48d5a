"""v1, tool use: a server with one tool, started for each episode."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """Adds."""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolData(vf.TaskData):
    """One sum."""

    answer: str


class ToolTask(vf.Task[ToolData, vf.State, vf.TaskConfig]):
    """Scored by what it ends with."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """One server per episode."""
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 when the answer stands at the end."""
        return float(trace.last_reply.endswith(self.data.answer))


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    """One task."""

    def load(self) -> Iterable[ToolTask]:
        """In order."""
        yield ToolTask(ToolData(prompt="What is 1 + 5?", answer="6"), self.config.task)


if __name__ == "__main__":
    Adder.run()
