"""Makes the entries of a data set in a process of its own: `python -m retrain_rewards.sources.reasoning_gym.entries`.

Some data sets of reasoning-gym iterate over sets of text, whose order depends on Python's hash seed: entries would
differ between runs, and a resumed run would see other tasks. The process that runs this module has a fixed hash seed,
so the entries depend on name and configuration alone. It reads one JSON object and writes one JSON line per entry.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from typing import Any

from retrain_rewards.sources.reasoning_gym.library import to_plain

HASH_SEED = "0"


class EntriesError(RuntimeError):
    """The data set could not be made; the text is the library's own error."""


def make_entries(name: str, config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Question, answer and metadata of every entry, as plain data (see `from_plain`)."""
    command = [sys.executable, "-P", "-m", "retrain_rewards.sources.reasoning_gym.entries"]
    environ = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONIOENCODING": "utf-8"}
    request = json.dumps({"name": name, "config": dict(config)})
    done = subprocess.run(command, input=request, capture_output=True, encoding="utf-8", env=environ, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise EntriesError(lines[-1] if lines else f"the process ended with code {done.returncode}")
    for line in done.stdout.split("\n"):
        if line:
            yield json.loads(line)


def main() -> None:
    """Read the request from stdin, write the entries to stdout."""
    from retrain_rewards.sources.reasoning_gym.library import make_data_set

    request = json.load(sys.stdin)
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # some data sets print while they work
        data_set = make_data_set(request["name"], request["config"])
        for index in range(len(data_set)):
            entry = data_set[index]
            out.write(json.dumps(to_plain({k: entry[k] for k in ("question", "answer", "metadata")})) + "\n")


if __name__ == "__main__":
    main()
