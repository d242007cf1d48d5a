"""Attention kernels on a CUDA device, with the sizes of models that people train."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retrain_local.attention import varlen
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.attention.pages import PagedKernels, Pages
from retrain_local.attention.select_kernels import packed_faults, paged_faults
from retrain_local.attention.varlen import VarlenAttend
from retrain_local.decoder import Attend, Scores, Shape
from retrain_local.devices.kernel_trials import first_fault
from tests.kit.shapes import shape as make_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")]
GPU = torch.device("cuda", 0)
SHAPES = {
    "Qwen3-4B": make_shape(32, 8, 128),
    "Qwen2-0.5B": make_shape(14, 2, 64),
    "one head each": make_shape(4, 4, 96),
    "large heads": make_shape(8, 1, 256),
    "tiny": make_shape(4, 2, 32),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
SPANS = Spans(lengths=(300, 700, 513, 40, 1000, 1, 64), prefixes=(-1, 0, 0, -1, 3, 3, -1))


@pytest.fixture(autouse=True)
def _needs_flash() -> None:
    if refusal := varlen.refusal(GPU):
        pytest.skip(refusal)


@pytest.fixture
def kernels() -> PagedKernels:
    pytest.importorskip("triton")
    from retrain_local.attention.paged_triton import TritonPages

    made: PagedKernels = TritonPages(torch.cuda.get_device_properties(GPU).multi_processor_count)
    return made


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_attention_and_its_gradient_are_those_of_plain_pytorch(shape: Shape, dtype: torch.dtype) -> None:
    assert first_fault(packed_faults(VarlenAttend, shape, GPU, dtype)) is None


def packed(make: Callable[[Spans, torch.device], Attend], shape: Shape, scores: Scores) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = (shape.heads, shape.head_size), (shape.kv_heads, shape.head_size), (shape.kv_heads, shape.value_size)
    inputs = [torch.randn(SPANS.num_tokens, *size, device=GPU, dtype=torch.bfloat16) for size in sizes]
    inputs = [x.requires_grad_() for x in inputs]
    out = make(SPANS, GPU)(0, *inputs, scores)
    return [out.detach(), *torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs)]


@shapes
@pytest.mark.parametrize("window", [None, 1, 100])
def test_long_segments(shape: Shape, window: int | None) -> None:
    scores = Scores(scale=shape.head_size**-0.5, window=window)
    found, plain = packed(VarlenAttend, shape, scores), packed(PaddedAttend, shape, scores)
    # a query that sees one key has no gradient, and both compute the rounding of zero
    least = 1e-3 * float(plain[-1].norm())
    for got, wanted in zip(found, plain, strict=True):
        assert float((got - wanted).norm()) < 1e-2 * max(least, float(wanted.norm()))


def test_the_gradient_has_the_same_bits_every_time() -> None:
    shape = SHAPES["Qwen3-4B"]
    scores = Scores(scale=shape.head_size**-0.5)
    first = packed(VarlenAttend, shape, scores)
    for _ in range(3):
        for one, other in zip(packed(VarlenAttend, shape, scores), first, strict=True):
            assert torch.equal(one, other)


@shapes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn])
def test_paged_attention(kernels: PagedKernels, shape: Shape, dtype: torch.dtype, stored: torch.dtype | None) -> None:
    if stored is torch.float8_e4m3fn and torch.cuda.get_device_capability(GPU) < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    assert first_fault(paged_faults(kernels, shape, GPU, dtype, stored or dtype)) is None


@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("window", [None, 200])
def test_long_rows_in_pages(kernels: PagedKernels, rows: int, window: int | None) -> None:
    shape, block_size, width = SHAPES["Qwen3-4B"], 16, 128
    torch.manual_seed(0)
    cells = 1 + rows * width, block_size, shape.kv_heads, shape.head_size
    keys, values = (torch.randn(cells, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    tables = 1 + torch.randperm(rows * width, device=GPU).view(rows, width).int()
    lengths = torch.randint(1, width * block_size + 1, (rows,), device=GPU, dtype=torch.int32)
    queries = torch.randn(rows, shape.heads, shape.head_size, device=GPU, dtype=torch.bfloat16)
    scores = Scores(scale=shape.head_size**-0.5, window=window)
    got = kernels.read(queries, Pages(keys, values), tables, lengths, scores)
    wanted = PagedKernels().read(queries, Pages(keys, values), tables, lengths, scores)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-3)


def test_a_recorded_read_follows_the_lengths(kernels: PagedKernels) -> None:
    shape, block_size = SHAPES["Qwen3-4B"], 16
    torch.manual_seed(0)
    keys, values = (torch.randn(33, block_size, 8, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    tables = torch.arange(1, 33, device=GPU, dtype=torch.int32).view(2, 16)
    lengths = torch.tensor([5, 100], device=GPU, dtype=torch.int32)
    queries = torch.randn(2, 32, 128, device=GPU, dtype=torch.bfloat16)
    scores = Scores(scale=shape.head_size**-0.5)

    def read() -> Tensor:
        return kernels.read(queries, Pages(keys, values), tables, lengths, scores)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        read()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = read()
    for longer in (0, 40, 90):
        lengths.copy_(torch.tensor([5 + longer, 100 + longer]))
        graph.replay()
        assert torch.equal(out, read())
