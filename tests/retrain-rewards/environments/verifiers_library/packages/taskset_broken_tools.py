"""v1, with tools whose server cannot be started: `ends` does nothing, `away` wants a container."""

from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.runtimes import DockerConfig

__all__ = ["BrokenTaskset"]


class Silent(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """This module does not run it."""


class BrokenConfig(vf.TasksetConfig):
    fault: str = "ends"


class BrokenTaskset(vf.Taskset[vf.Task, BrokenConfig]):
    @classmethod
    def toolsets(cls, config: BrokenConfig) -> list[vf.Toolset]:
        runtime = {"runtime": DockerConfig()} if config.fault == "away" else {}
        return [Silent(vf.ToolsetConfig(**runtime))]

    def load(self) -> Iterable[vf.Task]:
        yield vf.Task(vf.TaskData(prompt="Call it."), self.config.task)
