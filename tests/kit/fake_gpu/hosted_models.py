"""Models of transformers' own modules on a fake GPU: read and probed with real numbers on the host, then moved there.

The probe compares logits, which a fake card does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from retrain_local.model import hf_model  # with PEFT, which looks for a card when it is imported
from tests.kit.causal_types import small_model


def hosted_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a small random model of this type; `changes` are of its configuration."""
    small_model(kind, **changes).save_pretrained(folder)
    return folder


@contextmanager
def probed_on_the_host() -> Iterator[None]:
    load_base, route_of = hf_model.load_base, hf_model.route_of

    def load(folder: Any, place: Any) -> Any:
        with _disable_current_modes():
            return load_base(folder, replace(place, trainer=torch.device("cpu")))

    def route(base: nn.Module, folder: Any) -> Any:
        with _disable_current_modes():
            found = route_of(base, folder)
        shapes: dict[int, Tensor] = {}
        _moved(base, lambda x: shapes.setdefault(id(x), torch.empty(x.shape, dtype=x.dtype, device="cuda:0")))
        return found

    as_subclass = Tensor.as_subclass

    def unmarked(x: Tensor, kind: type[Tensor]) -> Tensor:
        # Attention that is called by name needs no marks on its keys; a fake tensor has its class already.
        return x if isinstance(x, FakeTensor) else as_subclass(x, kind)

    with (
        mock.patch.object(Tensor, "as_subclass", unmarked),
        mock.patch.object(hf_model, "load_base", load),
        mock.patch.object(hf_model, "route_of", route),
        mock.patch.object(nn.Module, "_apply", _moved),
    ):
        yield


def _moved(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replace parameters by new ones: PyTorch would put a fake tensor into the parameter that there is."""
    with torch.no_grad():
        for each in module.modules() if recurse else (module,):
            for name, p in each._parameters.items():
                if p is not None and (new := function(p)) is not p:
                    each._parameters[name] = nn.Parameter(new, requires_grad=p.requires_grad)
            for name, buffer in each._buffers.items():
                each._buffers[name] = None if buffer is None else function(buffer)
    return module
