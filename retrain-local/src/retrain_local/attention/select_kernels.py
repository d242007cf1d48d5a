"""Selects the attention kernels for a device by `[inference] attention_kernel`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

import torch

from retrain.api import Config, ConfigError, Problem
from retrain_local.attention import varlen
from retrain_local.attention.kernel_check import packed_fault, paged_fault
from retrain_local.attention.padded import PaddedAttend
from retrain_local.attention.pages import STORED, PagedKernels
from retrain_local.attention.spans import Spans
from retrain_local.decoder import Attend, Shape

log = logging.getLogger("retrain")
T = TypeVar("T")
KEY = "inference.attention_kernel"
MakeAttend = Callable[[Spans, torch.device], Attend]
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
    """Where attention is computed, on what; `stored` is what the pool of keys and values holds.

    `exact`: the same bits every time. It needs PyTorch's process-wide deterministic mode for the length of a call, and
    has to be False where another thread uses PyTorch.
    """

    device: torch.device
    dtype: torch.dtype
    shape: Shape
    stored: torch.dtype
    exact: bool = True


def kernels_for(
    config: Config, device: torch.device, dtype: torch.dtype, shape: Shape, *, exact: bool = True
) -> Kernels:
    """The kernels that `attention_kernel` names, each checked on small cases on this device before it is used.

    `default` takes the best available kernel, or plain PyTorch, with a warning if one should have worked; any other
    name is honoured, or refused with a ConfigError that gives the reason.
    """
    name = config.value(KEY, "default")
    stored = STORED.get(config.inference.kv_cache_dtype, dtype)
    site = Site(device=device, dtype=dtype, shape=shape, stored=stored, exact=exact)
    asked = {"flash": _flash, "cutlass": _cutlass}
    try:
        if name == "tk":
            raise _RefusedError("ThunderKittens has no release to install, so its attention is not served")
        packed = asked[name](site) if name in asked else _at_hand("flash", _flash, site) or PaddedAttend
        paged = _triton(site) if name == "triton" else _at_hand("triton", _triton, site)
    except _RefusedError as refused:
        what, why = f"attention_kernel = {name!r} is refused on {device}", str(refused)
        fix = 'use "default", which takes the best available kernel'
        raise ConfigError(Problem(where=config.place(KEY), what=what, why=why, fix=fix)) from refused
    return Kernels(packed=packed, paged=paged, is_ordered=exact and packed is not PaddedAttend)


class _RefusedError(Exception):
    """Why a kernel is unavailable."""


class _WrongError(_RefusedError):
    """A kernel that should work here, but does not."""


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
    return _proven(partial(varlen.VarlenAttend, exact=site.exact), site)


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
    if fault := paged_fault(kernels, site.shape, site.device, site.dtype, site.stored):
        raise _WrongError(fault)
    return kernels


def _cutlass(site: Site) -> MakeAttend:
    """Flash attention 4, written in CUTLASS's Python, takes the place of the kernel behind `varlen_attn`."""
    _need_cuda(site, (9, 0), "flash attention 4, which is what PyTorch has of CUTLASS's Python,")
    if not _is_installed(FA4):
        raise _RefusedError(f"looked for the module {FA4}, of the package flash-attn-4: it is not installed")
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


def _proven(make: MakeAttend, site: Site) -> MakeAttend:
    if fault := packed_fault(make, site.shape, site.device, site.dtype):
        raise _WrongError(fault)
    return make


def _need_cuda(site: Site, least: tuple[int, int], what: str) -> None:
    if site.device.type != "cuda":
        raise _RefusedError(f"{what} needs CUDA, this is {site.device.type!r}")
    found = torch.cuda.get_device_capability(site.device)
    if found < least:
        wanted, has = (".".join(map(str, pair)) for pair in (least, found))
        raise _RefusedError(f"{what} needs compute capability {wanted}, this GPU has {has}")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # a parent package that is not installed
        return False
