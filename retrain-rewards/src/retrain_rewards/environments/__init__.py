"""Environments: episodes in chat messages that one event loop plays with a policy that writes text.

Begin with `loop.py`, then one of the providers: `mcp_tools`, `openenv`, `verifiers_library`.
"""
