"""Algorithms of the field as recipes: defaults for `[algorithm]` and `[training]` under the name of the paper.

Each sets the credit and the loss of its source. Temperature, learning rate and group size stay the user's: papers
choose them for their models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GROUP_STD = {"algorithm.advantage_mode": "grpo", "algorithm.advantage_params": {"scale": "std"}}
NO_TRANSFORM = {"algorithm.transform_mode": "none"}

DAPO: Mapping[str, Any] = {  # arXiv:2503.14476, section 3 and table 1
    **GROUP_STD,
    **NO_TRANSFORM,
    "algorithm.loss": "ppo",
    "algorithm.clip_eps": 0.2,
    "algorithm.clip_eps_high": 0.28,
}
CISPO: Mapping[str, Any] = {  # arXiv:2506.13585, section 3.1
    **GROUP_STD,
    **NO_TRANSFORM,
    "algorithm.loss": "cispo",
}
