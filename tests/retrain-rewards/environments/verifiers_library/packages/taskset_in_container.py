"""v1, with tasks that need a container."""

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["BoxedTaskset"]


class BoxedTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self) -> Iterable[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="Repair it.", image="python:3.12"), self.config.task)
