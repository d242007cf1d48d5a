"""LoRA-Squeeze: which rank an adapter really needs, and the same adapter at a smaller rank.

Import `analyze_adapter`, `compress_adapter` and `auto_squeeze` from here; each loads its module on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.tools.squeeze.compress import CompressedAdapter, compress_adapter
    from retrain.tools.squeeze.job import auto_squeeze
    from retrain.tools.squeeze.spectrum import SqueezeAnalysis, analyze_adapter

__all__ = ["CompressedAdapter", "SqueezeAnalysis", "analyze_adapter", "auto_squeeze", "compress_adapter"]

_HOMES = {
    "SqueezeAnalysis": "spectrum",
    "analyze_adapter": "spectrum",
    "CompressedAdapter": "compress",
    "compress_adapter": "compress",
    "auto_squeeze": "job",
}


def __getattr__(name: str) -> Any:
    """A public name from its module, which is imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"retrain.tools.squeeze.{_HOMES[name]}"), name)
