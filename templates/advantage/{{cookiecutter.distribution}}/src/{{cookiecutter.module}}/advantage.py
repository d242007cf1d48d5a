"""Advantage `{{ cookiecutter.name }}`: each completion against the mean of the others in its group."""

from __future__ import annotations

import numpy as np
from retrain.api import Floats


def leave_one_out(rewards_G: Floats) -> Floats:
    """A_i = r_i - mean of r_j over j != i; 0 in a group of one (RLOO, arXiv:2402.14740)."""
    num_others = len(rewards_G) - 1
    if num_others < 1:
        return np.zeros_like(rewards_G)
    baseline_G: Floats = (rewards_G.sum() - rewards_G) / num_others
    return rewards_G - baseline_G
