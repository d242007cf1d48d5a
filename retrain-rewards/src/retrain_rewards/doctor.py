"""The findings of `retrain doctor` about this distribution: its extras, the judge, and files with tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.api import Config, Diagnosis, diagnose_extra, diagnose_server
from retrain_rewards.sandbox.sandbox import FIX, find_sandbox
from retrain_rewards.tables import RewardTable, reward_names

NAME = "retrain-rewards"
READ_PATHS = ("files", "hub", "math", "gsm8k", "dapo-math", "deepscaler", "countdown")


def diagnose(config: Config | None) -> list[Diagnosis]:
    """The extras, the sandbox and, if the configuration uses them, the judge's key and server, `[data] path`."""
    if config is None:
        return [*_extras(judges=False, source="", provider=""), _sandbox(needed=False, unsafe=False)]
    provider = config.environment.provider
    brings_tasks = provider not in ("", "mcp")  # mcp plays the tasks of [data]
    source = "" if brings_tasks else config.data.source
    rewards = () if brings_tasks else reward_names(config)
    shadow = "" if brings_tasks else config.value("reward.shadow", "")
    of_shadow: Mapping[str, Any] = config.value("reward.shadow_params", {})
    judges = "judge" in (*rewards, shadow)
    found = _extras(judges=judges, source=source, provider=provider)
    if url := _server_url(config, provider):
        found.append(diagnose_server("environment", url, needed=True))
    unsafe = config.table("reward", RewardTable).unsafe or (shadow == "code" and of_shadow.get("unsafe", False))
    found.append(_sandbox(needed="code" in (*rewards, shadow), unsafe=unsafe))
    if "judge" in rewards:
        found += _judge(config.table("reward", RewardTable))
    if shadow == "judge":
        found += _judge(RewardTable.model_validate({"type": shadow, **of_shadow}), "shadow's judge")
    is_of_hub = source == "hub" and not Path(config.data.path).expanduser().exists()
    if source in READ_PATHS and config.data.path and not is_of_hub:
        found.append(_path(config))
    return found


def _extras(*, judges: bool, source: str, provider: str) -> list[Diagnosis]:
    wanted = {
        "judge": ("reward 'judge'", judges),
        "reasoning-gym": ("data source 'reasoning_gym'", source == "reasoning_gym"),
        "verifiers": ("environments of the verifiers library", provider == "verifiers"),
        "mcp": ("environment 'mcp'", provider == "mcp"),
        "openenv": ("environment 'openenv'", provider == "openenv"),
    }
    return [diagnose_extra(NAME, extra, purpose=purpose, needed=needed) for extra, (purpose, needed) in wanted.items()]


def _server_url(config: Config, provider: str) -> str:
    arguments: dict[str, Any] = config.environment.args
    return str(arguments.get("url", "")) if provider == "openenv" else ""


def _sandbox(*, needed: bool, unsafe: bool) -> Diagnosis:
    sandbox, reason = find_sandbox()
    if sandbox is not None:
        filtered = ", with a filter of system calls" if sandbox.calls else ", without a filter of system calls"
        return Diagnosis(name="sandbox", status="ok", detail=f"{sandbox.name} works{filtered}", needed=needed)
    if unsafe and needed:
        detail = f"{reason}: programs run WITHOUT ONE, with your rights, by [reward] unsafe"
        return Diagnosis(name="sandbox", status="warn", detail=detail, fix=FIX, needed=True)
    detail = f"{reason}; reward 'code' needs one"
    return Diagnosis(name="sandbox", status="missing", detail=detail, fix=FIX, needed=needed)


def _judge(table: RewardTable, name: str = "judge") -> list[Diagnosis]:
    url, variable = table.judge_base_url, table.judge_api_key_env
    found = [diagnose_server(name, url, needed=True)] if url else []
    if os.environ.get(variable):
        return [*found, Diagnosis(name=f"{name}'s key", status="ok", detail=f"{variable} is set", needed=True)]
    detail = f"{variable} is not set"
    fix = f"set {variable}, or name another variable in [reward] judge_api_key_env"
    key = Diagnosis(name=f"{name}'s key", status="missing", detail=detail, fix=fix, needed=True)
    return [*found, replace(key, status="warn") if url else key]  # a private server may need none


def _path(config: Config) -> Diagnosis:
    place, path = config.place("data.path"), Path(config.data.path).expanduser()
    readable = path.exists() and os.access(path, os.R_OK)
    if readable:
        return Diagnosis(name="data", status="ok", detail=str(path), needed=True)
    what = "cannot be read" if path.exists() else "does not exist"
    fix = "correct the path, or make it readable"
    return Diagnosis(name="data", status="missing", detail=f"{place}: {path} {what}", fix=fix, needed=True)
