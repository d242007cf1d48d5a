"""The agent's program of a v1 environment, as a coroutine: a chat that continues until there are no more tool calls.

The library's own plain chat (`null`) does the same in one process per episode, and installs its requirements from the
network first.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness"]


class ChatHarness(NullHarness):  # type: ignore[misc]  # the library has no stubs
    """Plays one segment of a chat against the library's loopback endpoint."""

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: Any) -> None:
        """Install nothing."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        **_: Any,
    ) -> Any:
        """Chat until the policy calls no tool, or the library rejects the next turn."""
        async with AsyncExitStack() as stack:
            schemas, answer = await _connected(mcp_urls, self.config.tool_timeout, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            is_text = isinstance(prompt, str)
            messages += [{"role": "user", "content": prompt}] if is_text else map(message_to_wire, prompt or [])
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": schemas} if schemas else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code != httpx.codes.OK:
                    return ProgramResult(exit_code=1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [await answer(call) for call in message["tool_calls"]]


async def _connected(
    urls: Mapping[str, str], timeout_s: float, stack: AsyncExitStack
) -> tuple[list[Any], Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]]:
    """Return the tools of an episode's servers, and a function that makes a call and returns a message."""
    found: tuple[list[Any], Mapping[str, Any], Mapping[str, Any]] = [], {}, {}
    client: Any = None  # the library's own, for tool servers
    config = {"mcpServers": {name: {"url": url, "timeout": timeout_s} for name, url in urls.items()}}
    if urls:
        try:
            from verifiers.v1.harnesses.utils import mcp

            client, found = mcp, await mcp.connect_mcp(config, stack)
        except ImportError:  # up to 0.3 the same functions are in the program of the plain chat
            from verifiers.v1.harnesses.null import program

            client, found = program, await program.connect_mcp(config)
    schemas, dispatch, servers = found

    async def answer(call: Mapping[str, Any]) -> dict[str, Any]:
        name, content = call["function"]["name"], f"error: unknown tool {call['function']['name']!r}"
        arguments = json.loads(call["function"]["arguments"])
        if name in dispatch:
            content = await client.call_mcp(servers, dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    return schemas, answer
