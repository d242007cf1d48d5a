"""The `judge` reward itself: prompt, call, verdict and cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from retrain.api import Example, PluginContext, Score
from retrain_rewards.verifiers.judge.client import JudgeClient, JudgeError, read_verdict
from retrain_rewards.verifiers.judge.prompt import judge_prompt
from retrain_rewards.verifiers.judge.settings import JudgeSettings, settings_from

MILLION = 1e6


class JudgeReward:
    """A model's verdict on an answer: 1 for yes, 0 for no, or a number in [0, 1].

    It runs in the run's own event loop. There is no verdict when the reply does not end in one; the score is failed,
    with a fix, when there is no reply after `retries` retries. It pickles as its settings, without connections.
    """

    def __init__(self, settings: JudgeSettings) -> None:
        self.settings = settings
        self.concurrency = settings.concurrency
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, JudgeClient] = WeakKeyDictionary()
        self._spent: Counter[str] = Counter()

    def __reduce__(self) -> tuple[Any, ...]:
        return JudgeReward, (self.settings,)

    async def score(self, example: Example, text: str) -> Score:
        prompt = judge_prompt(self.settings.rubric, example, text, key=self.settings.marker_key)
        try:
            reply = await self._client().ask(prompt)
        except JudgeError as error:
            return Score.failed(str(error))
        self._spent.update(judge_tokens_in=reply.tokens_in, judge_tokens_out=reply.tokens_out)
        return read_verdict(reply.text, was_cut=reply.was_cut)

    def gold(self, example: Example) -> str | None:
        """A plain sentence with the reference, None without one; not a box, since a judge reads any text."""
        return f"The final answer is {example.reference}" if example.reference.strip() else None

    def metrics(self) -> Mapping[str, float]:
        """Requests sent (retries included), tokens as the server counts them, and dollars, since the last call."""
        spent, self._spent, table = self._spent, Counter(), self.settings.table
        counts = {name: spent[name] for name in ("judge_calls", "judge_tokens_in", "judge_tokens_out")}
        cost = spent["judge_tokens_in"] * table.judge_price_in + spent["judge_tokens_out"] * table.judge_price_out
        return {**counts, "judge_cost_usd": cost / MILLION}

    async def close(self) -> None:
        """Close the connections of this event loop; a later score opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _client(self) -> JudgeClient:
        """Connections belong to an event loop, so each has its own client."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = JudgeClient(self.settings, lambda: self._spent.update(judge_calls=1))
        return self._clients[loop]


def make_judge(context: PluginContext) -> JudgeReward:
    """The `judge` reward; ConfigError on a missing model, key or library, or a rubric that cannot be used."""
    return JudgeReward(settings_from(context.config, context.seeds.derive("judge markers")))
