"""What a policy loss must do with the tokens of a step."""

from __future__ import annotations

from retrain.testing.check import Run

LOSS: tuple[Run, ...] = ()
