"""Memory: the terms of the estimate by hand, formulas against the backend's, and more work never needs less."""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, ConfigError, MemoryEstimate, MemoryPhase, Problem, Workload
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.tables import registered_tables
from retrain.tools.capacity.advice import advise
from retrain.tools.capacity.workload import SAFETY
from retrain_local.decoder import Shape
from retrain_local.devices import torch_devices
from retrain_local.memory import sizes
from retrain_local.memory.estimate import (
    activation_elements,
    bytes_per_token,
    estimate,
    pack_tokens,
    packs_at_a_time,
)
from retrain_local.memory.limits import MemoryLimits, free_bytes, free_host_bytes, is_out_of_memory
from retrain_local.memory.shape import ModelShape, count_parameters, read_shape, shape_of
from retrain_local.memory.sizes import (
    FULL_SPEED_TOKENS_CPU,
    PROMPTS_PER_PACK,
    TOKEN_BUDGET,
    PackPlan,
    plan_cpu_packs,
)
from retrain_local.model.architecture import FAMILIES
from retrain_local.planning import other_models
from retrain_local.sampling import cache as pool
from retrain_local.training import budget
from tests.kit.causal_types import small_config
from tests.kit.model_configs import QWEN3_4B, SMALL
from tests.kit.problems import codes_in


def shape_in(folder: Path, document: dict[str, Any]) -> ModelShape:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    return read_shape(folder, where="")


@pytest.fixture
def small(tmp_path: Path) -> ModelShape:
    return shape_in(tmp_path / "model", SMALL)


@pytest.fixture
def qwen(tmp_path: Path) -> ModelShape:
    return shape_in(tmp_path / "model", QWEN3_4B)


WORK = Workload(
    device="cpu", batch_size=2, group_size=4, max_tokens=16, prompt_tokens=20, lora_rank=4, micro_batch_tokens=2048
)
SIZES = {"layers": 2, "hidden": 8, "inner": 16, "heads": 2, "kv_heads": 1, "head_size": 4, "vocabulary": 10}
FACTS = {"is_tied": False, "has_gate": True, "experts": 0, "active_experts": 1, "parameters": 1352, "is_counted": True}
SHAPE = ModelShape(**SIZES, **FACTS, context=None)
PER_BLOCK = 16 * 2 * 2 * 1 * 4 * 4  # tokens x keys and values x layers x heads x head size x fp32
QWEN_STEP = Workload(device="cuda", batch_size=8, group_size=16, max_tokens=10240, prompt_tokens=256, lora_rank=32)
GIB = 2**30


def phase(found: MemoryEstimate, name: str) -> MemoryPhase:
    (wanted,) = (each for each in found.phases if each.name == name)
    return wanted


def resident(shape: ModelShape = SHAPE, work: Workload = WORK, **more: Any) -> Mapping[str, int]:
    """The parts that are there in both phases."""
    return estimate(shape, work, **more).phases[0].resident


def test_what_is_always_there_by_hand() -> None:
    found = estimate(SHAPE, WORK, runtime_bytes=1000)
    lora = 4 * 2 * (16 + 24 + 16 + 72) * 4  # rank x layers x (in + out), fp32
    assert dict(found.phases[0].resident) == {
        "runtime": 1000,
        "weights": 1352 * 4,
        "sampler": SHAPE.adapted_elements * 4,
        "adapter": lora,
        "optimizer": 2 * lora,
        "host": 8 * 16 * sizes.HOST_TOKEN_BYTES,
    }
    assert found.phases[0].resident == found.phases[1].resident
    sampling, training = estimate(replace(SHAPE, parameters=sizes.ONE_THREAD_BELOW), WORK).phases
    assert training.resident == {**sampling.resident, "kv_cache": sampling.parts["kv_cache"]}
    hosted = resident(replace(SHAPE, is_native=False))["runtime"]
    assert hosted == sizes.RUNTIME_BYTES["cpu"] + sizes.HOSTED_BYTES["cpu"]
    assert found.peak_bytes == max(sum(each.resident.values()) + sum(each.parts.values()) for each in found.phases)


def test_all_weights_trained_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, both moments and the sampler's copy; of two packs at a time the gradients, their sum and the heads'."""
    found = estimate(SHAPE, replace(WORK, lora_rank=0, micro_batch_tokens=40), runtime_bytes=0)
    training = phase(found, "training")
    weights = SHAPE.parameters * 4
    assert training.resident == {
        "runtime": 0,
        "weights": weights,
        "adapter": 0,
        "optimizer": 2 * weights,
        "host": 8 * 16 * sizes.HOST_TOKEN_BYTES,
        "sampler": weights,
    }
    at_a_time = packs_at_a_time(SHAPE, WORK)
    assert training.parts["gradients"] == (at_a_time + 1) * weights + at_a_time * 2 * 10 * 8 * 4
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    halves = replace(WORK, lora_rank=0, micro_batch_tokens=20 + 4 * 15)  # a group each
    alone = phase(estimate(SHAPE, halves, runtime_bytes=0), "training").parts["gradients"]
    assert alone == 2 * weights + 2 * 2 * 10 * 8 * 4  # the first is what the second is added to


def test_a_teacher_and_the_reference_are_there_beside_the_model(small: ModelShape, tmp_path: Path) -> None:
    file, tables, own = tmp_path / "retrain.toml", registered_tables(load_plugins()), str(tmp_path / "model")
    file.touch()

    def model_folder(name: str) -> Path:
        if (located := load_plugins().locate_model(name)) is None:
            raise ConfigError(Problem(where="", what="", fix=""))
        return Path(located)

    def others(*flags: str) -> dict[str, ModelShape]:
        config, problems = load_config(file, tables=tables, arguments=["--model", own, *flags], environ={})
        assert not problems
        return other_models(config, small, model_folder)

    assert others() == {}
    assert others("--teacher-adapter", "logs/a") == others("--teacher-model", own) == {"teacher": small}
    tiny = read_shape(Path(str(load_plugins().locate_model("builtin:tiny"))), where="")
    assert others("--teacher-model", "builtin:tiny") == {"teacher": tiny}
    assert others("--teacher-model", "who/knows") == {}
    assert others("--teacher-model", own, "--teacher-engine", "vllm") == {}
    assert others("--kl-coef", "0.1") == {}  # the model without its adapter
    assert others("--kl-coef", "0.1", "--lora-rank", "0") == {"reference": small}
    assert resident(others={"teacher": SHAPE})["teacher"] == 1352 * 4
    quantised = resident(work=replace(WORK, quantize="nf4"), others={"teacher": SHAPE})
    assert quantised["teacher"] == quantised["weights"] < 1352 * 4


def test_matrices_of_fewer_bits_by_hand() -> None:
    adapted, merged = SHAPE.adapted_elements, SHAPE.sampler_adapter_elements(4) * 4
    for kind, bytes_of in (("nf4", 0.5625), ("int8", 1.0)):
        found = resident(work=replace(WORK, quantize=kind))
        assert found["weights"] == (SHAPE.parameters - adapted) * 4 + bytes_of * adapted
        assert found["sampler"] == adapted * 4 + merged
    found = resident(work=replace(WORK, dtype="bf16"))  # a sampler of fewer bits has separate matrices
    assert (found["sampler"], found["weights"]) == (adapted * 2 + merged, resident()["weights"])
    for kind, vector in (("auto", 16), ("bf16", 8), ("int8", 4 + 4), ("fp8", 4 + 4)):
        assert bytes_per_token(SHAPE, replace(WORK, kv_cache_dtype=kind)) == 2 * 2 * vector


def test_a_large_head_is_held_once_more_in_the_layout_of_its_product() -> None:
    large = replace(SHAPE, vocabulary=sizes.PREPACK_FROM // SHAPE.hidden)
    hosted = replace(large, is_native=False)
    assert resident(hosted, replace(WORK, lora_rank=0))["sampler"] == 4 * hosted.parameters
    for shape, work, head in (
        (large, WORK, 4 * sizes.PREPACK_FROM),
        (replace(large, vocabulary=large.vocabulary - 1), WORK, 0),
        (hosted, WORK, 4 * sizes.PREPACK_FROM),
        (large, replace(WORK, is_served=True), None),
    ):
        assert resident(shape, work).get("sampler") == (None if head is None else SHAPE.adapted_elements * 4 + head)
    (training,) = estimate(SHAPE, replace(WORK, is_served=True)).phases
    assert training.name == "training", "a server samples"


def test_training_by_hand() -> None:
    parts = phase(estimate(SHAPE, WORK), "training").parts
    tokens = 2 * (20 + 4 * 15)  # a prompt once for its group, and no completion's last token
    layer = 4 * 8 + 4 * 8 + 2 * 4 + 2 * 16
    assert parts["activations"] == int(tokens * (3 * layer + 4 * 8) * 4 * sizes.HEAP_WASTE)
    assert parts["logits"] == 8 * 16 * 10 * sizes.LOGIT_BYTES[4]
    assert parts["gradients"] == SHAPE.lora_parameters(4) * 4
    assert parts["scratch"] == sizes.SCRATCH_BYTES
    tokens = [replace(WORK, micro_batch_tokens=number) for number in (1, 49, 50)]
    packs = [phase(estimate(SHAPE, work), "training").parts["activations"] for work in tokens]
    assert packs[0] == packs[1] < packs[2], "a row is never cut"


@pytest.mark.parametrize(("parameters", "at_a_time"), [(1352, 2), (10**7, 8)])
def test_packs_at_a_time_by_size_and_cores(parameters: int, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shape, cut = replace(SHAPE, parameters=parameters), replace(WORK, micro_batch_tokens=66, batch_size=16)
    parts = phase(estimate(shape, cut), "training").parts
    tokens = activation_elements(SHAPE, WORK, recompute=False) * 4 * sizes.HEAP_WASTE
    assert parts["activations"] == int(at_a_time * 65 * tokens)  # a prompt and three completions
    assert parts["gradients"] == at_a_time * SHAPE.lora_parameters(4) * 4
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert phase(estimate(shape, cut), "training").parts["activations"] == int(65 * tokens)
    large = replace(SHAPE, parameters=sizes.ONE_THREAD_BELOW)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    for asked, wanted in (("", 4), ("1", 1), ("3", 3), ("8", 4), ("0", 4), ("2,1", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert (packs_at_a_time(large, WORK), packs_at_a_time(SHAPE, WORK)) == (wanted, 2)


def test_the_pool_by_hand() -> None:
    found = estimate(SHAPE, WORK)
    parts = phase(found, "sampling").parts
    # a prompt of 20 tokens is two blocks, of which the whole one is shared by the 3 blocks of each completion
    assert parts["kv_cache"] == (2 * 2 + 8 * (3 - 1)) * PER_BLOCK
    assert parts["kv_copy"] == int(8 * 3 * PER_BLOCK * sizes.COPY_WASTE)
    assert found.at_once == 8
    apart = phase(estimate(SHAPE, replace(WORK, is_sharing=False)), "sampling").parts
    assert apart["kv_cache"] == 8 * 3 * PER_BLOCK


@pytest.mark.parametrize(("blocks", "at_once"), [(1, 1), (4, 1), (6, 2), (8, 2), (9, 3), (12, 4), (100, 8)])
def test_what_does_not_fit_the_pool_waits(blocks: int, at_once: int) -> None:
    found = estimate(SHAPE, replace(WORK, cache_bytes=2 * blocks * PER_BLOCK))  # half of it is the copy that is read
    assert found.at_once == at_once
    assert phase(found, "sampling").parts["kv_cache"] <= max(blocks, 4) * PER_BLOCK


def test_the_formulas_are_those_of_the_backend() -> None:
    assert packs_at_a_time(SHAPE, WORK) == torch_devices.pack_workers(SHAPE.parameters, torch.device("cpu"))
    assert frozenset(FAMILIES) == sizes.NATIVE

    names = ("layers", "heads", "kv_heads", "head_size", "hidden", "inner", "vocabulary", "context", "parameters")
    shape = Shape(value_size=SHAPE.head_size, **{name: getattr(SHAPE, name) for name in names})
    rows = sizes.Rows(repeats=4 * 35 / (20 + 4 * 15))  # each of 4 completions has the prompt of 20 tokens
    for recompute, device in itertools.product((False, True), ("cpu", "cuda")):
        given = replace(shape, is_fused=device == "cuda"), torch.float32
        planned = budget.activation_bytes(*given, recompute=recompute, device=device, rows=rows)
        assert planned == 4 * activation_elements(SHAPE, replace(WORK, device=device), recompute=recompute)
    for kind in ("auto", "bf16", "int8", "fp8"):
        stored = pool.bytes_per_token(shape, kind, torch.float32)
        assert stored == bytes_per_token(SHAPE, replace(WORK, kv_cache_dtype=kind))


def test_a_16_gb_card_trains_qwen3_4b_with_completions_of_10240_tokens(qwen: ModelShape) -> None:
    limit = 16 * GIB
    found = estimate(qwen, QWEN_STEP, device_bytes=limit)
    assert found.needed_bytes <= SAFETY["cuda"] * limit
    assert found.peak_bytes <= limit
    assert 1 < found.at_once < 128
    assert found.pack_tokens >= 256 + 10240  # with every layer computed again
    always = found.phases[0].resident
    assert always["weights"] == qwen.parameters * 2
    assert always["sampler"] < always["adapter"]  # too large to merge: A and B in bf16
    assert "host" not in always
    assert advise(QWEN_STEP, limit, lambda changed: estimate(qwen, changed, device_bytes=limit)) == ""
    eight = estimate(qwen, replace(QWEN_STEP, kv_cache_dtype="int8"), device_bytes=limit)
    assert 1.8 * found.at_once <= eight.at_once
    smaller = 12 * GIB
    text = advise(QWEN_STEP, smaller, lambda changed: estimate(qwen, changed, device_bytes=smaller))
    assert text.startswith("set [training] max_tokens = ")


def test_activations_are_kept_only_where_enough_of_them_fit(qwen: ModelShape) -> None:
    def pack(gib: int, asked: str = "auto") -> int:
        work = replace(QWEN_STEP, gradient_checkpointing=asked)
        return estimate(qwen, work, device_bytes=gib * GIB).pack_tokens

    assert pack(80) >= sizes.FULL_SPEED_TOKENS
    assert pack(80, "on") == sizes.TOKEN_BUDGET["cuda"] > pack(80)
    assert pack(24) == pack(24, "off") >= sizes.FULL_SPEED_TOKENS
    assert pack(16) == pack(16, "on") > pack(16, "off")
    assert pack(16, "off") < sizes.FULL_SPEED_TOKENS
    for max_tokens, recompute in ((1024, False), (10_240, True)):  # a row that does not fit is computed again
        work = replace(QWEN_STEP, max_tokens=max_tokens)
        room = 5000 * 2 * activation_elements(qwen, work, recompute=False) / sizes.ACTIVATION_SHARE_GPU
        tokens, again = pack_tokens(qwen, work, int(room))
        assert 4990 <= tokens <= 5000
        assert again is recompute


def test_the_pool_of_a_large_gpu_is_what_a_step_needs(qwen: ModelShape) -> None:
    work = replace(QWEN_STEP, max_tokens=1024)
    found = phase(estimate(qwen, work, device_bytes=80 * GIB), "sampling")
    assert found.at_once == 128
    assert found.parts["kv_cache"] == (128 * (256 + 1024) + 8 * 16) * bytes_per_token(qwen, work)


def test_two_devices_hold_one_phase_each(qwen: ModelShape) -> None:
    one = estimate(qwen, QWEN_STEP, device_bytes=24 * GIB)
    work = replace(QWEN_STEP, samplers=1)
    two = estimate(qwen, work, device_bytes=24 * GIB)
    sampler, trainer = phase(two, "sampling").resident, phase(two, "training").resident
    assert "optimizer" not in sampler
    assert "sampler" not in trainer
    assert sampler["sampler"] > qwen.parameters * 2  # frozen weights of its own
    assert two.at_once >= one.at_once
    three = estimate(qwen, replace(work, samplers=2), device_bytes=24 * GIB)
    assert three.at_once == 2 * two.at_once


def test_in_split_mode_on_a_cpu_both_phases_are_there_at_once() -> None:
    one, split = (estimate(SHAPE, work, runtime_bytes=0) for work in (WORK, replace(WORK, samplers=1)))
    (both,) = split.phases
    for each in one.phases:
        for name, size in each.parts.items():
            assert both.parts.get(name, 0) >= size or name == "heap_kept"
    assert both.resident["sampler"] > one.phases[0].resident["sampler"]
    assert split.peak_bytes > one.peak_bytes


def test_no_tensor_grows_with_vocabulary_times_length(qwen: ModelShape) -> None:
    work = replace(WORK, max_tokens=20000, micro_batch_tokens=2**15)
    wide = replace(qwen, vocabulary=4 * qwen.vocabulary)
    one, four = (phase(estimate(shape, work), "training").parts for shape in (qwen, wide))
    assert one["logits"] == pytest.approx(four["logits"], rel=0.1)
    assert one["activations"] == four["activations"]
    assert str(estimate(qwen, work).biggest).startswith("activations of a layer [")
    assert str(phase(estimate(wide, WORK), "training").biggest).startswith("embedding [607744, 2560]")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["batch_size", "group_size", "max_tokens", "prompt_tokens", "lora_rank"]),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_more_work_never_needs_less(name: str, one: int, other: int) -> None:
    few, many = (estimate(SHAPE, WORK.with_size(name, value)) for value in sorted((one, other)))
    assert few.peak_bytes <= many.peak_bytes * 1.35  # padding of micro-batches, and pages, are not smooth
    assert sum(few.phases[0].resident.values()) <= sum(many.phases[0].resident.values())


TINY = Path(__file__).parents[3] / "retrain-local/src/retrain_local/tiny"
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
BARE = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 10}


def write_header(file: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_small_model_counted_by_hand_and_a_model_of_4b_as_published(small: ModelShape, qwen: ModelShape) -> None:
    # q 8x8, k and v 8x4, o 8x8, gate, up, down 8x16: per block 64 + 32 + 32 + 64 + 3 * 128 = 576
    assert small.adapted_elements == 2 * 576
    # two embeddings of 10 x 8, five norms of 8
    assert small.parameters == 2 * 80 + 2 * 576 + 40
    # rank 3: 3 * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 16)) per block
    assert small.lora_parameters(3) == 2 * 3 * (16 + 24 + 16 + 72)
    assert not small.is_counted
    assert qwen.lora_parameters(32) == 66_060_288
    assert qwen.parameters == pytest.approx(4_022_468_096, rel=1e-4)


def test_the_built_in_model_is_counted_in_its_file_and_the_formula_agrees() -> None:
    shape = read_shape(TINY, where="")
    assert shape.is_counted
    document = json.loads((TINY / "config.json").read_text())
    by_formula = shape_of(document, file=TINY, where="")
    assert by_formula.parameters == pytest.approx(shape.parameters, rel=1e-3)
    assert shape.lora_parameters(16) == 116_736
    assert shape.context == 1024


def test_older_names_are_understood() -> None:
    shape = shape_of(GPT2, file=Path("config.json"), where="")
    assert (shape.layers, shape.inner, shape.kv_heads, shape.head_size) == (12, 3072, 12, 64)
    assert not shape.has_gate
    assert shape.adapted_elements == 12 * (4 * 768**2 + 2 * 768 * 3072)


def test_a_sampler_that_does_not_merge_has_one_product_for_layers_with_one_input(small: ModelShape) -> None:
    parts = ((8 + 16) * 3, 8 + 8, (8 + 2 * 16) * 2, 16 + 8)  # queries, keys and values; output; gate and up; down
    assert small.sampler_adapter_elements(4) == 4 * 2 * sum(parts)
    experts = shape_of({**BARE, "num_experts": 4, "num_experts_per_tok": 2}, file=Path("c"), where="")
    assert experts.sampler_adapter_elements(4) == experts.lora_parameters(4)
    assert (experts.active_experts, small.active_experts) == (2, 1)
    shape = shape_of({**BARE, "num_experts": 4, "moe_intermediate_size": 6}, file=Path("c"), where="")
    assert (shape.experts, shape.adapted_elements) == (4, 2 * (4 * 64 + 4 * 3 * 8 * 6)), "each expert is counted"
    dense, also = (shape_of({**BARE, **more}, file=Path("c"), where="") for more in ({}, {"num_local_experts": 0}))
    assert dense == also
    assert small.is_native
    assert not shape_of({**BARE, "model_type": "gemma2"}, file=Path("c"), where="").is_native


@pytest.mark.parametrize("kind", ["mamba", "bart", "gpt_neo", "dbrx", "xlm", "prophetnet", "gemma3n_text"])
def test_sizes_are_read_under_the_names_of_other_types(kind: str, tmp_path: Path) -> None:
    config = small_config(kind)
    config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path, where="")
    assert (shape.hidden, shape.vocabulary) == (config.hidden_size, config.vocab_size)
    assert shape.layers == getattr(config, "decoder_layers", config.num_hidden_layers)
    assert 0 < shape.heads <= shape.hidden


def test_a_text_part_that_names_only_some_sizes_has_the_defaults_of_its_type(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    shape = read_shape(tmp_path, where="")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_size) == (34, 8, 4, 256)
    assert shape.vocabulary == 262208


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((text, "bad-config-json") for text in ("", "[]", "[" * 100_000, '{"text_config": 3}', "\ud800", None)),
        ("{}", "unknown-sizes"),
        *((json.dumps({**BARE, "hidden_size": value}), "bad-size") for value in (-1, 0, "8", True, 10**30)),
        (json.dumps({**BARE, "num_attention_heads": 100}), "bad-size"),
    ],
)
def test_an_impossible_configuration_is_refused_by_file_and_key(text: str | None, code: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        read_shape(tmp_path, where="retrain.toml:2 [model] model")
    assert codes_in(caught) == [f"model.{code}"]
    assert all(named in str(caught.value) for named in ("config.json", "retrain.toml:2"))


def test_shards_are_added_up_and_damaged_ones_are_not_counted(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", {"__metadata__": {"format": "pt"}, "x": {"shape": [3, 4]}})
    write_header(tmp_path / "b.safetensors", {"y": {"shape": []}, "z": {"shape": [5]}})
    assert count_parameters(tmp_path) == 12 + 1 + 5
    write_header(tmp_path / "c.safetensors", {"y": {"shape": "3"}})
    assert count_parameters(tmp_path) is None
    for content in (b"", b"\x00" * 8, b"\xff" * 40, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 4) + b"null"):
        (tmp_path / "c.safetensors").write_bytes(content)
        assert count_parameters(tmp_path) is None


@settings(max_examples=40, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5))
def test_any_value_of_a_size_is_a_shape_or_an_error(value: Any) -> None:
    def attempt(make: Callable[[], ModelShape]) -> None:
        with suppress(ConfigError):
            assert make().parameters > 0

    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "num_experts"):
        attempt(lambda key=key: shape_of({**BARE, key: value}, file=Path("c"), where=""))  # type: ignore[misc]


SMOLLM2 = 1_524_096, 154_368  # bytes of a token in fp32: 30 layers of width 576 and 1,536, kept and recomputed


def plan(free: float, asked: str = "auto", sizes: tuple[int, int] = SMOLLM2, **more: int) -> PackPlan:
    given = {"at_a_time": 2, "prompt": 40, "context": 8192} | more
    return plan_cpu_packs(*sizes, free, checkpointing=asked, **given)


def test_a_model_of_135_million_parameters_keeps_its_activations_with_20_gb_free() -> None:
    found = plan(20 * GIB)
    assert not found.recompute
    assert FULL_SPEED_TOKENS_CPU <= found.tokens <= TOKEN_BUDGET["cpu"]
    assert 2 * found.tokens * SMOLLM2[0] <= 1.5 * GIB, "no more memory than two long rows need"
    assert found.kept_tokens == 2048 <= 0.5 * 20 * GIB / 2 / SMOLLM2[0], "a longer row is recomputed"
    assert plan(20 * GIB, context=2048).kept_tokens == 0, "no row is longer"
    assert found == plan(16 * GIB), "checkpoints seldom depend on how much memory is free"


def test_little_memory_means_recomputation_unless_the_user_decides_and_a_long_prompt_a_larger_pack() -> None:
    assert plan(2 * GIB).recompute
    assert not plan(2 * GIB, asked="off").recompute
    assert plan(20 * GIB, asked="on").recompute
    assert plan(20 * GIB, asked="off").kept_tokens == plan(2 * GIB).kept_tokens == 0
    assert plan(0.0) == plan(1.0) == PackPlan(tokens=1, recompute=True)
    assert plan(20 * GIB, prompt=300).tokens == PROMPTS_PER_PACK * 300
    assert plan(20 * GIB, prompt=4000).tokens == TOKEN_BUDGET["cpu"]
    assert plan(math.inf, prompt=4000).kept_tokens == 0


@settings(max_examples=40, deadline=None)
@given(
    free=st.floats(0, 2**50),
    kept=st.integers(1, 2**30),
    share=st.floats(0.01, 1.0),
    at_a_time=st.integers(1, 8),
    prompt=st.integers(0, 10**6),
    asked=st.sampled_from(["auto", "on", "off"]),
)
def test_plans_take_half_memory(free: float, kept: int, share: float, at_a_time: int, prompt: int, asked: str) -> None:
    sizes = kept, max(1, int(share * kept))
    found = plan(free, asked=asked, at_a_time=at_a_time, prompt=prompt, sizes=sizes)
    each = sizes[1] if found.recompute else sizes[0]
    assert found.tokens == 1 or at_a_time * found.tokens * each <= free / 2
    assert plan(2 * free, asked=asked, at_a_time=at_a_time, prompt=prompt, sizes=sizes).recompute <= found.recompute
    if found.kept_tokens:
        assert found.tokens <= found.kept_tokens


def test_only_allocators_run_out_of_memory() -> None:
    of_cpu, of_mps = (
        "[enforce fail] DefaultCPUAllocator: can't allocate memory",
        "MPS backend out of memory (MPS)",
    )
    for error in (torch.OutOfMemoryError("x"), RuntimeError(of_cpu), RuntimeError(of_mps)):
        assert is_out_of_memory(error)
    for other in (
        RuntimeError("shape '[3]' is invalid"),
        BackendError("the disk ran out of memory"),
    ):
        assert not is_out_of_memory(other)


def test_limits_come_back_as_they_were_saved_and_from_older_checkpoints() -> None:
    given = {"train_tokens": 1, "cache_tokens": 3, "pack_tokens": 4, "kept_tokens": 5, "packs_at_a_time": 2}
    saved, loaded = MemoryLimits(**given, recompute=True), MemoryLimits()
    loaded.restore(asdict(saved))
    assert loaded == saved
    loaded.restore({"cache_tokens": 7})
    assert loaded == MemoryLimits(cache_tokens=7)


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    meminfo.write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     600 kB\n")
    assert free_host_bytes(meminfo, cgroup) == 600 * 1024
    for name, text in (("memory.max", "max"), ("memory.current", "100"), ("memory.stat", "anon 7\ninactive_file 50\n")):
        (cgroup / name).write_text(text)
    assert free_host_bytes(meminfo, cgroup) == 600 * 1024
    (cgroup / "memory.max").write_text("1000")
    assert free_host_bytes(meminfo, cgroup) == 1000 - 100 + 50
    (cgroup / "memory.current").write_text("2000")
    assert free_host_bytes(meminfo, cgroup) == 0
    assert free_host_bytes(tmp_path / "none", tmp_path / "none") > 2**20  # a system without these files
    assert free_bytes(torch.device("cpu")) > 2**20
