"""v1, one turn: add two numbers."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """Scored by what it ends with."""

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 when the answer stands at the end; breaks on one word."""
        if trace.last_reply == "judge raises":
            raise KeyError("no such verdict")
        if trace.last_reply == "nan":
            return float("nan")
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the answer."""
        return float(len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    """Its one argument."""

    size: int = 3


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """`size` sums."""

    def load(self) -> Iterable[SumTask]:
        """In order."""
        for n in range(self.config.size):
            data = SumData(prompt=f"{n} + {n + 1} = ?", system_prompt="Add.", answer=str(2 * n + 1))
            yield SumTask(data, self.config.task)
