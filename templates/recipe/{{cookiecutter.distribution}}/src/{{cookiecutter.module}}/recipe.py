"""Recipe `{{ cookiecutter.name }}`: an algorithm as values of keys, each a default that any key that is set overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECIPE: Mapping[str, Any] = {
    "algorithm.advantage_mode": "grpo",
    "algorithm.advantage_params": {"scale": "std"},
    "algorithm.transform_mode": "none",
    "algorithm.loss": "ppo",
    "algorithm.clip_eps": 0.1,
    "optimizer.grad_clip_norm": 1.0,
}
