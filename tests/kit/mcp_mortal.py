"""An MCP server for tests that ends: `python mcp_mortal.py WHEN HOW`; without a library, so that it starts at once.

WHEN is `start` or the method at which it ends; `after` answers the first call of a tool, and ends then. HOW is `exits`,
`killed`, or `lives`: it closes stdout, says its last words later, and has to be ended.
"""

import json
import os
import signal
import sys
import time


def end(how):
    if how == "lives":
        os.close(1)
        time.sleep(0.3)
    print("no ink", "out of paper", sep="\n", file=sys.stderr, flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    time.sleep(60.0)


def answer(request):
    if request["method"] == "initialize":
        versions = {"protocolVersion": request["params"]["protocolVersion"], "capabilities": {"tools": {}}}
        return {**versions, "serverInfo": {"name": "mortal", "version": "1"}}
    if request["method"] == "tools/list":
        return {"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]}
    return {"content": [{"type": "text", "text": "an answer"}]}


if __name__ == "__main__":
    when, how = sys.argv[1:]
    if when == "start":
        end(how)
    for line in sys.stdin:
        request = json.loads(line)
        if request["method"] == when:
            end(how)
        if "id" in request:
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": answer(request)}), flush=True)
        if when == "after" and request["method"] == "tools/call":
            end(how)
