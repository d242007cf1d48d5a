"""An agent that does what its task says, and what agents should not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def ask(text: str = "x") -> str:
    """One call, with nothing but the standard library."""
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", data=body, headers=head)
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def play(task: dict[str, Any]) -> Any:
    """What `task["info"]["do"]` says."""
    wanted = task["info"]["do"]
    if wanted == "none":
        return "no call"
    said = ask()
    if wanted == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if wanted == "crash":
        raise ValueError(f"it broke with {os.environ['OPENAI_API_KEY']}")
    if wanted == "exit":
        os._exit(3)
    if wanted == "never":
        while True:
            ask()
    if wanted == "number":
        return 7
    return {"good": f"I heard {said}", "silent": None, "leak": os.environ["OPENAI_API_KEY"]}[wanted]


async def play_async(task: dict[str, Any]) -> Any:
    """The same as a coroutine."""
    return play(task)


def main() -> None:
    """The same as a command."""
    task = json.loads(sys.stdin.readline())
    print("a log line", file=sys.stderr)
    if task["info"]["do"] == "fail":
        sys.exit("no luck")
    print(play(task) or "")


if __name__ == "__main__":
    main()
