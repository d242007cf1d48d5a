"""The result of a tool as text for the policy."""

from __future__ import annotations

import json
from typing import Any

from mcp.types import CallToolResult


def text_of_result(result: CallToolResult) -> str:
    """The texts of a result, one per line; what is no text is named with its kind and size, and not shown."""
    text = "\n".join(_text_of(block) for block in result.content)
    if not result.content and result.structuredContent is not None:
        text = json.dumps(result.structuredContent)
    return f"error: {text}" if result.isError else text


def _text_of(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource_link":
        return f"[link to {block.name}: {block.uri}]"
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if text is not None else _unseen(block.resource.mimeType, block.resource.blob)
    return _unseen(block.mimeType, block.data)


def _unseen(kind: str | None, base64: str) -> str:
    return f"[{kind or 'data'}, {len(base64) * 3 // 4} bytes, not shown]"
