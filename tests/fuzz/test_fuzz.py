"""Foreign input that is damaged: 10,000 mutations of each kind end in a value or a named error, within time and memory.

`long`, because of their number: `nox -s fuzz` runs them and prints processor seconds and memory of each target.
"""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from retrain.kernel.config.toml_file import parse_toml
from retrain.kernel.errors import ConfigError
from retrain.records.reading import last_record, read_steps
from retrain.records.record_names import CAMPAIGN_FILE, RUN_FILE
from retrain.records.runs.campaign_status import read_campaign
from retrain.records.runs.run_status import status_of_run
from retrain.report.watch_server import Tail
from retrain.text.tool_calls import parse_tool_calls
from retrain.use.serving.objects import parse_response
from retrain.use.serving.parse import RequestError, parse
from retrain_local.export.merged import read_adapter_file
from retrain_rewards.verifiers.code.compare import matches, read_reply
from tests.kit import made_runs

pytestmark = pytest.mark.long
INPUTS = 10_000
MOST_CPU_S = 2.0  # of one input: more is a hang; processor time, so that a busy machine does not matter
MOST_GROWTH_BYTES = 2 << 20
PIECES = (
    *(b"null", b"[]", b"{}", b"-1", b"1e999", b"NaN", b"true", b'""', b'"\\ud800"', b"9" * 5000, b"[" * 3000),
    *(b"\x00", b"\xff", b"\x1b[2J", b"\xe2\x80\xae", b"\n", b"\r\n", b'"', b"\\", b'{"step": 0}', b"<tool_call>"),
)
Try = Callable[[bytes], object]
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": None, "tool_calls": []}],
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "max_tokens": 4,
    "temperature": 0.5,
    "stop": ["a"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
}
COMPLETION = {"model": "m", "prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 0, "stop": "a"}
RESPONSE = {
    "model": "m",
    "instructions": "be brief",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "2+2"}]}],
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    "max_output_tokens": 4,
}
CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": [2]}}</tool_call> and <tool_call>{"name": "x"}</tool_call>'
)
TOML = '[training]\nseed = 1\nlr = 3e-3\n[[campaign.conditions]]\na = "grpo"\nx = """a\nb"""\nt = 1979-05-27\n'
REPLY = '{"a": [1, 2.5, "x", null, true], "b": {"c": [[[]]]}, "type": "int", "value": "12"}'


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, cuts, repetitions, exchanged parts, and pieces that parsers stumble over."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        start, end = sorted(rng.randint(0, len(data)) for _ in range(2))
        end = min(end, start + rng.choice((1, 4, 16, 4096)))
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[start:end]
        elif kind == 2:
            data[start:start] = data[start:end] * rng.choice((1, 2, 50))
        elif kind == 3:
            data[start:end] = rng.choice(PIECES)
        else:
            data[start:start] = rng.choice(PIECES)
    return bytes(data)


def bodies(read: Callable[[Any], object]) -> Try:
    """`read` of a body that is JSON, as the handler calls it."""

    def attempt(data: bytes) -> None:
        with suppress(ValueError, RecursionError):  # the handler answers 400
            content = json.loads(data, parse_constant=lambda _: None)
            with suppress(RequestError):
                read(content)

    return attempt


def of_file(file: Path, *reads: Callable[[], object]) -> Try:
    """Each of `reads` with the data in `file`."""

    def attempt(data: bytes) -> None:
        file.write_bytes(data)
        for read in reads:
            with suppress(ConfigError):
                read()

    return attempt


def toml(data: bytes) -> None:
    with suppress(ConfigError, UnicodeDecodeError):  # read_toml reports both
        parse_toml(data.decode("utf-8"), "x.toml")


def reply(data: bytes) -> None:
    with suppress(ValueError, RecursionError):
        matches(read_reply(data.decode("utf-8", errors="replace"), 100), {"a": [1, 2.5, "x", None, True]})


def targets(tmp: Path) -> dict[str, tuple[bytes, Try]]:
    """Seed and reader of each kind of foreign input."""
    campaign = made_runs.write_campaign(tmp / "c", {"a+none": 0.0}, seeds=[1], steps=3)
    (run,) = (campaign / "runs").iterdir()
    mark, manifest, metrics = run / RUN_FILE, campaign / CAMPAIGN_FILE, run / "metrics.jsonl"
    found = {
        "run": (mark, (lambda: status_of_run(run).as_data(),)),
        "campaign": (manifest, (lambda: read_campaign(campaign),)),
        "metrics": (
            metrics,
            (lambda: list(read_steps(metrics)), lambda: last_record(metrics), lambda: Tail(metrics).since(0, 0)),
        ),
    }
    adapter = tmp / "adapter"
    adapter.mkdir()
    weights, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file({name.format("A"): torch.ones(2, 4), name.format("B"): torch.ones(4, 2)}, weights)
    chosen = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    settings.write_text(json.dumps(chosen))
    assert read_adapter_file(adapter)
    found |= {
        "adapter weights": (weights, (lambda: read_adapter_file(adapter),)),
        "adapter settings": (settings, (lambda: read_adapter_file(adapter),)),
    }
    files = {name: (file.read_bytes(), of_file(file, *reads)) for name, (file, reads) in found.items()}
    return files | {
        "chat": (json.dumps(CHAT).encode(), bodies(lambda body: parse(body, is_chat=True))),
        "completion": (json.dumps(COMPLETION).encode(), bodies(lambda body: parse(body, is_chat=False))),
        "response": (json.dumps(RESPONSE).encode(), bodies(parse_response)),
        "toml": (TOML.encode(), toml),
        "tool calls": (CALLS.encode(), lambda data: parse_tool_calls(data.decode("utf-8", errors="replace"))),
        "reply": (REPLY.encode(), reply),
    }


FILES = ("adapter weights", "adapter settings", "run", "campaign", "metrics")
NAMES = (*FILES, "chat", "completion", "response", "toml", "tool calls", "reply")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMES)
def test_damaged_input_ends_in_a_value_or_a_named_error(name: str, tmp_path: Path) -> None:
    seed, attempt = targets(tmp_path)[name]
    rng = random.Random(f"fuzz {name}")
    began, settled = time.process_time(), 0
    tracemalloc.start()
    for count in range(INPUTS):
        data, before = mutated(seed, rng), time.process_time()
        try:
            attempt(data)
        except Exception as error:
            pytest.fail(f"{name} {count}: {type(error).__name__}: {error} of {data[:400]!r}")
        assert time.process_time() - before < MOST_CPU_S, data[:400]
        if count == INPUTS // 5:  # caches are filled by then
            settled = tracemalloc.get_traced_memory()[0]
    growth = tracemalloc.get_traced_memory()[0] - settled
    tracemalloc.stop()
    print(f"{name}: {INPUTS:,} inputs, {time.process_time() - began:.1f} processor s, {growth / 1024:+.0f} KiB")
    assert growth < MOST_GROWTH_BYTES
