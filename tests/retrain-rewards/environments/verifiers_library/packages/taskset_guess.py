"""v1, several turns: the environment plays the user of a guessing game; without an end."""

import asyncio
import itertools
import re
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    """Scored by the environment."""


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterable[GuessTask]:
        for n in itertools.count(1):
            yield GuessTask(GuessData(prompt=f"Guess my number below {n + 2}.", answer=str(n)), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        won = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                said = segment.messages[-1].content
                if said == "hang":
                    await asyncio.sleep(1e9)
                if said == "raise":
                    raise RuntimeError("the environment broke")
                guess = int(re.sub(r"\D", "", said) or 0)
                if guess == int(task.data.answer):
                    won = True
                    break
                hint = "low" if guess < int(task.data.answer) else "high"
                segment = await interaction.turn(f"Too {hint}. Guess again.")
        interaction.trace.record_reward("won", float(won), 1.0)
