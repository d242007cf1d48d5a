"""An agent of the standard library alone, whose calls are made side by side, in an order that chance sets."""

from __future__ import annotations

import json
import os
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def ask(messages: list[dict[str, str]]) -> str:
    """One call, after a moment that no seed decides."""
    time.sleep(random.SystemRandom().random() / 50)
    body = json.dumps({"model": "any", "messages": messages}).encode()
    head = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", data=body, headers=head)
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def play(task: dict[str, Any]) -> str:
    """Three answers to one question, and a last one that has seen the first of them in order of the alphabet."""
    messages = task["messages"]
    with ThreadPoolExecutor(3) as pool:
        first = min(pool.map(ask, [messages] * 3))
    more = [{"role": "assistant", "content": first}, {"role": "user", "content": "Are you sure?"}]
    return f"{first} {ask([*messages, *more])}"
