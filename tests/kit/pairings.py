"""Pairs of conditions from bare values, for the tests that judge."""

from typing import Any

import numpy as np

from retrain.verdicts.study.judge import Pairing


def pairing(condition: Any, against: Any = None, *, labels: tuple[str, str] = ("a", "b"), **more: Any) -> Pairing:
    """A condition with these values against a baseline, of zeros unless given, over the seeds that both have."""
    right_N = np.asarray(condition, dtype=float)
    left_N = np.zeros(right_N.size) if against is None else np.asarray(against, dtype=float)
    size = min(left_N.size, right_N.size)
    values = {"baseline_N": left_N[:size], "condition_N": right_N[:size], "seeds": tuple(range(size))}
    return Pairing(baseline=labels[0], condition=labels[1], **{**values, **more})
