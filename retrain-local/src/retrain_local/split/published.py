"""What the sampler uses, and what it used before: the latter is what the completions at hand were drawn with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from retrain_local.model.checkpoint import Published
from retrain_local.model.pair import Pair


class Hindsight:
    """Copies, in the CPU's memory, of the last adapter that was published and of the one before it.

    A step is trained on completions that were drawn before the last `publish`, while those of the next step are drawn
    with it. A run that is resumed draws the former again, so `before` is part of checkpoints.
    """

    def __init__(self, pair: Pair) -> None:
        self.last = self.before = Published(adapter=_copied(pair.adapter), version=0)

    def published(self, pair: Pair, version: int) -> None:
        """The trained adapter was published."""
        self.before, self.last = self.last, Published(adapter=_copied(pair.adapter), version=version)

    def restored(self, published: Published) -> None:
        """This one was published by a resumed run, which forgets any other."""
        self.before = self.last = published


def _copied(adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in adapter.items()}
