"""An agent that knows nothing of retrain: OpenAI's package, two tools, and calls that are made side by side.

It thinks of 3 or 7. The model compares numbers with it, several at once, and then two answers are asked for at the same
time: the game is won when both are right.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI


def tool(name: str, description: str) -> dict[str, Any]:
    number = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": number}}


TOOLS = [tool("compare", "Is the number too low or too high?"), tool("answer", "Say which number it is.")]


async def play(task: dict[str, Any]) -> str:
    """One game; the answer is what both of two answers said, boxed."""
    secret = int(task["info"]["secret"])
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    async with AsyncOpenAI() as client:
        first = await client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
        said = first.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": compared(number_in(call), secret)})
        if not said.tool_calls:
            return "no comparison"
        answers = await asyncio.gather(*(guess(client, messages) for _ in range(2)))
    return rf"\boxed{{{answers[0]}}}" if answers[0] == answers[1] else "undecided"


async def guess(client: AsyncOpenAI, messages: list[Any]) -> int | None:
    done = await client.chat.completions.create(model="gpt-5", messages=messages, tools=TOOLS)
    calls = done.choices[0].message.tool_calls or ()
    return next((number_in(call) for call in calls if call.function.name == "answer"), None)


def number_in(call: Any) -> int | None:
    """The argument of a call; the model may write anything."""
    number = json.loads(call.function.arguments).get("number")
    return number if isinstance(number, int) else None


def compared(number: int | None, secret: int) -> str:
    if number is None:
        return "That is no number."
    return "Right." if number == secret else "Too low." if number < secret else "Too high."
