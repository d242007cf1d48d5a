"""Whole tensors of parameters that may be sharded over ranks (`DTensor`), and parts of whole ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all parts of a sharded one together: then every rank has to call this."""
    gather = getattr(tensor, "full_tensor", None)
    found: Tensor = tensor if gather is None else gather()
    return found


def own_part(tensor: Tensor) -> Tensor:
    """The tensor itself, or what this rank holds of a sharded one; in the same memory."""
    part = getattr(tensor, "to_local", None)
    found: Tensor = tensor if part is None else part()
    return found


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Whole tensors by name, sharded ones in CPU memory, one at a time; without `keep` none, for other ranks' sake."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full if full is tensor else full.cpu()
    return found


def like(parameter: Tensor, full: Tensor) -> Tensor:
    """The numbers of a whole tensor on the device of the parameter, sharded as it is; each rank has them all."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return full.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = parameter
    found: Tensor = distribute_tensor(full.to(own_part(parameter).device), mesh, sharded.placements)
    return found


def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it into its part."""
    with torch.no_grad():
        own_part(target.detach()).copy_(own_part(like(target, full)))
