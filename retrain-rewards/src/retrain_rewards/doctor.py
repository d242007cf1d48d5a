"""The findings of `retrain doctor` about this distribution: its extras, the judge, and files with tasks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from retrain.api import Config, Diagnosis, diagnose_extra, diagnose_server
from retrain_rewards.sandbox.sandbox import FIX, find_sandbox
from retrain_rewards.tables import RewardTable, reward_names

NAME = "retrain-rewards"
READ_PATHS = ("files", "hub", "math", "gsm8k", "dapo-math", "deepscaler", "countdown")


def diagnose(config: Config | None) -> list[Diagnosis]:
    """Check the extras, the sandbox and, if the configuration uses them, the judge's key and server, `[data] path`."""
    if config is None:
        return [*_extras(judges=False, source="", provider=""), _sandbox(needed=False, unsafe=False)]
    provider, table = config.environment.provider, config.table("reward", RewardTable)
    brings_tasks = provider not in ("", "mcp")  # mcp plays the tasks of [data]
    source = "" if brings_tasks else config.data.source
    rewards = () if brings_tasks else reward_names(config)
    shadow: str = "" if brings_tasks else getattr(table, "shadow", "")  # a key of the core's own plugins
    shadow_table = RewardTable()
    if shadow in ("judge", "code"):
        shadow_table = RewardTable.model_validate({"type": shadow, **getattr(table, "shadow_params", {})})
    found = _extras(judges="judge" in (*rewards, shadow), source=source, provider=provider)
    if provider == "openenv" and (url := config.environment.args.get("url")):
        found.append(diagnose_server("environment", str(url), needed=True))
    found.append(_sandbox(needed="code" in (*rewards, shadow), unsafe=table.unsafe or shadow_table.unsafe))
    if "judge" in rewards:
        found += _judge(table)
    if shadow == "judge":
        found += _judge(shadow_table, "shadow's judge")
    path = Path(config.data.path).expanduser()
    if source in READ_PATHS and config.data.path and (source != "hub" or path.exists()):
        what = f"{config.place('data.path')}: {path} {'cannot be read' if path.exists() else 'does not exist'}"
        missing = Diagnosis(name="data", status="missing", detail=what, fix="correct the path", needed=True)
        found.append(replace(missing, status="ok", detail=str(path), fix="") if os.access(path, os.R_OK) else missing)
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
    key = Diagnosis(name=f"{name}'s key", status="ok", detail=f"{variable} is set", needed=True)
    if not os.environ.get(variable):
        fix = f"set {variable}, or name another variable in [reward] judge_api_key_env"
        # a private server may need none
        key = replace(key, status="warn" if url else "missing", detail=f"{variable} is not set", fix=fix)
    return [*found, key]
