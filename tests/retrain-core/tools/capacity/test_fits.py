"""Whether a model fits: here, or a GPU that is not; and the key to change, as little as possible, if not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.memory import MemoryEstimate, Workload
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.tools.capacity import command as command_module
from retrain.tools.capacity import shapes, workload
from retrain.tools.capacity.advice import KEYS, MICRO, NO_KEY, advise
from retrain.tools.capacity.shapes import KnownShape, known_document, known_shapes, nearest
from retrain.tools.capacity.workload import SAFETY
from retrain_local.memory.estimate import estimate
from retrain_local.memory.shape import ModelShape, shape_of
from tests.kit.invoke import invoke

GIB = 2**30
QWEN_8B = ("--model", "Qwen/Qwen3-8B")
FLAGS = ("--layers", "36", "--hidden", "4096", "--inner", "12288", "--heads", "32", "--kv-heads", "8")
SIZES = (*FLAGS, "--head-size", "128", "--vocabulary", "151936", "--context", "40960")


@pytest.fixture
def ask(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`ask("--gpu-memory", "24", ...)` in an empty folder, on a machine without a GPU and without the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workload, "gpu_memory_bytes", lambda: ())

    def unreachable(name: str, *, where: str) -> dict[str, Any]:
        raise ConfigError(f"{name} is nowhere")

    monkeypatch.setattr(shapes, "hub_options", unreachable)

    def call(*arguments: str) -> str:
        result = invoke(command_module.command, list(arguments), obj=plugins, standalone_mode=False)
        if result.exception:
            raise result.exception
        return result.stdout

    return call


@pytest.mark.parametrize("shape", known_shapes(), ids=lambda shape: shape.name)
def test_the_parameters_of_a_known_shape_are_those_that_its_authors_publish(shape: KnownShape) -> None:
    found = shape_of(shape.document, file=Path("config.json"), where="")
    assert found.parameters == pytest.approx(shape.parameters, rel=0.01)
    assert all(context <= 2**18 and re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name, context in shape.contexts.items())


def test_a_known_name_is_found_once_in_any_case_with_its_own_context() -> None:
    names = [name.lower() for shape in known_shapes() for name in shape.contexts]
    assert len(names) == len(set(names)) > 80
    for name, context in (("qwen/qwen3-4b", 40_960), ("Qwen/Qwen3-4B-Instruct-2507", 262_144)):
        document = known_document(name)
        assert document is not None
        assert document["max_position_embeddings"] == context
    assert known_document("Qwen/Qwen3-5B") is None
    found = {name: nearest(name) for name in ("Qwen3-8b", "qwen/Qwen3-8B-Bas", "zzz")}
    assert list(found.values()) == ["Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base", ""]


def test_the_verdict_says_what_was_asked_and_its_advice_makes_it_fit(ask: Callable[..., str]) -> None:
    pytest.importorskip("bitsandbytes")  # without it a configuration with nf4 is refused
    text = ask("--gpu-memory", "24", *QWEN_8B)
    first = text.splitlines()[0]
    assert first.startswith("Qwen/Qwen3-8B on one GPU of 24.0 GiB (22.8 GiB of them used): does not fit: set ")
    for part in ("LoRA of rank 32", "8 x 16 completions of up to 10,240 tokens", "highest rank", "Computed from sizes"):
        assert part in text
    assert "--pilot 3" not in text  # which measures this machine
    for card in (12, 16, 24):  # a second key, or 4 bits, where one is not enough
        data = json.loads(ask("--gpu-memory", str(card), *QWEN_8B, "--json"))
        assert data["gpu_memory_bytes"] == card * GIB
        assert (data["fits"], "quantize" in data["fix"]) == (False, card < 24)  # at 24 GiB more than half is kept
        advice = data["fix"].partition(", or ")[0].replace('"', "")
        changed = [f"--set={t}.{key}={value}" for t, key, value in re.findall(r"\[([\w.]+)\] (\w+) = (\S+)", advice)]
        assert changed, advice
        fitting = json.loads(ask("--gpu-memory", str(card), *QWEN_8B, "--json", *changed))
        assert fitting["fits"], (card, advice)
        assert fitting["needed_memory_bytes"] <= SAFETY["cuda"] * card * GIB


def test_every_option_is_as_large_as_fits(ask: Callable[..., str]) -> None:
    pytest.importorskip("bitsandbytes")  # without it a configuration with nf4 is refused
    asked = ("--gpu-memory", "24", *QWEN_8B, "--json")
    options = {option["quantize"]: option for option in json.loads(ask(*asked))["options"]}
    assert list(options) == ["none", "int8", "nf4"]
    assert options["none"]["max_tokens"] < options["int8"]["max_tokens"] < options["nf4"]["max_tokens"]
    for kind, option in options.items():
        for more, fits in ((0, True), (1, False)):
            given = ("--set", f"model.quantize={kind}", "--max-tokens", str(option["max_tokens"] + more))
            assert json.loads(ask(*asked, *given))["fits"] is fits, (kind, more)
        for rank, fits in ((option["lora_rank"], True), (2 * option["lora_rank"], False)):
            given = ("--set", f"model.quantize={kind}", "--lora-rank", str(rank))
            assert not rank or json.loads(ask(*asked, *given))["fits"] is fits, (kind, rank)


def test_sizes_on_the_command_line_stand_for_the_file(ask: Callable[..., str]) -> None:
    by_name, by_size = (json.loads(ask("--gpu-memory", "24", "--json", *given)) for given in (QWEN_8B, SIZES))
    assert by_size == by_name
    assert "the model on one GPU of 24.0 GiB" in ask("--gpu-memory", "24", *SIZES)
    tied = json.loads(ask("--gpu-memory", "24", "--json", *SIZES, "--tied"))
    assert tied["parameters"] == by_size["parameters"] - 151936 * 4096
    assert json.loads(ask("--json", *SIZES, "--devices", "cpu"))["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "code", "fix"),
    [
        (("--layers", "36"), "capacity.size-missing", "--hidden, --heads, --vocabulary"),
        (("--model", "Qwen3-8B"), "model.folder-missing", "'Qwen/Qwen3-8B'"),
        (("--pilot", "2", *QWEN_8B), "capacity.two-machines", ""),
        # The hub is not reached in this test; its problem gets the sizes to give.
        (("--model", "Qwen/Qwen3-9B"), "", "--layers, --hidden, --heads, --vocabulary; the nearest"),
        (("--model", "Qwen/Qwen3-9B"), "", "Qwen/Qwen3-8B"),
    ],
)
def test_a_question_that_cannot_be_answered_says_what_to_give(
    arguments: tuple[str, ...], code: str, fix: str, ask: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ask("--gpu-memory", "24", *arguments)
    (problem,) = caught.value.problems
    assert (problem.code, fix in problem.fix) == (code, True)


def test_all_weights_two_gpus_a_server_and_a_teacher(ask: Callable[..., str]) -> None:
    whole = json.loads(ask("--gpu-memory", "80", *QWEN_8B, "--json", "--lora-rank", "0"))
    assert whole["fix"] == "set [model] lora_rank = 32: an adapter, not all weights"
    assert [option["quantize"] for option in whole["options"]] == ["none"]  # they cannot be trained in 8 bits
    assert "each GPU of 24.0 GiB" in ask("--gpu-memory", "24", *QWEN_8B, "--devices", "gpu:0,gpu:1")
    teacher = ("--teacher-model", "Qwen/Qwen3-4B", "--advantage-mode", "distillation", "--transform-mode", "none")
    data = json.loads(ask("--gpu-memory", "48", *QWEN_8B, "--json", *teacher, "--temperature", "1"))
    assert data["resident"]["training"]["teacher"] == pytest.approx(2 * 4.02e9, rel=0.01)
    gemma = json.loads(ask("--gpu-memory", "16", "--model", "google/gemma-2-9b-it", "--json"))
    assert [option["quantize"] for option in gemma["options"]] == ["none"]  # transformers' own modules


def test_where_no_key_is_enough_the_largest_model_of_the_maker_that_fits_is_named(ask: Callable[..., str]) -> None:
    first = ask("--gpu-memory", "24", "--model", "google/gemma-3-12b-it").splitlines()[0]
    (named,) = re.findall(r"use a smaller \[model\] model \((\S+) fits\), or a device", first)
    assert json.loads(ask("--gpu-memory", "24", "--model", named, "--json"))["fits"]
    larger = [shape.name for shape in known_shapes() if shape.name.startswith("google/") and shape.name != named]
    own = next(shape.parameters for shape in known_shapes() if shape.name == named)
    between = [
        shape.name for shape in known_shapes() if shape.name in larger and own < shape.parameters < 11_771_000_000
    ]
    for name in between:
        assert not json.loads(ask("--gpu-memory", "24", "--model", name, "--json"))["fits"]
    assert " fits)" not in ask("--gpu-memory", "0.2", "--model", "google/gemma-3-12b-it")
    # Nothing is allotted to a cache where the weights leave no room.
    data = json.loads(ask("--gpu-memory", "12", *QWEN_8B, "--json"))
    assert data["completions_at_a_time"] == 1
    assert data["phases"]["sampling"]["kv_cache"] < 2 * GIB


def test_the_page_shows_what_the_command_prints(ask: Callable[..., str]) -> None:
    page = (Path(__file__).parents[4] / "docs/pages/your-model.md").read_text(encoding="utf-8")
    assert ask("--gpu-memory", "24", *QWEN_8B).partition("\n\nCompletions")[0] in page
    rows = json.loads(ask("--known-models", "--max-tokens", "4096", "--gpu-memory", "24", "--json"))
    assert {row["model"]: row["parameters"] for row in rows}["Qwen/Qwen3-0.6B"] == "0.60 B"
    assert set(rows[0]) == {"model", "parameters", "24 GiB"}


STEP = {"batch_size": 64, "group_size": 16, "max_tokens": 512, "prompt_tokens": 100, "lora_rank": 32}
WORK = Workload(device="cpu", micro_batch_tokens=10**6, **STEP)
DIMENSIONS = {"layers": 12, "hidden": 768, "inner": 3072, "heads": 12, "kv_heads": 12, "head_size": 64}
DIMENSIONS["vocabulary"] = 50_000
PARTS = {"is_tied": True, "has_gate": True, "experts": 0, "active_experts": 1}
SHAPE = ModelShape(**DIMENSIONS, **PARTS, parameters=160_000_000, is_counted=True, context=None)
FIELDS = {label: name for name, label in (MICRO, *KEYS)}


def estimated(work: Workload) -> MemoryEstimate:
    return estimate(SHAPE, work)


def test_micro_batches_come_first_because_they_change_nothing_and_no_key_may_be_enough() -> None:
    assert advise(WORK, 10**15, estimated) == ""
    assert advise(WORK, 16 * GIB, estimated).startswith("set [backend.options] micro_batch_tokens = ")
    assert advise(WORK, GIB, estimated) == NO_KEY
    one_row = WORK.prompt_tokens + WORK.max_tokens
    tight = (advise(WORK, limit * GIB // 8, estimated) for limit in range(8, 80, 3))  # one key is not enough
    assert any(f" and [backend.options] micro_batch_tokens = {one_row}" in each for each in tight)


@settings(max_examples=25)
@given(st.integers(2 * GIB, 80 * GIB), st.integers(100, 10**6))
def test_the_advice_fits_and_one_more_would_not(limit: int, micro: int) -> None:
    work = replace(WORK, micro_batch_tokens=micro)
    text = advise(work, limit, estimated)
    changes = {FIELDS[label]: int(value) for label, value in re.findall(r"(\[[^]]+\] \w+) = (\d+)", text)}
    if not changes:
        assert text in ("", NO_KEY)
        return
    assert all(value >= 1 for value in changes.values())
    assert next(iter(changes)) != "lora_rank" or changes["lora_rank"] < work.lora_rank
    for name, value in changes.items():
        work = work.with_size(name, value)
    assert estimated(work).needed_bytes <= SAFETY["cpu"] * limit
