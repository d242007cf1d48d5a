"""Classic, everything that can go wrong, by the word that the policy says."""

import asyncio
import random
from typing import Any

import verifiers as vf
from datasets import Dataset


class Trouble(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        word = messages[-1].content
        if word == "hang":
            await asyncio.sleep(1e9)
        if word == "stubborn":
            while True:
                try:
                    await asyncio.sleep(1e9)
                except asyncio.CancelledError:
                    continue
        if word == "raise":
            raise RuntimeError("the environment broke")
        if word == "library error":
            raise vf.ToolError("the library's own error")
        if word == "exit":
            raise SystemExit(3)
        return [{"role": "user", "content": f"{random.randint(0, 10**9)}"}]


def judged(completion: Any) -> float:
    word = completion[-1].content
    if word == "judge raises":
        raise KeyError("no such verdict")
    return {"nan": float("nan"), "infinite": float("inf"), "text": "many"}.get(word, len(word))  # type: ignore[return-value]


async def slow(completion: Any) -> float:
    if completion[-1].content == "judge hangs":
        await asyncio.sleep(1e9)
    return 0.0


def rank(completions: Any) -> list[float]:
    words = [completion[-1].content for completion in completions]
    if "group raises" in words:
        raise ZeroDivisionError("nothing to compare")
    return [float(len(word) == max(map(len, words))) for word in words]


def measured(completion: Any) -> float:
    word = completion[-1].content
    if word == "metric raises":
        raise KeyError("no such measure")
    return float("nan") if word == "metric is nan" else 7.0


def rank_measured(completions: Any) -> list[float]:
    if any(completion[-1].content == "group metric raises" for completion in completions):
        raise ZeroDivisionError("nothing to compare")
    return [8.0] * len(completions)


def load_environment(max_turns: int = 2, grouped: bool = False, metrics: bool = False, **_: Any) -> vf.Environment:
    rows = Dataset.from_list([{"question": f"task {n}", "answer": ""} for n in range(3)])
    funcs = [judged, slow, rank] if grouped else [judged, slow]
    weights = [1.0] * len(funcs)
    if metrics:
        funcs, weights = [*funcs, measured, rank_measured], [*weights, 0.0, 0.0]
    return Trouble(dataset=rows, rubric=vf.Rubric(funcs=funcs, weights=weights), max_turns=max_turns)
