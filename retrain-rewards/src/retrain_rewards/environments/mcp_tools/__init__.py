"""The environment `mcp`: the tasks of `[data]`, with the tools of servers that speak the Model Context Protocol."""
