"""The agent's program of a v1 environment, as a coroutine: a chat that goes on until there are no more tool calls.

The library's own plain chat (`null`) does the same in one process per episode, and installs its requirements from the
network first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        """Nothing needs to be installed."""

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
            tools = await _Tools.connect(mcp_urls, self.config.tool_timeout, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            is_text = isinstance(prompt, str)
            messages += [{"role": "user", "content": prompt}] if is_text else map(message_to_wire, prompt or [])
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools.schemas} if tools.schemas else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code != httpx.codes.OK:
                    return ProgramResult(exit_code=1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                messages += [await tools.answer(call) for call in message["tool_calls"]]


class _Tools:
    """The tool servers of an episode, through the library's own client for them."""

    def __init__(self, schemas: list[Any], dispatch: Mapping[str, Any], servers: Mapping[str, Any], call: Any) -> None:
        self.schemas = schemas
        self._dispatch = dispatch
        self._servers = servers
        self._call = call

    @classmethod
    async def connect(cls, urls: Mapping[str, str], timeout_s: float, stack: AsyncExitStack) -> _Tools:
        if not urls:
            return cls([], {}, {}, None)
        config = {"mcpServers": {name: {"url": url, "timeout": timeout_s} for name, url in urls.items()}}
        try:
            from verifiers.v1.harnesses.utils import mcp
        except ImportError:  # up to 0.3 the same functions are in the program of the plain chat
            from verifiers.v1.harnesses.null import program

            schemas, dispatch, servers = await program.connect_mcp(config)
            return cls(schemas, dispatch, servers, program.call_mcp)
        schemas, dispatch, servers = await mcp.connect_mcp(config, stack)
        return cls(schemas, dispatch, servers, mcp.call_mcp)

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The result of one call as a message, or the reason why it cannot be made."""
        name = call["function"]["name"]
        arguments = json.loads(call["function"]["arguments"])
        content = f"error: unknown tool {name!r}"
        if name in self._dispatch:
            content = await self._call(self._servers, self._dispatch, name, arguments)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
