"""v1, one turn: add two numbers."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "judge raises":
            raise KeyError("no such verdict")
        if trace.last_reply == "nan":
            return float("nan")
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return _measured(trace.last_reply, len(trace.last_reply))

    @vf.reward(weight=0.0)
    async def spaces(self, trace: vf.Trace) -> float:
        return _measured(trace.last_reply, trace.last_reply.count(" "))


def _measured(said: str, value: int) -> float:
    if said.startswith("measure raises"):
        raise KeyError("no such measure")
    return float("nan") if said.startswith("measure is nan") else float(value)


class SumConfig(vf.TasksetConfig):
    size: int = 3


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> Iterable[SumTask]:
        for n in range(self.config.size):
            data = SumData(prompt=f"{n} + {n + 1} = ?", system_prompt="Add.", answer=str(2 * n + 1))
            yield SumTask(data, self.config.task)
