"""The process that makes the entries of reasoning-gym's data sets, kept alive: importing the library takes seconds.

`make_entries` starts a process for every data set. With `kept_alive` it asks this one, which runs the same `main` with
the same fixed hash seed, once for every request.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from retrain_rewards.sources import reasoning_gym_library as entries

SERVER = """
import io, json, sys, traceback
from retrain_rewards.sources import reasoning_gym_library as entries

asked, answers = sys.stdin, sys.stdout
for line in asked:
    sys.stdin, sys.stdout = io.StringIO(line), io.StringIO()
    code, told = 0, ""
    try:
        entries.main()
    except Exception:
        code, told = 1, traceback.format_exc()
    answers.write(json.dumps([code, sys.stdout.getvalue(), told]) + "\\n")
    answers.flush()
"""


@contextmanager
def kept_alive() -> Iterator[pytest.MonkeyPatch]:
    """For the duration of the block, `make_entries` asks one process."""
    environ = {**os.environ, "PYTHONHASHSEED": entries.HASH_SEED, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-P", "-c", SERVER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, encoding="utf-8", stderr=subprocess.DEVNULL
    )

    def run(command: list[str], *, input: str, **_: Any) -> subprocess.CompletedProcess[str]:  # noqa: A002
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(input + "\n")
        process.stdin.flush()
        code, out, told = json.loads(process.stdout.readline())
        return subprocess.CompletedProcess(command, code, out, told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "subprocess", SimpleNamespace(run=run))
        yield patch
    process.kill()
    process.communicate()
