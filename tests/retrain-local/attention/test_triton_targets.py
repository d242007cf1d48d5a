"""Triton compiles for a GPU without having one: every kernel, for every generation that is served."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing"),
]
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "i8": 1, "fp8e4nv": 1}
SMALLEST_SHARED_MEMORY = 99 * 1024  # of the GPUs with compute capability 8.6 and 8.9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def strides(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    ("dtype", "stored", "size", "group", "splits"),
    [
        ("bf16", "bf16", 128, 4, 2),
        ("fp16", "fp16", 64, 7, 1),
        ("bf16", "i8", 128, 4, 2),
        ("bf16", "fp8e4nv", 128, 4, 2),
        ("fp32", "fp32", 256, 8, 2),
        ("bf16", "bf16", 256, 64, 32),
        ("fp32", "i8", 32, 2, 1),
    ],
)
@pytest.mark.parametrize(("extras", "prefix"), [(False, ""), (True, ""), (False, "itself"), (True, "before")])
def test_reads(
    capability: int, dtype: str, stored: str, size: int, group: int, splits: int, extras: bool, prefix: str
) -> None:
    from retrain_local.attention import paged_triton
    from retrain_local.attention.paged_triton import TILE_BYTES
    from retrain_local.attention.pages import SHARED_STRETCHES, shared_heads

    if stored == "fp8e4nv" and capability < 89:
        pytest.skip("it has no 8-bit floats, and is refused them")
    quantised = ITEM[stored] == 1
    types = {"queries": f"*{dtype}", "keys": f"*{stored}", "values": f"*{stored}"}
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if quantised else f"*{stored}")
    types |= {"tables": "*i32", "lengths": "*i32", "sinks": f"*{dtype}"}
    types |= dict.fromkeys(("shared_tokens", "shared_rows"), "*i32") | dict.fromkeys(
        ("shared_parts", "shared_sums"), "*fp32" if prefix or splits > 1 else f"*{dtype}"
    )
    splits = SHARED_STRETCHES if prefix == "itself" else splits
    types |= dict.fromkeys(("parts", "sums"), f"*{dtype}" if splits == 1 else "*fp32")
    types |= {"scale": "fp32", "softcap": "fp32", "window": "i32"}
    types |= strides("query_row", "query_head", "key_block", "key_place", "key_head")
    types |= strides("value_block", "value_place", "value_head", "table_row", "max_keys")
    constants = {"HEADS": 2 * group, "GROUP": group, "SIZE": size, "VALUE_SIZE": size, "BLOCK_SIZE": 16}
    constants |= {"SPLITS": splits, "TILE_HEADS": max(16, 1 << (group - 1).bit_length())}
    constants |= {"TILE_KEYS": max(16, min(64, TILE_BYTES // (size * ITEM[stored])))}
    constants |= {"TILE_SIZE": size, "TILE_VALUE": size, "IS_QUANTISED": quantised}
    constants |= dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS"), extras)
    constants |= {"HAS_WINDOW": extras and not prefix, "SHARED": SHARED_STRETCHES}
    constants |= {"IS_SHARED": prefix == "itself", "HAS_SHARED": prefix == "before"}
    if prefix == "itself":
        if 2 * group > (tile := shared_heads(size)):
            pytest.skip("two rows of these heads do not fit")
        constants["TILE_HEADS"] = tile
    stages = 2 if prefix == "itself" else 3
    made = compiled(paged_triton.attend, types, constants, capability, num_warps=4, num_stages=stages)
    assert made.metadata.shared <= SMALLEST_SHARED_MEMORY
    if dtype != "fp32":
        assert "mma" in made.asm["ptx"], "tensor cores"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("dtype", "stored"), [("bf16", "bf16"), ("bf16", "i8"), ("fp32", "i8"), ("bf16", "fp8e4nv")])
def test_writes_and_joins(capability: int, dtype: str, stored: str) -> None:
    from retrain_local.attention import paged_triton

    if stored == "fp8e4nv" and capability < 89:
        pytest.skip("it has no 8-bit floats, and is refused them")
    quantised = ITEM[stored] == 1
    types = {"new_keys": f"*{dtype}", "new_values": f"*{dtype}", "keys": f"*{stored}", "values": f"*{stored}"}
    types |= dict.fromkeys(("key_scales", "value_scales"), "*fp32" if quantised else f"*{stored}")
    types |= {"slots": "*i64"} | strides("new_key_token", "new_key_head", "new_value_token", "new_value_head")
    types |= strides("key_block", "key_place", "key_head", "value_block", "value_place", "value_head")
    constants: dict[str, Any] = {"KV_HEADS": 8, "SIZE": 128, "VALUE_SIZE": 128, "BLOCK_SIZE": 16, "TILE": 128}
    constants |= {"IS_QUANTISED": quantised, "ROUNDS": stored == "i8", "LARGEST": 127.0 if quantised else 1.0}
    compiled(paged_triton.store, types, constants, capability, num_warps=1)
    types = {"parts": "*fp32", "sums": "*fp32", "out": f"*{dtype}"}
    constants = {"HEADS": 32, "VALUE_SIZE": 80, "SPLITS": 8, "TILE_VALUE": 128}
    compiled(paged_triton.join, types, constants, capability, num_warps=4)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_stands_between_products(capability: int, dtype: str) -> None:
    from retrain_local.model import operations_triton as kernels

    numbers = f"*{dtype}"
    types = dict.fromkeys(("x", "added", "weight", "y"), numbers) | strides("x_row", "added_row") | {"eps": "fp32"}
    made = [compiled(kernels._add_norm, types, {"SIZE": 2560, "TILE": 4096, "ADDS": False}, capability, num_warps=8)]
    types = dict.fromkeys(("qkv", "cos", "sin", "norm", "out"), numbers)
    types |= strides("qkv_row", "qkv_head", "angle_row") | {"eps": "fp32"}
    for has_norm in (True, False):
        constants = {"HEADS": 40, "HALF": 64, "TILE": 64, "HAS_NORM": has_norm}
        made += [compiled(kernels._turn_heads, types, constants, capability, num_warps=1)] * has_norm
    types = {"gate_up": numbers, "y": numbers, "row_stride": "i32"}
    made.append(compiled(kernels._swiglu, types, {"INNER": 9728, "TILE": 1024}, capability, num_warps=4))
    if dtype == "bf16":  # rounded, then multiplied in 16 bits: of two products in fp32 the compiler drops the rounding
        assert all(re.search(r"(mul|fma\.rn)\.bf16", each.asm["ptx"]) for each in made)


def registers_and_spills(made: Any) -> tuple[int, int]:
    """What the assembler says of a kernel; the newest targets need the second one that triton brings."""
    import triton

    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    target = re.search(r"\.target (\w+)", made.asm["ptx"])
    assert target is not None
    for assembler in ("ptxas", "ptxas-blackwell"):
        command = [str(folder / assembler), "-v", "--gpu-name", target.group(1), "-o", os.devnull, "-"]
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
            source.write(made.asm["ptx"])
            source.flush()
            command[-1] = source.name
            said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        found = re.search(r"(\d+) bytes spill stores.*?Used (\d+) registers", said, re.DOTALL)
        if found:
            return int(found.group(2)), int(found.group(1))
    pytest.skip(f"triton's assembler does not know {target.group(1)}")


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_training_adds(capability: int, dtype: str) -> None:
    """With the sizes of Qwen3-4B; nothing spills, and enough programs fit on a multiprocessor to hide memory."""
    from retrain_local.model import operations_triton as kernels
    from retrain_local.training import head_triton

    numbers = f"*{dtype}"
    eps = {"eps": "fp32"}
    types = dict.fromkeys(("x", "weight", "g", "into"), numbers) | strides("x_row", "g_row") | eps
    made = {"norm": (compiled(kernels._rms_norm_back, types, {"SIZE": 2560, "TILE": 4096}, capability, num_warps=8), 8)}
    types = dict.fromkeys(
        ("of_queries", "of_keys", "of_values", "qkv", "cos", "sin", "norm", "into"), numbers
    ) | strides(*(f"{of}_{what}" for of in ("query", "key", "value", "qkv") for what in ("row", "head")), "angle_row")
    for has_norm in (True, False):
        sizes = {"QUERIES": 32, "KEYS": 8, "HALF": 64, "TILE": 64, "HAS_NORM": has_norm}
        made[f"heads, {has_norm}"] = compiled(kernels._turn_heads_back, types | eps, sizes, capability, num_warps=1), 1
    types = dict.fromkeys(("gate_up", "g", "into"), numbers) | strides("row_stride", "g_row")
    made["gate"] = compiled(kernels._swiglu_back, types, {"INNER": 9728, "TILE": 1024}, capability, num_warps=4), 4
    types = {"logits": numbers, "tokens": "*i64", "logprobs": "*fp32", "slope": numbers}
    types |= {"row_stride": "i32", "factor": "fp32"}
    for slope in (True, False):
        sizes = {"VOCABULARY": 151_936, "TILE": head_triton.TILE, "SLOPE": slope}
        made[f"softmax, {slope}"] = compiled(head_triton._softmax, types, sizes, capability, num_warps=8), 8
    for name, (kernel, warps) in made.items():
        registers, spilled = registers_and_spills(kernel)
        assert spilled == 0, name
        assert 65_536 // (registers * 32 * warps) * warps >= 16, f"{name}: warps on a multiprocessor"


@pytest.mark.parametrize("capability", [80, 89, 90])
@pytest.mark.parametrize(
    ("dtype", "rank", "rows"), [("bf16", 32, 32), ("bf16", 128, 32), ("fp16", 8, 16), ("fp32", 16, 32)]
)
def test_decoding(capability: int, dtype: str, rank: int, rows: int) -> None:
    from retrain_local.model import decode_triton as kernels
    from retrain_local.model.operations_triton import _add_norm

    numbers, tile_rank = f"*{dtype}", kernels.TILE_RANKS[rank > 16]
    types = dict.fromkeys(("x", "added", "weight", "y"), numbers) | strides("x_row", "added_row") | {"eps": "fp32"}
    made = [compiled(_add_norm, types, {"SIZE": 2560, "TILE": 4096, "ADDS": True}, capability, num_warps=8)]
    types = dict.fromkeys(("y", "inner", "b", "cos", "sin", "norm", "queries", "keys", "values"), numbers)
    types |= {"slots": "*i64"} | strides("y_row", "inner_row", "angle_row", "key_slot", "key_head")
    types |= strides("value_slot", "value_head") | {"eps": "fp32"} | strides("num_rows")
    constants: dict[str, Any] = {"HEADS": 32, "KV_HEADS": 8, "HALF": 64, "RANK": rank, "TILE_ROWS": rows}
    constants |= {"TILE": 64, "TILE_RANK": tile_rank, "HAS_NORM": True}
    made.append(compiled(kernels._heads, types, constants, capability, num_warps=4))
    types = dict.fromkeys(("y", "inner", "b", "gated"), numbers) | strides("y_row", "inner_row", "num_rows")
    constants = {"INNER": 9728, "RANK": rank, "TILE_ROWS": rows, "TILE": 64, "TILE_RANK": tile_rank}
    made.append(compiled(kernels._swiglu, types, constants, capability, num_warps=4))
    for each in made:
        assert each.metadata.shared <= SMALLEST_SHARED_MEMORY
        assert registers_and_spills(each)[1] == 0
    if dtype != "fp32":
        assert all("mma" in each.asm["ptx"] for each in made[1:]), "tensor cores"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_drawing(capability: int, dtype: str) -> None:
    from retrain_local.sampling import draw_triton as kernels

    types = {"logits": f"*{dtype}", "temperature": "*fp32", "found": "*fp32"} | strides("logits_row", "rows")
    sizes: dict[str, Any] = {"VOCABULARY": 151_936, "PIECES": 38, "PIECE": kernels.PIECE}
    made = [compiled(kernels._measure, types, sizes, capability, num_warps=8)]
    types |= {"uniforms": "*fp64", "tokens": "*i64", "logprobs": "*fp32", "entropies": "*fp32"}
    sizes |= {"TILE_PIECES": 64, "BELOW_ONE": kernels.BELOW_ONE}
    made.append(compiled(kernels._choose, types, sizes, capability, num_warps=8))
    assert [registers_and_spills(each)[1] for each in made] == [0, 0]
