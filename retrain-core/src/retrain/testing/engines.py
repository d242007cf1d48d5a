"""What an inference engine must do; it is tried inside the backend `local`, or with a toy policy where there is none.

An engine that cannot repeat a seed says so with `EngineTraits(determinism=Determinism.NONE)` as its traits.
"""

from __future__ import annotations

from retrain.testing.sampling import SAMPLING

INFERENCE_ENGINE = SAMPLING
