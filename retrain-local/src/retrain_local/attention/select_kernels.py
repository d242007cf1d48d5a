"""The attention kernels of `[inference] attention_kernel`, each compared with plain PyTorch before it is used."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain, product
from typing import TypeVar

import torch
from torch import Tensor

from retrain.api import Config, ConfigError, Problem
from retrain_local.attention import varlen
from retrain_local.attention.packed import MakeAttend, PaddedAttend, Spans
from retrain_local.attention.pages import STORED, PagedKernels, Pages, Prefixes, shared_heads, zeros
from retrain_local.decoder import Attend, Scores, Shape
from retrain_local.devices.kernel_trials import difference, first_fault

log = logging.getLogger("retrain")
T = TypeVar("T")
KEY = "inference.attention_kernel"
LARGEST_GROUP = 64  # query heads per key head that one Triton program can hold
FA4 = "flash_attn.cute.interface"  # what PyTorch itself looks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Attention of one device: `packed` for training and prompts, `paged` for decoding, one token per row.

    `paged` None is the engine's own reader in plain PyTorch. `is_ordered`: `packed` sums its gradient in a fixed order
    on CUDA without PyTorch's deterministic mode around it.
    """

    packed: MakeAttend
    paged: PagedKernels | None
    is_ordered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A device and the numbers that attention computes with there; `stored`: dtype of the pool, `exact`: same bits."""

    device: torch.device
    dtype: torch.dtype
    shape: Shape
    stored: torch.dtype
    exact: bool = True


def kernels_for(
    config: Config, device: torch.device, dtype: torch.dtype, shape: Shape, *, exact: bool = True
) -> Kernels:
    """Return the kernels that `attention_kernel` names, or for `default` the best ones; ConfigError if unavailable."""
    if shape.has_chunks:
        log.debug("no kernel on %s masks chunks; attention runs in plain PyTorch", device)
        return Kernels(packed=PaddedAttend, paged=None)
    name = config.value(KEY, "default")
    stored = STORED.get(config.inference.kv_cache_dtype, dtype)
    site = Site(device=device, dtype=dtype, shape=shape, stored=stored, exact=exact)
    required = {"flash": _flash, "cutlass": _cutlass}
    try:
        if name == "tk":
            raise _RefusedError("ThunderKittens has no release to install, so its attention is not served")
        packed = required[name](site) if name in required else _at_hand("flash", _flash, site) or PaddedAttend
        paged = _triton(site) if name == "triton" else _at_hand("triton", _triton, site)
    except _RefusedError as refused:
        what, why = f"attention_kernel = {name!r} is refused on {device}", str(refused)
        fix, where = 'use "default": it takes the best available kernel', config.place(KEY)
        problem = Problem(code="engine.kernel-unavailable", where=where, what=what, why=why, fix=fix)
        raise ConfigError(problem) from refused
    return Kernels(packed=packed, paged=paged, is_ordered=exact and packed is not PaddedAttend)


class _RefusedError(Exception):
    """A kernel is unavailable."""


class _WrongError(_RefusedError):
    """A kernel has a fault, though this device supports it."""


def _at_hand(name: str, get: Callable[[Site], T], site: Site) -> T | None:
    try:
        return get(site)
    except _WrongError as wrong:
        log.warning("attention kernel %r is not used on %s: %s", name, site.device, wrong)
    except _RefusedError as refused:
        log.debug("attention kernel %r is not used on %s: %s", name, site.device, refused)
    return None


def _flash(site: Site) -> MakeAttend:
    if refusal := varlen.refusal(site.device):
        raise _RefusedError(refusal)
    if site.dtype not in varlen.DTYPES:
        raise _RefusedError(f"flash attention computes in 16 bits, the model is {site.dtype}")
    make = partial(varlen.VarlenAttend, exact=site.exact)
    if fault := first_fault(packed_faults(make, site.shape, site.device, site.dtype)):
        raise _WrongError(fault)
    return make


def _triton(site: Site) -> PagedKernels:
    _need_cuda(site, (8, 0), "the Triton kernels")
    if find_spec("triton") is None:
        raise _RefusedError("the package triton is not installed")
    if site.stored is torch.float8_e4m3fn:
        _need_cuda(site, (8, 9), "a pool of 8-bit floats")
    group = site.shape.heads // site.shape.kv_heads
    if group > LARGEST_GROUP or max(site.shape.head_size, site.shape.value_size) > varlen.LARGEST_HEAD:
        raise _RefusedError(f"{group} query heads per key head of size {site.shape.head_size} are too many for it")
    try:
        from retrain_local.attention.paged_triton import TritonPages
    except ImportError as error:
        raise _WrongError(f"triton cannot be imported: {error}") from error
    kernels: PagedKernels = TritonPages(torch.cuda.get_device_properties(site.device).multi_processor_count)
    given = site.shape, site.device, site.dtype, site.stored
    # No multiprocessors, no cut: keys in one stretch are another variant of the kernel.
    if fault := first_fault(chain.from_iterable(paged_faults(TritonPages(n), *given) for n in (0, MANY))):
        raise _WrongError(fault)
    return kernels


def _cutlass(site: Site) -> MakeAttend:
    """Put flash attention 4, written in CUTLASS's Python, in place of the kernel behind `varlen_attn`."""
    _need_cuda(site, (9, 0), "flash attention 4")
    try:
        is_installed = find_spec(FA4) is not None
    except ImportError:  # a parent package that is not installed
        is_installed = False
    if not is_installed:
        raise _RefusedError(f"the module {FA4}, of the package flash-attn-4, is not installed")
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        raise _RefusedError(f"PyTorch {torch.__version__} cannot take flash attention from another package")
    try:
        attention.activate_flash_attention_impl("FA4")
    except (ImportError, RuntimeError, ValueError) as error:
        raise _RefusedError(f"{FA4} does not register with PyTorch: {error}") from error
    try:
        return _flash(site)
    except _RefusedError:
        attention.restore_flash_attention_impl()
        raise


def _need_cuda(site: Site, least: tuple[int, int], what: str) -> None:
    if site.device.type != "cuda":
        raise _RefusedError(f"{what} needs CUDA, this is {site.device.type!r}")
    found = torch.cuda.get_device_capability(site.device)
    if found < least:
        wanted, has = (".".join(map(str, pair)) for pair in (least, found))
        raise _RefusedError(f"{what} needs compute capability {wanted}, this GPU has {has}")


TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest element
# Of 8-bit pools: half a unit in the last place, plus the rounding of bf16.
TOLERANCE |= {torch.int8: 1e-2, torch.float8_e4m3fn: 7e-2}
CASE = Spans(lengths=(40, 1, 19, 130, 3, 5), prefixes=(-1, 0, 0, -1, 3, 3))
ROW_LENGTHS = 1, 16, 250, 135, 0
SHARED = (0, 0, 128, 128, 0), (0, 0, 2, 0, 0)  # keys of each row, and `Prefixes.rows_B`
BLOCK_SIZE = 16
TABLE_WIDTHS = 16, 24, 32, 64  # blocks: many multiprocessors cut these keys into 2, 4, 4 and 8 stretches
MANY = 2**10  # multiprocessors
WINDOWS = None, 16  # Triton compiles another variant for numbers that are no multiple of 16, as windows are


def packed_faults(make: MakeAttend, shape: Shape, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield where outputs and gradients differ from `PaddedAttend`."""
    for window in WINDOWS:
        scores = Scores(scale=shape.head_size**-0.5, window=window)
        got, wanted = (
            _differentiated(maker(CASE, device), shape, device, dtype, scores) for maker in (make, PaddedAttend)
        )
        for name, one, other in zip(("output", "dq", "dk", "dv"), got, wanted, strict=True):
            yield from difference(name, one, other, TOLERANCE[dtype])


def _differentiated(
    attend: Attend, shape: Shape, device: torch.device, dtype: torch.dtype, scores: Scores
) -> tuple[Tensor, ...]:
    tokens = CASE.num_tokens
    sizes = (shape.heads, shape.head_size), (shape.kv_heads, shape.head_size), (shape.kv_heads, shape.value_size)
    inputs = [_numbers((tokens, *size), dtype, device, at).requires_grad_() for at, size in enumerate(sizes)]
    queries_NHD, keys_NKD, values_NKD = inputs
    with torch.enable_grad():
        out = attend(0, queries_NHD, keys_NKD, values_NKD, scores)
        weighed = (out.float() * _numbers((tokens, shape.heads, shape.value_size), torch.float32, device, 3)).sum()
        return out.detach(), *torch.autograd.grad(weighed, inputs)


def paged_faults(
    kernels: PagedKernels, shape: Shape, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> Iterator[str]:
    """Yield where these kernels differ from the definition over a pool of `stored`."""
    blocks = [-(-length // BLOCK_SIZE) for length in ROW_LENGTHS]
    table = 1 + torch.arange(sum(blocks), dtype=torch.int32).flip(0)  # block 0 is scratch
    padded_BM = torch.nn.utils.rnn.pad_sequence(list(table.split(blocks)), batch_first=True).to(device)
    count = max(SHARED[0]) // BLOCK_SIZE
    padded_BM[3, :count] = padded_BM[2, :count]
    lengths_B = torch.tensor(ROW_LENGTHS, dtype=torch.int32, device=device)
    cells = 1 + sum(blocks), BLOCK_SIZE, shape.kv_heads
    new_keys, new_values = (
        _numbers((math.prod(cells[:2]), shape.kv_heads, size), dtype, device, at)
        for at, size in enumerate((shape.head_size, shape.value_size))
    )
    pools = (zeros((*cells, new.shape[2]), stored, device) for new in (new_keys, new_values))
    pages = Pages(*pools, *(torch.zeros(cells, device=device) for _ in range(2) if stored.itemsize == 1))
    kernels.write(new_keys, new_values, pages, torch.arange(len(new_keys), device=device))
    for name, new, (pool, scales) in zip(("keys", "values"), (new_keys, new_values), pages.sides, strict=True):
        found = pool.float() if scales is None else pool.float() * scales[..., None]
        yield from difference(f"stored {name}", found.flatten(0, 1), new, TOLERANCE[stored])
    queries_BHD = _numbers((len(ROW_LENGTHS), shape.heads, shape.head_size), dtype, device, 2)
    shared = Prefixes(*(torch.tensor(each, dtype=torch.int32, device=device) for each in SHARED))
    cases: list[tuple[int | None, Prefixes | None]] = [(window, None) for window in WINDOWS]
    cases += [(None, shared)] * (2 * shape.heads // shape.kv_heads <= shared_heads(shape.value_size))
    for width, (window, prefixes) in product(TABLE_WIDTHS, cases):
        scores = Scores(scale=shape.head_size**-0.5, window=window)
        tables_BM = torch.nn.functional.pad(padded_BM, (0, width - padded_BM.shape[1]))
        given = queries_BHD, pages, tables_BM, lengths_B, scores, prefixes
        got, wanted = (one.read(*given) for one in (kernels, PagedKernels()))
        yield from difference("output", got, wanted, TOLERANCE[dtype])


def _numbers(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return random numbers between -1 and 1, equal on every device."""
    # Numbers of a formula cancel in the sums over heads and tokens: in 16 bits rounding was most of a gradient.
    random = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * random - 1).to(device, dtype)
