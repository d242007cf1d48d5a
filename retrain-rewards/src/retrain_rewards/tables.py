"""The TOML tables that belong to this distribution: `[reward]` and `[environment]`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import field_validator

from retrain.api import Kind, Table, key

JUDGE = "the judge reward is not built yet"
CUSTOM = "the custom reward is not built yet"
VERIFIERS = "verifiers environments are not built yet"


class RewardTable(Table):
    """How completions are scored, unless the data source brings its own verifier."""

    type: str = key("match", "Reward: match, math, judge, custom or a plugin.", names=Kind.REWARD)
    judge_model: str = key("", "Model that judges (judge).", pending=JUDGE)
    custom_module: str = key("", "Module of the scoring function (custom).", pending=CUSTOM)
    custom_function: str = key("score", "Name of the scoring function (custom).", pending=CUSTOM)


class EnvironmentTable(Table):
    """Tasks and scoring from an environment instead of `[data]` and `[reward]`."""

    provider: str = key("", "Environment provider: verifiers or a plugin; empty = none.", names=Kind.ENVIRONMENT)
    id: str = key("", "Environment, for example primeintellect/gsm8k.", pending=VERIFIERS)
    args: dict[str, Any] = key({}, "Its arguments, a table or JSON text of an object.", pending=VERIFIERS)
    max_turns: int = key(-1, "Turns per episode at most; -1 = as the environment says.", ge=-1, pending=VERIFIERS)
    auto_install: bool = key(False, "Install a missing environment from its hub.", pending=VERIFIERS)

    @field_validator("args", mode="before")
    @classmethod
    def _decoded(cls, args: object) -> object:
        if not isinstance(args, str):
            return args
        try:
            value = json.loads(args) if args.strip() else {}
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("the JSON text must decode to an object")
        return value
