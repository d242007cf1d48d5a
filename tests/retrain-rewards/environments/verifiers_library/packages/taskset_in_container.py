"""v1, with tasks that need a container."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["BoxedTaskset"]


class BoxedTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """One task with an image."""

    def load(self) -> Iterable[vf.Task]:
        """In order."""
        yield vf.Task(vf.TaskData(prompt="Repair it.", image="python:3.12"), self.config.task)
