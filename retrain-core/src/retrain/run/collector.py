"""Pauses Python's garbage collector during start-up, where it would scan a million new objects repeatedly in vain.

Objects created by imports live until the process ends. Collecting during the imports costs 0.1 s with PyTorch, and
every later full collection that still has to scan them costs a few tenths more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Collect nothing in the block until `resume_collector`; restore the former setting after it."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


def resume_collector() -> None:
    """Collect again, but only objects created from now on; does nothing unless the collector is paused."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
