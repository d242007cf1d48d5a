"""A teacher on the server that samples is refused, however its address is written."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from retrain.engines.table import teacher_problems
from retrain.kernel.config.load import TableEntry, load_config


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--teacher-engine vllm --inference-engine vllm", "teacher-engine"),
        ("--teacher-engine vllm --inference-engine openai --inference-url http://LOCALHOST:8000/v1/", "teacher-engine"),
        ("--teacher-engine vllm --inference-engine max --inference-url http://0.0.0.0:8000", "teacher-engine"),
        ("--teacher-engine sglang --teacher-url http://[::1]:8000 --inference-engine vllm", "teacher-url"),
        (
            "--teacher-engine vllm --teacher-url https://u:secret@a/v1,http://b:7 --inference-engine sglang"
            " --inference-url https://c --inference-admin-url https://A:443",
            "teacher-url",
        ),
    ],
)
def test_the_same_server_is_refused(flags: str, key: str, tables: Mapping[str, TableEntry]) -> None:
    config, problems = load_config(None, tables=tables, arguments=flags.split())
    assert problems == []
    (problem,) = teacher_problems(config)
    assert f"--{key}" in problem.where
    assert "is the one that samples" in problem.what
    assert "secret" not in problem.what


@pytest.mark.parametrize(
    "flags",
    [
        "--inference-engine vllm",
        "--teacher-engine vllm",
        "--teacher-model builtin:tiny --inference-engine vllm",
        "--teacher-engine sglang --inference-engine vllm",
        "--teacher-engine vllm --teacher-url http://127.0.0.1:8001 --inference-engine vllm",
        "--teacher-engine vllm --teacher-url http://a/one --inference-engine vllm --inference-url http://a/two",
    ],
)
def test_another_server_is_not(flags: str, tables: Mapping[str, TableEntry]) -> None:
    config, _ = load_config(None, tables=tables, arguments=flags.split())
    assert teacher_problems(config) == []
