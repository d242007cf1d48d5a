"""Reading and writing safetensors, against the library itself, and files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from retrain.kernel.errors import ConfigError
from retrain.tools.squeeze.adapter import ITEM_BYTES, TensorFile, TensorInfo, encode, write_tensor_file
from tests.kit.problems import codes_in

VALUES = np.array([[0.0, -0.0, 1.0], [-2.5, 3e-5, 60000.0]])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_what_the_library_wrote_is_read(dtype: type, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"b": VALUES.astype(dtype), "a": VALUES[:1].astype(dtype)}, file, metadata={"format": "pt"})
    tensors = TensorFile(file)
    assert tensors.metadata == {"format": "pt"}
    np.testing.assert_array_equal(tensors.values("b"), VALUES.astype(dtype).astype(np.float64))
    assert tensors.tensors["a"].shape == (1, 3)


def test_what_we_write_the_library_reads(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
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
def test_float32_survives_a_round_trip(values: list[float]) -> None:
    array = np.array(values)
    np.testing.assert_array_equal(np.frombuffer(encode(array, "F32", name="x"), "<f4"), array)


def fault(read: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read()
    return codes_in(caught)


@pytest.mark.parametrize(("dtype", "value"), [("F16", 7e4), ("BF16", 3.4e38), ("F32", 1e39)])
def test_a_number_that_does_not_fit_is_refused(dtype: str, value: float) -> None:
    assert fault(lambda: encode(np.array([1.0, -value]), dtype, name="q")) == ["squeeze.dtype-overflow"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_named_by_place_and_integers_are_no_factors(bad: float, tmp_path: Path) -> None:
    values = VALUES.astype(np.float32)
    values[1, 1] = bad
    save_file({"q": values, "i": np.arange(4)}, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    assert fault(lambda: file.values("i")) == ["squeeze.weights-dtype"]
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
    assert fault(lambda: TensorFile(tmp_path / "a.safetensors")) == ["squeeze.weights-unreadable"]


def test_a_file_that_shrinks_while_it_is_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"q": VALUES}, file)
    tensors = TensorFile(file)
    file.write_bytes(file.read_bytes()[:-8])
    assert fault(lambda: tensors.values("q")) == ["squeeze.weights-cut"]


def test_a_writer_that_breaks_its_promise_is_stopped(tmp_path: Path) -> None:
    info = TensorInfo(name="q", dtype="F32", shape=(2,), num_bytes=8)
    with pytest.raises(ValueError, match="4 bytes instead of 8"):
        write_tensor_file(tmp_path / "a.safetensors", [info], lambda _: [bytes(4)], {})
