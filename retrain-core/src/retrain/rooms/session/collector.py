"""Python's garbage collector during a start: it would look through a million new objects again and again for nothing.

All that imports make stays to the end of the process. Collecting meanwhile costs a tenth of a second with PyTorch, and
later each full collection a few more, for as long as it has those objects to look through.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """No collection in the block until `resume_collector`, and as before after it."""
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
    """Collect again, and only what is made from now on; does nothing unless the collector is paused."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
