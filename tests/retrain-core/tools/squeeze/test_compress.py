"""The compressed adapter: its product, scale, dtype and other contents; PEFT itself computes the same with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from retrain.kernel.registry import Plugins
from retrain.squeeze import compress_adapter
from retrain.tools.squeeze.adapter import PREFIX, read_adapter
from tests.kit.problems import refused

torch = pytest.importorskip("torch")
Make = Callable[..., Path]
Random = Callable[..., tuple[np.ndarray, np.ndarray]]


def updates(folder: Path) -> dict[str, np.ndarray]:
    """`scale * B A` of every module."""
    adapter = read_adapter(folder)
    found = {}
    for pair in adapter.pairs:
        a, b = adapter.factors(pair)
        found[pair.module] = pair.scale * (b @ a)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return content


def test_the_error_is_documented_times_the_scale(make_adapter: Make, documented_factors: Any, tmp_path: Path) -> None:
    folder = make_adapter({"q": documented_factors}, lora_alpha=12)
    for rank, error in ((1, 3.768836), (2, 2.031152), (3, 0.0), (4, 0.0), (9, 0.0)):
        compressed = compress_adapter(folder, tmp_path / "out", rank)
        assert compressed.rank == min(rank, 4)
        difference = updates(folder)["q"] - updates(tmp_path / "out")["q"]
        assert np.linalg.norm(difference) == pytest.approx(3 * error, abs=2e-6)
    compressed = compress_adapter(folder, tmp_path / "out", 2)
    (layer,) = compressed.layers
    assert (layer.module, layer.rank, layer.source_rank) == ("q", 2, 4)
    assert layer.kept == pytest.approx(0.870985, abs=5e-7)
    assert (compressed.source_bytes, compressed.num_bytes) == (8 * 44, 8 * 22)
    assert json.loads((tmp_path / "out/squeeze.json").read_text()) == json.loads(json.dumps(compressed.as_data()))


def test_alpha_is_never_rounded_nor_of_rslora(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    folder = make_adapter({"q": (np.eye(128), np.diag(np.arange(128, 0, -1.0)))}, lora_alpha=64)
    for rank, alpha in ((1, 0.5), (2, 1.0), (4, 2.0), (32, 16.0), (128, 64.0)):
        compress_adapter(folder, tmp_path / "out", rank)
        config = config_of(tmp_path / "out")
        assert (config["r"], config["lora_alpha"], type(config["lora_alpha"])) == (rank, alpha, float)
        assert read_adapter(tmp_path / "out").pairs[0].scale == 0.5
    root = make_adapter({"q": random_factors(0, rank=8)}, "root", lora_alpha=16, use_rslora=True)
    compress_adapter(root, tmp_path / "out", 2)
    assert config_of(tmp_path / "out")["lora_alpha"] == pytest.approx(16 * (2 / 8) ** 0.5)


def test_each_pattern_keeps_its_own_scale(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    ranks = {"layers.0.q": 8, "layers.0.v": 2, "layers.1.q": 8, "x.layers.1.q": 8}
    layers = {name: random_factors(seed, rank=rank) for seed, (name, rank) in enumerate(ranks.items())}
    patterns = {"rank_pattern": {"v": 2}, "alpha_pattern": {"v": 3, "^layers.1.q": 100}}
    folder = make_adapter(layers, r=8, lora_alpha=16, **patterns)
    before = {pair.module: pair.scale for pair in read_adapter(folder).pairs}
    assert before == {"layers.0.q": 2.0, "layers.0.v": 1.5, "layers.1.q": 12.5, "x.layers.1.q": 2.0}
    for rank in (1, 2, 4, 8):
        out = tmp_path / f"out{rank}"
        compress_adapter(folder, out, rank)
        small = read_adapter(out)
        assert {pair.module: pair.scale for pair in small.pairs} == pytest.approx(before)
        assert {pair.module: pair.rank for pair in small.pairs} == {name: min(rank, r) for name, r in ranks.items()}
    np.testing.assert_allclose(updates(tmp_path / "out8")["layers.1.q"], updates(folder)["layers.1.q"], atol=1e-10)
    assert config_of(tmp_path / "out2")["rank_pattern"] == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_stays(dtype: Any, make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    folder = make_adapter({"q": random_factors(0)})
    a, b = (torch.from_numpy(factor).to(dtype) for factor in random_factors(0))
    save_torch({f"{PREFIX}q.lora_A.weight": a, f"{PREFIX}q.lora_B.weight": b}, folder / "adapter_model.safetensors")
    compress_adapter(folder, tmp_path / "out", 4)
    found = load_torch(tmp_path / "out" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    exact = b.double() @ a.double()
    small = found[f"{PREFIX}q.lora_B.weight"].double() @ found[f"{PREFIX}q.lora_A.weight"].double()
    assert float((small - exact).norm() / exact.norm()) < 2**-7


def test_everything_else_is_kept(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    others = {f"{PREFIX}lm_head.weight": np.arange(6).reshape(2, 3), f"{PREFIX}q.lora_B.bias": np.ones(6, np.float32)}
    a, b = random_factors(1)
    mixed = {"v.lora_A.weight": a.astype(np.float32), "v.lora_B.weight": b}
    given = {"tensors": others | mixed, "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    folder = make_adapter({"q": random_factors(0)}, **given)
    (folder / "optimizer.safetensors").write_bytes(b"large")
    compress_adapter(folder, tmp_path / "out", 2)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert (found["v.lora_A.weight"].dtype, found["v.lora_B.weight"].dtype) == (np.float32, np.float64)
    for name, values in others.items():
        assert found[name].dtype == values.dtype
        np.testing.assert_array_equal(found[name], values)
    before, after = config_of(folder), config_of(tmp_path / "out")
    changed = {"r": 2, "lora_alpha": 2.0, "rank_pattern": {}, "alpha_pattern": {}}
    assert after == before | changed
    with safe_open(str(tmp_path / "out/adapter_model.safetensors"), framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "squeeze.json"}


def test_convolutions_and_embeddings_keep_shapes(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    embed = {"embed.lora_embedding_A": (4, 50), "embed.lora_embedding_B": (8, 4)}
    shapes = {**embed, "conv.lora_A.weight": (4, 3, 5, 5), "conv.lora_B.weight": (7, 4, 1, 1)}
    tensors = {name: stream.standard_normal(shape) for name, shape in shapes.items()}
    folder = make_adapter({"q": random_factors(0)}, tensors=tensors)
    read = read_adapter(folder)
    factors = {pair.module: tuple(factor.shape for factor in read.factors(pair)) for pair in read.pairs}
    assert factors == {"embed": ((4, 50), (8, 4)), "conv": ((4, 75), (7, 4)), "q": ((4, 8), (6, 4))}
    compress_adapter(folder, tmp_path / "out", 2)
    found = {name: array.shape for name, array in load_file(tmp_path / "out/adapter_model.safetensors").items()}
    assert (found["conv.lora_A.weight"], found["conv.lora_B.weight"]) == ((2, 3, 5, 5), (7, 2, 1, 1))
    assert found["embed.lora_embedding_A"] == (2, 50)
    compress_adapter(folder, tmp_path / "whole", 4)
    for module, update in updates(folder).items():
        np.testing.assert_allclose(updates(tmp_path / "whole")[module], update, atol=1e-10)


def test_an_idle_layer_can_learn(make_adapter: Make, random_factors: Random, idle_layer: Any, tmp_path: Path) -> None:
    folder = make_adapter({"q": random_factors(0), "idle": idle_layer})
    compressed = compress_adapter(folder, tmp_path / "out", 2)
    found = load_file(tmp_path / "out/adapter_model.safetensors")
    np.testing.assert_array_equal(found[f"{PREFIX}idle.lora_A.weight"], idle_layer[0][:2])
    assert not found[f"{PREFIX}idle.lora_B.weight"].any()
    assert {layer.module: layer.kept is None for layer in compressed.layers} == {"q": False, "idle": True}


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), rank=st.integers(1, 5), smaller=st.integers(1, 5), rslora=st.booleans())
def test_twice_is_once(seed: int, rank: int, smaller: int, rslora: bool, make_adapter: Make, random_factors: Random):
    name = f"a{np.random.default_rng().integers(2**60)}"  # of its own for each example
    folder = make_adapter({"q": random_factors(seed, rank=rank)}, name, use_rslora=rslora)
    once, whole, twice = (folder.with_name(f"{folder.name}-{name}") for name in ("once", "whole", "twice"))
    compress_adapter(folder, once, smaller)
    compress_adapter(folder, whole, rank)
    compress_adapter(whole, twice, smaller)
    np.testing.assert_allclose(updates(once)["q"], updates(twice)["q"], atol=1e-8)
    np.testing.assert_allclose(updates(whole)["q"], updates(folder)["q"], atol=1e-8)


def test_only_an_earlier_result_is_replaced(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    folder = make_adapter({"q": random_factors(0)})
    for rank in (2, 3):
        assert compress_adapter(folder, tmp_path / "deep" / "out", rank).rank == rank
    assert config_of(tmp_path / "deep" / "out")["r"] == 3
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    other = make_adapter({"q": random_factors(1)}, "other")
    taken = "squeeze.output-taken"
    for place in (tmp_path / "mine", other, tmp_path / "file", folder, tmp_path):
        assert refused(compress_adapter, folder, place, 2) == [taken]
    assert refused(compress_adapter, folder, tmp_path / "file" / "below", 2) == ["squeeze.unwritable"]
    (tmp_path / "empty").mkdir()
    compress_adapter(folder, tmp_path / "empty", 2)


def test_a_failure_leaves_nothing(make_adapter: Make, random_factors: Random, tmp_path: Path) -> None:
    a, b = random_factors(0)
    b[3, 3] = np.nan
    folder = make_adapter({"q": (a, b)})
    assert refused(compress_adapter, folder, tmp_path / "out", 2) == ["squeeze.weights-not-finite"]
    for rank in (0, -1):
        assert refused(compress_adapter, folder, tmp_path / "out", rank) == ["squeeze.bad-rank"]
    layer = (np.full((1, 4), 60000.0), np.full((400, 1), 60000.0))
    other = (np.full((1, 4000), 65000.0), np.full((1, 1), 65000.0))
    folder = make_adapter({"q": layer, "v": other}, "half", dtype=np.float16)
    assert refused(compress_adapter, folder, tmp_path / "out", 1) == ["squeeze.dtype-overflow"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"adapter", "half"}


peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
Load = Callable[[], Any]
Save = Callable[..., Path]


@pytest.fixture
def load_base(plugins: Plugins) -> Load:
    folder = plugins.locate_model("builtin:tiny")
    if folder is None:
        pytest.skip("retrain-local is not installed")
    return lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def save_adapter(tmp_path: Path) -> Save:
    """`save_adapter(load, r=8, ...)`: an adapter with a real update, as PEFT saves it; keywords of `LoraConfig`."""

    def save(load: Load, **settings: Any) -> Path:
        torch.manual_seed(0)
        model = peft.get_peft_model(load(), peft.LoraConfig(**{"target_modules": "all-linear", **settings}))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.1)
        model.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return save


def logits_of(load_base: Load, adapter: Path) -> np.ndarray:
    model = peft.PeftModel.from_pretrained(load_base(), adapter).eval()
    with torch.no_grad():
        found: np.ndarray = model(torch.arange(24).reshape(2, 12)).logits.numpy()
    return found


def load_gpt2() -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 8, "lora_alpha": 5, "use_rslora": True},
        {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj": 1, "q_proj": 2}},
        {"r": 4, "lora_alpha": 4, "modules_to_save": ["lm_head"]},
        {"r": 4, "lora_alpha": 4, "lora_bias": True},
        # The Conv1D of GPT-2 transposes the update, not the factors.
        {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ],
    ids=["rslora", "patterns", "modules-to-save", "bias", "transposed"],
)
def test_at_full_rank_the_logits_are_the_same(settings: dict[str, Any], load_base: Load, save_adapter: Save) -> None:
    load = load_gpt2 if "fan_in_fan_out" in settings else load_base
    adapter = save_adapter(load, **settings)
    compress_adapter(adapter, adapter.with_name("out"), settings["r"])
    wanted, found = logits_of(load, adapter), logits_of(load, adapter.with_name("out"))
    assert np.abs(wanted - found).max() <= 1e-5 * max(1.0, float(np.abs(wanted).max()))
