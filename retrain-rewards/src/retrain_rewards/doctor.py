"""The findings of `retrain doctor` about this distribution: its extras, the judge, and files with tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from retrain.api import Config, Diagnosis, diagnose_extra, diagnose_server

NAME = "retrain-rewards"


def diagnose(config: Config | None) -> list[Diagnosis]:
    """The three extras and, if the configuration uses them, the judge's key and server, and `[data] path`."""
    if config is None:
        return _extras(judges=False, source="", provider="")
    provider = config.value("environment.provider", "")
    source = "" if provider else config.data.source
    weights: Mapping[str, float] = config.value("reward.weights", {})
    judges = not provider and "judge" in (weights or {config.value("reward.type", "match")})
    found = _extras(judges=judges, source=source, provider=provider)
    if judges:
        found += _judge(config)
    if source in ("files", "math") and config.data.path:
        found.append(_path(config))
    return found


def _extras(*, judges: bool, source: str, provider: str) -> list[Diagnosis]:
    wanted = {
        "judge": ("reward 'judge'", judges),
        "reasoning-gym": ("data source 'reasoning_gym'", source == "reasoning_gym"),
        "verifiers": ("environments of the verifiers library", provider == "verifiers"),
    }
    return [diagnose_extra(NAME, extra, purpose=purpose, needed=needed) for extra, (purpose, needed) in wanted.items()]


def _judge(config: Config) -> list[Diagnosis]:
    url = config.value("reward.judge_base_url", "")
    found = [diagnose_server("judge", url, needed=True)] if url else []
    variable = config.value("reward.judge_api_key_env", "OPENAI_API_KEY")
    if os.environ.get(variable):
        return [*found, Diagnosis(name="judge's key", status="ok", detail=f"{variable} is set", needed=True)]
    detail = f"{variable} is not set"
    fix = f"set {variable}, or name another variable in [reward] judge_api_key_env"
    key = Diagnosis(name="judge's key", status="missing", detail=detail, fix=fix, needed=True)
    return [*found, replace(key, status="warn") if url else key]  # a private server may need none


def _path(config: Config) -> Diagnosis:
    place, path = config.place("data.path"), Path(config.data.path).expanduser()
    readable = path.exists() and os.access(path, os.R_OK)
    if readable:
        return Diagnosis(name="data", status="ok", detail=str(path), needed=True)
    what = "cannot be read" if path.exists() else "does not exist"
    fix = "correct the path, or make it readable"
    return Diagnosis(name="data", status="missing", detail=f"{place}: {path} {what}", fix=fix, needed=True)
