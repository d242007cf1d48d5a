"""The Triton kernels, on a GPU if there is one, otherwise in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain_local.attention.pages import PagedKernels, Pages, Prefixes
from retrain_local.attention.select_kernels import paged_faults
from retrain_local.decoder import Scores, Shape
from retrain_local.devices.kernel_trials import first_fault
from tests.kit.shapes import shape
from tests.kit.triton_interpreter import DEVICE, HAS_CUDA, in_the_interpreter, kernels_run, run_interpreted

BLOCK_SIZE = 8
SCORES = Scores(scale=0.2)


@in_the_interpreter
@pytest.mark.long  # the interpreter takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def make_kernels(multiprocessors: int = 20) -> Any:
    from retrain_local.attention.paged_triton import TritonPages

    return TritonPages(multiprocessors)


class Case:
    """Rows of these lengths in a pool whose other slots are NaN."""

    def __init__(
        self, lengths: list[int], of: Shape, *, dtype: torch.dtype = torch.float32, more_width: int = 0
    ) -> None:
        numbers = torch.Generator().manual_seed(0)
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        width = max(blocks) + more_width
        order = 1 + torch.randperm(sum(blocks), generator=numbers)
        self.tables_BM = torch.zeros(len(lengths), width, dtype=torch.int32)
        slots = []
        for row, (own, length) in enumerate(zip(order.split(blocks), lengths, strict=True)):
            self.tables_BM[row, : len(own)] = own
            at = torch.arange(length)
            slots.append(own[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
        self.slots_N = torch.cat(slots).to(DEVICE)
        self.new = [
            torch.randn(len(self.slots_N), of.kv_heads, size, generator=numbers).to(DEVICE, dtype)
            for size in (of.head_size, of.value_size)
        ]
        cells = 1 + sum(blocks), BLOCK_SIZE, of.kv_heads
        self.pools = [torch.full((*cells, x.shape[2]), torch.nan, dtype=dtype, device=DEVICE) for x in self.new]
        self.queries_BHD = torch.randn(len(lengths), of.heads, of.head_size, generator=numbers).to(DEVICE, dtype)
        for pool, new in zip(self.pools, self.new, strict=True):
            pool.flatten(0, 1)[self.slots_N] = new
        self.lengths_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.tables_BM = self.tables_BM.to(DEVICE)

    def read(
        self, kernels: Any, scores: Scores = SCORES, pages: Pages | None = None, prefixes: Prefixes | None = None
    ) -> Tensor:
        given = pages or Pages(*self.pools), self.tables_BM, self.lengths_B, scores, prefixes
        return kernels.read(self.queries_BHD, *given)  # type: ignore[no-any-return]

    def gap(self, scores: Scores = SCORES, kernels: Any = None) -> float:
        """Between the kernels and plain PyTorch."""
        got, wanted = self.read(kernels or make_kernels(), scores), self.read(PagedKernels(), scores)
        assert got.shape == wanted.shape
        assert got.dtype is self.queries_BHD.dtype
        return float((got.float() - wanted).abs().max())


@kernels_run
@pytest.mark.parametrize(
    "of", [shape(4, 2, 32), shape(3, 3, 80), shape(6, 1, 96, 64), shape(17, 1, 16), shape(2, 1, 256), shape(8, 2, 128)]
)
def test_any_heads_and_sizes(of: Shape) -> None:
    assert Case([1, 7, 8, 50], of).gap() < 1e-5


@kernels_run
@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("given", [{}, {"softcap": 2.0}, {"sinks_H": True}, {"softcap": 2.0, "sinks_H": True}])
@pytest.mark.parametrize("multiprocessors", [1, 20])
def test_windows_soft_caps_and_sinks(window: int | None, given: dict[str, Any], multiprocessors: int) -> None:
    if "sinks_H" in given:
        given = given | {"sinks_H": torch.tensor([3.0, -1.0, 0.0, 40.0], device=DEVICE)}
    case = Case([1, 260], shape(4, 2, 32))
    assert case.gap(Scores(scale=0.2, window=window, **given), make_kernels(multiprocessors)) < 1e-5


@kernels_run
@pytest.mark.parametrize("multiprocessors", [1, 20])
def test_a_row_without_keys_gathers_zeros(multiprocessors: int) -> None:
    case = Case([5, 300], shape(4, 2, 32))
    case.lengths_B[0] = 0
    got = case.read(make_kernels(multiprocessors))
    assert got[0].abs().max() == 0
    assert got[1].isfinite().all()


@kernels_run
def test_a_length_beyond_the_table_reads_to_its_end_and_a_wide_table_changes_nothing_but_rounding() -> None:
    case = Case([16, 24], shape(2, 1, 32))
    wanted = case.read(make_kernels())[1]
    case.lengths_B[1] += 7
    torch.testing.assert_close(case.read(make_kernels())[1], wanted)
    assert Case([9, 20], shape(4, 2, 32), more_width=100).gap() < 1e-5


@kernels_run
@pytest.mark.parametrize("multiprocessors", [1, 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_shared_prefix_is_read_from_the_first_row_only(multiprocessors: int, sinks: bool) -> None:
    case, tokens = Case([9, 300, 170, 200], shape(4, 2, 32)), 160
    shared = tokens // BLOCK_SIZE
    case.tables_BM[2:, :shared] = case.tables_BM[1, :shared]
    scores = Scores(scale=0.2, sinks_H=torch.tensor([3.0, -1.0, 0.0, 40.0], device=DEVICE) if sinks else None)
    wanted = case.read(PagedKernels(), scores)
    case.tables_BM[2:, :shared] = 0  # the scratch block, whose numbers are NaN
    given = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([0] + [tokens] * 3, [0, 3, 0, 0]))
    got = case.read(make_kernels(multiprocessors), scores, prefixes=Prefixes(*given))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@kernels_run
def test_queries_and_new_keys_may_be_views_of_one_tensor() -> None:
    of = shape(4, 2, 32)
    case = Case([1, 9], of)
    fused = torch.cat([torch.zeros(len(case.slots_N), of.heads, 32, device=DEVICE), *case.new], dim=1)
    _, keys, values = fused.split((4, 2, 2), dim=1)
    wanted = [pool.clone() for pool in case.pools]
    for pool in case.pools:
        pool.fill_(torch.nan)
    make_kernels().write(keys, values, Pages(*case.pools), case.slots_N)
    for pool, other in zip(case.pools, wanted, strict=True):
        torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)
    case.queries_BHD = torch.cat([case.queries_BHD, case.queries_BHD], dim=1)[:, 4:]
    assert case.gap() < 1e-5


@kernels_run
@pytest.mark.parametrize("where", ["queries", "keys", "values"])
def test_a_nan_stays_visible(where: str) -> None:
    case = Case([5, 300], shape(4, 2, 32))
    last = int(case.slots_N[-1])
    if where == "queries":
        case.queries_BHD[-1, 0, 3] = torch.nan
    else:
        case.pools[where == "values"].flatten(0, 1)[last, 0, 3] = torch.nan
    got = case.read(make_kernels())
    assert got[1].isnan().any()
    assert got[0].isfinite().all()


@kernels_run
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_what_is_not_finite_makes_its_scale_so(stored: torch.dtype, number: float) -> None:
    new = torch.randn(3, 1, 16, device=DEVICE)
    new[1, 0, 4] = number
    pools, scales = quantised_pools((1, 8, 1, 16), stored)
    make_kernels().write(new, new, Pages(*pools, *scales), torch.arange(3, device=DEVICE))
    assert scales[0][0, :3, 0].isfinite().tolist() == [True, False, True]
    make_kernels().write(0 * new[::2], 0 * new[::2], Pages(*pools, *scales), torch.arange(2, device=DEVICE))
    assert pools[0][0, :2].float().abs().max() == 0, "a head of zeros keeps a finite scale"
    assert scales[0][0, :2].isfinite().all()


def quantised_pools(size: tuple[int, ...], stored: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    pools = [torch.ones(size, dtype=torch.int8, device=DEVICE).view(stored) for _ in range(2)]
    return pools, [torch.ones(size[:3], device=DEVICE) for _ in range(2)]


@kernels_run
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.int8),
        (torch.float16, torch.float16),
        (torch.float16, torch.int8),
        *([(torch.bfloat16, x) for x in (torch.bfloat16, torch.int8, torch.float8_e4m3fn)] if HAS_CUDA else []),
        *([(torch.float32, torch.float8_e4m3fn)] if HAS_CUDA else []),  # the interpreter cuts where it should round
    ],
)
def test_pools_of_other_numbers(dtype: torch.dtype, stored: torch.dtype) -> None:
    assert first_fault(paged_faults(make_kernels(), shape(4, 2, 32), DEVICE, dtype, stored)) is None


@kernels_run
def test_reads_of_8_bit_floats() -> None:
    case = Case([1, 30], shape(4, 2, 32))
    pools, scales = quantised_pools(tuple(case.pools[0].shape), torch.float8_e4m3fn)
    kernels = make_kernels()
    kernels.write(*case.new, Pages(*pools, *scales), case.slots_N)
    got, wanted = (case.read(each, pages=Pages(*pools, *scales)) for each in (kernels, PagedKernels()))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
