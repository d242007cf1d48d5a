"""v1, tool use: a server with one tool, started for each episode."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class ToolData(vf.TaskData):
    answer: str


class ToolTask(vf.Task[ToolData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(self.data.answer))


class ToolTaskset(vf.Taskset[ToolTask, vf.TasksetConfig]):
    def load(self) -> Iterable[ToolTask]:
        yield ToolTask(ToolData(prompt="What is 1 + 5?", answer="6"), self.config.task)


if __name__ == "__main__":
    Adder.run()
