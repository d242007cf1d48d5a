"""The TOML tables that belong to this distribution: `[reward]` and `[environment]`."""

from __future__ import annotations

import re
from functools import partial
from typing import Literal

from pydantic import ValidationInfo, field_validator

import retrain.api
from retrain.api import Config, Kind, key

SCORERS = frozenset({"match", "math", "code", "judge", "custom"})  # our own rewards, whose keys we know


def reward_names(config: Config) -> tuple[str, ...]:
    return tuple(config.reward.weights or (config.reward.type,))


def time_limit_of(config: Config, name: str) -> float:
    """Return the time limit of one score: `[scoring.limits.NAME] timeout_s`, or `[scoring] timeout_s`."""
    limits = config.scoring.limits.get(name)
    own = limits.timeout_s if limits is not None else None
    return config.scoring.timeout_s if own is None else own


_code_key = partial(key, needs="reward code")
_judge_key = partial(key, needs="reward judge")
_pace_key = partial(_judge_key, free_on_resume=True)  # how and how fast the judge is reached


class RewardTable(retrain.api.RewardTable):
    """The scoring of completions, unless the data source brings its own verifier."""

    type: str = key(
        "match", "Reward: match, math, code, judge, custom, none (a teacher teaches) or a plugin.", names=Kind.REWARD
    )
    answer: Literal["box", "last_number"] = key("box", "The answer in a completion (match).", needs="reward match")
    unfinished: Literal["refuse", "accept"] = key(
        "refuse", "An unfinished answer, where the reference is a finished value (math).", needs="reward math"
    )
    strict: bool = key(True, "false = equality to math-verify is enough, but can be gamed (math).", needs="reward math")
    tests: str = _code_key("tests", "Column that holds the tests of an example (code).", min_length=1)
    program: Literal["block", "text"] = _code_key(
        "block", "The program in a completion: the last fenced block, or the whole text (code)."
    )
    partial: bool = _code_key(False, "The share of the tests that pass, instead of 1 for all and 0 for less (code).")
    test_timeout_s: float = _code_key(2.0, "Seconds that the program may take for one test (code).", gt=0.0)
    test_tolerance: float = _code_key(
        0.0, "Difference allowed of a float, relative to the larger of 1 and the expected one (code).", ge=0.0, lt=1.0
    )
    numpy: bool = _code_key(False, "Let programs and tests import the numpy of this environment (code).")
    test_memory_mb: int = _code_key(1024, "Memory of the program, in MiB (code).", ge=64)
    unsafe: bool = _code_key(False, "Run programs even where no sandbox works, with your rights (code).")
    judge_model: str = _judge_key("", "Model that judges (judge).")
    judge_base_url: str = _judge_key("", "API of the judge, up to /v1; empty = OpenAI.")
    judge_api_key_env: str = _pace_key("OPENAI_API_KEY", "Environment variable that holds the judge's key.")
    judge_prompt: str = _judge_key("", "Rubric with {question}, {reference}, {answer}; empty = a strict one.")
    judge_max_tokens: int = _judge_key(1024, "Tokens of the judge's reply at most.", ge=1)
    judge_temperature: float = _judge_key(0.0, "Its sampling temperature; -1 = not sent.", ge=-1.0, le=2.0)
    judge_concurrency: int = _pace_key(8, "Calls at the same time.", ge=1)
    judge_requests_per_minute: int = _pace_key(0, "Calls per minute; 0 = unlimited.", ge=0)
    judge_tokens_per_minute: int = _pace_key(0, "Tokens per minute, both ways; 0 = unlimited.", ge=0)
    judge_retries: int = _pace_key(4, "Further tries of a call that failed, with back-off.", ge=0)
    judge_price_in: float = _pace_key(0.0, "Dollars per million tokens sent.", ge=0.0)
    judge_price_out: float = _pace_key(0.0, "Dollars per million tokens received.", ge=0.0)
    custom_module: str = key(
        "", "Module or .py file of the scoring function (custom).", reads="code", needs="reward custom"
    )
    custom_function: str = key("score", "Name of the scoring function (custom).", needs="reward custom")

    @field_validator("weights")
    @classmethod
    def _usable(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        # The resolved config.toml of a run holds every key, so type = "match" next to weights is no contradiction.
        if weights and info.data.get("type", "match") != "match":
            raise ValueError(f"replaces type = {info.data['type']!r}: name that reward here, or remove one of the two")
        for name, weight in weights.items():
            if not name or weight == 0.0:
                raise ValueError(f"{name!r} has weight {weight}: every reward needs a name and a weight that is not 0")
        if weights and max(weights.values()) <= 0.0:
            raise ValueError("no weight is positive, so nothing would be rewarded")
        return weights

    @field_validator("judge_model", "custom_module", "unsafe")
    @classmethod
    def _read_by_a_reward(cls, value: str | bool, info: ValidationInfo) -> str | bool:
        reader = "code" if info.field_name == "unsafe" else str(info.field_name).partition("_")[0]
        if value and "type" in info.data and "weights" in info.data:
            used = info.data["weights"] or {info.data["type"]: 1.0}
            if reader not in used and SCORERS.issuperset(used):
                raise ValueError(f"is read only by reward {reader!r}, but the rewards are: {', '.join(used)}")
        return value

    @field_validator("judge_api_key_env")
    @classmethod
    def _names_a_variable(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # not shown: it may be the key itself
            raise ValueError("must be the name of an environment variable, in capitals; the key itself never goes here")
        return name


class EnvironmentTable(retrain.api.EnvironmentTable):
    """Tasks and scoring from an environment instead of `[data]` and `[reward]`."""

    @field_validator("id")
    @classmethod
    def _belongs_to_a_provider(cls, id_: str, info: ValidationInfo) -> str:
        provider = info.data.get("provider", "")
        if provider == "verifiers" and not id_:
            raise ValueError('provider "verifiers" needs one, for example "primeintellect/gsm8k"')
        if id_ and not provider:
            raise ValueError('is read by no provider: set provider = "verifiers", or remove it')
        if id_ and provider in ("mcp", "openenv"):
            raise ValueError(f"is not read by provider {provider!r}, whose servers are in args: remove it")
        return id_
