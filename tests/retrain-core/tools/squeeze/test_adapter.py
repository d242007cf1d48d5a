"""Adapters and their safetensors files, against the libraries themselves, and every way to be neither."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from retrain.kernel.errors import ConfigError
from retrain.tools.squeeze.adapter import (
    ITEM_BYTES,
    PREFIX,
    TensorFile,
    TensorInfo,
    encode,
    read_adapter,
    write_tensor_file,
)
from tests.kit.problems import codes_in, refused

Make = Callable[..., Path]
Random = Callable[..., tuple[np.ndarray, np.ndarray]]
Q = "layers.0.q_proj"


def _set(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_pairs_by_module_in_the_order_of_their_numbers(make_adapter: Make, random_factors: Random) -> None:
    layers = {Q: random_factors(0), "layers.0.mlp.up": random_factors(1, outer=3)}
    whole = np.ones((3, 2), np.int64)
    adapter = read_adapter(make_adapter(layers, lora_alpha=16, tensors={f"{PREFIX}lm_head.weight": whole}))
    assert [pair.module for pair in adapter.pairs] == ["layers.0.mlp.up", Q]
    assert [(pair.rank, pair.alpha, pair.scale) for pair in adapter.pairs] == [(4, 16.0, 4.0)] * 2
    assert [info.name for info in adapter.others] == [f"{PREFIX}lm_head.weight"]
    for pair in adapter.pairs:
        for found, wanted in zip(adapter.factors(pair), layers[pair.module], strict=True):
            np.testing.assert_array_equal(found, wanted)
    names = ["layers.2.q", "layers.10.q", "layers.1.v", "layers.1.q", "q", "layers.x"]
    adapter = read_adapter(make_adapter({name: random_factors(0) for name in names}, "many"))
    ordered = ["layers.1.q", "layers.1.v", "layers.2.q", "layers.10.q", "layers.x", "q"]
    assert [pair.module for pair in adapter.pairs] == ordered


SCALES = [
    ({"use_rslora": True}, [4.0, 4.0]),
    ({"alpha_pattern": {"q_proj": 1.0}}, [0.25, 2.0]),
    ({"alpha_pattern": {"proj": 2, "^q_proj": 3}}, [2.0, 2.0]),
    ({"r": 64, "rank_pattern": {"q_proj|v_proj": 4}}, [2.0, 2.0]),
    ({"lora_alpha": 0}, [0.0, 0.0]),
]


@pytest.mark.parametrize(("config", "scales"), SCALES)
def test_scales_by_pattern(config: dict[str, Any], scales: list[float], make_adapter: Make, random_factors: Random):
    layers = {"layers.0.q_proj": random_factors(0), "layers.0.v_proj": random_factors(1)}
    adapter = read_adapter(make_adapter(layers, **{"lora_alpha": 8, **config}))
    assert [pair.scale for pair in adapter.pairs] == pytest.approx(scales)


def test_patterns_hold_as_in_peft(make_adapter: Make, random_factors: Random) -> None:
    peft = pytest.importorskip("peft.utils.other")
    names = ["q_proj", "layers.1.mlp.up", *(f"{part}_proj" for part in ("layers.0.q", "layers.0.qq", "layers.10.q"))]
    names.append("x.layers.0.q_proj")
    patterns = {"layers.0.q_proj": 1, r"layers\.\d.q_proj": 2, "q_proj": 3, "^layers.1.mlp.up": 4, "up": 5}
    layers = {name: random_factors(i) for i, name in enumerate(names)}
    adapter = read_adapter(make_adapter(layers, lora_alpha=9, alpha_pattern=patterns))
    found = {pair.module: pair.alpha for pair in adapter.pairs}
    assert found == {name: patterns.get(peft.get_pattern_key(patterns.keys(), name), 9) for name in names}


def unreadable(folder: Path | str) -> list[str]:
    """The codes with which an adapter is refused; the message is harmless and has a fix."""
    with pytest.raises(ConfigError) as caught:
        read_adapter(folder)
    assert "fix: " in str(caught.value)
    assert "\x1b" not in str(caught.value)
    return codes_in(caught)


def test_places_without_an_adapter_and_configurations_that_are_no_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_adapter: Make, random_factors: Random
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert [len(unreadable(place)) for place in ("tinker://abc/weights/final", "nowhere", "file", ".")] == [1] * 4
    folder = make_adapter({Q: random_factors(0)})
    for text in ("", "{", "[1]", "[" * 100_000, "\ud800"):
        (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert unreadable(folder) == ["squeeze.config-unreadable"]


BAD_CONFIGS: dict[str, Sequence[dict[str, Any]]] = {
    "squeeze.not-lora": ({"peft_type": "LOHA"}, {"peft_type": None}),
    "squeeze.lora-variant": ({"use_dora": True}, {"target_parameters": ["experts.up"]}),
    "squeeze.base-weights-in-factors": ({"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "OLoRA"}),
    "squeeze.rank-differs": ({"r": 8}, {"rank_pattern": {"q_proj": 2}}),
    "squeeze.config-bad-value": (
        *({"r": 0}, {"r": True}, {"r": "4"}, {"rank_pattern": {"q_proj": 2.5}}, {"rank_pattern": ["q_proj"]}),
        *({"alpha_pattern": {"(": 2}}, {"alpha_pattern": {"q_proj": "2"}}, {"alpha_pattern": {"q\x1b": "x"}}),
        *({"rank_pattern": {"(?i)q_proj": 2}}, {"lora_alpha": float("nan")}, {"lora_alpha": None}),
    ),
}


@pytest.mark.parametrize(("code", "changes"), [(code, each) for code, cases in BAD_CONFIGS.items() for each in cases])
def test_configurations_refused(code: str, changes: dict[str, Any], make_adapter: Make, random_factors: Random) -> None:
    folder = make_adapter({Q: random_factors(0)})
    _set(folder, **changes)
    assert unreadable(folder) == [code]


A, B = "x.lora_A.weight", "x.lora_B.weight"
BAD_TENSORS: dict[str, Sequence[dict[str, tuple[int, ...]]]] = {
    "squeeze.unpaired-factor": ({A: (4, 8)}, {B: (4, 8)}, {A: (4, 8), "y.lora_B.weight": (6, 4)}),
    "squeeze.factor-shapes": (
        *({A: (4, 8), B: (4, 6)}, {A: (4,), B: (6, 4)}, {A: (4, 0), B: (6, 4)}),
        {A: (4, 8, 3, 3), B: (6, 4, 3, 3)},
    ),
    "squeeze.rank-differs": ({A: (2, 8), B: (6, 2)},),
    "squeeze.dora-weights": ({"x.lora_magnitude_vector": (6,)},),
    "squeeze.unknown-factor": ({"x.lora_A.default.weight": (4, 8)}, {"x.lora_E": (4, 1)}),
}


@pytest.mark.parametrize(("code", "shapes"), [(code, each) for code, cases in BAD_TENSORS.items() for each in cases])
def test_factors_do_not_fit(code: str, shapes: Any, make_adapter: Make, random_factors: Random) -> None:
    tensors = {name: np.zeros(shape) for name, shape in shapes.items()}
    assert unreadable(make_adapter({Q: random_factors(0)}, tensors=tensors)) == [code]


def test_weights_that_are_missing_pickled_or_no_factors(make_adapter: Make, random_factors: Random) -> None:
    assert unreadable(make_adapter({}, "whole", tensors={"lm_head.weight": np.zeros((2, 2))})) == ["squeeze.no-factors"]
    folder = make_adapter({Q: random_factors(0)})
    pickled = (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert unreadable(folder) == ["squeeze.pickled"]
    pickled.unlink()
    assert unreadable(folder) == ["squeeze.weights-missing"]


VALUES = np.array([[0.0, -0.0, 1.0], [-2.5, 3e-5, 60000.0]])


def test_what_the_library_wrote_is_read_and_it_reads_what_we_write(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for dtype in (np.float64, np.float32, np.float16):
        save_file({"b": VALUES.astype(dtype), "a": VALUES[:1].astype(dtype)}, file, metadata={"format": "pt"})
        tensors = TensorFile(file)
        assert (tensors.metadata, tensors.tensors["a"].shape) == ({"format": "pt"}, (1, 3))
        np.testing.assert_array_equal(tensors.values("b"), VALUES.astype(dtype).astype(np.float64))
    contents = {"x": ("F16", VALUES), "y": ("F64", VALUES[:, :1]), "größe": ("F32", VALUES[0])}
    infos = [
        TensorInfo(name=name, dtype=dtype, shape=values.shape, num_bytes=values.size * ITEM_BYTES[dtype])
        for name, (dtype, values) in contents.items()
    ]
    write_tensor_file(file, infos, lambda info: [encode(contents[info.name][1], info.dtype, name=info.name)], {})
    found = load_file(file)
    dtypes = {name: array.dtype.name for name, array in found.items()}
    assert dtypes == {"x": "float16", "y": "float64", "größe": "float32"}
    for name, (_, values) in contents.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-3, atol=1e-7)


def test_bfloat16_rounds_as_torch_does(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3e38, 1e-40], np.float32)
    values = np.concatenate([values, ties])
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    ours = np.frombuffer(encode(values.astype(np.float64), "BF16", name="x"), np.int16)
    np.testing.assert_array_equal(ours, rounded.view(torch.int16).numpy())
    save_torch({"x": rounded}, tmp_path / "a.safetensors")
    np.testing.assert_array_equal(TensorFile(tmp_path / "a.safetensors").values("x"), rounded.double().numpy())


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_float32_survives_a_round_trip_and_a_number_that_does_not_fit_is_refused(values: list[float]) -> None:
    array = np.array(values)
    np.testing.assert_array_equal(np.frombuffer(encode(array, "F32", name="x"), "<f4"), array)
    for dtype, value in (("F16", 7e4), ("BF16", 3.4e38), ("F32", 1e39)):
        assert refused(encode, np.append(array, -value), dtype, name="q") == ["squeeze.dtype-overflow"]


def test_a_number_that_is_not_finite_is_named_by_place_and_integers_are_no_factors(tmp_path: Path) -> None:
    values = VALUES.astype(np.float32)
    for bad in (np.nan, np.inf, -np.inf):
        values[1, 1] = bad
        save_file({"q": values, "i": np.arange(4)}, tmp_path / "a.safetensors")
        file = TensorFile(tmp_path / "a.safetensors")
        assert refused(file.values, "i") == ["squeeze.weights-dtype"]
        with pytest.raises(ConfigError, match=r"q holds 1 numbers .* at 4"):
            file.values("q")


def _header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04pickle",
        b"\xff" * 8,
        (2**62).to_bytes(8, "little") + b"{}",
        _header(q={"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}),
        _header(q={"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 4]}) + bytes(4),
        _header(q={"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}) + bytes(4),
        _header(q={"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}) + bytes(4),
        _header(q={"dtype": "F32", "shape": [1]}) + bytes(4),
        _header(q=[1]),
        _header(__metadata__={"a": 1}),
        (4).to_bytes(8, "little") + b"\xff\xfe{}",
        (2).to_bytes(8, "little") + b"[]",
    ],
    ids=lambda content: ascii(content[:40]),
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    assert refused(TensorFile, tmp_path / "a.safetensors") == ["squeeze.weights-unreadable"]


def test_a_file_that_shrinks_while_it_is_read_and_a_writer_that_breaks_its_promise_are_told(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"q": VALUES}, file)
    tensors = TensorFile(file)
    file.write_bytes(file.read_bytes()[:-8])
    assert refused(tensors.values, "q") == ["squeeze.weights-cut"]
    info = TensorInfo(name="q", dtype="F32", shape=(2,), num_bytes=8)
    with pytest.raises(ValueError, match="4 bytes instead of 8"):
        write_tensor_file(tmp_path / "a.safetensors", [info], lambda _: [bytes(4)], {})
