"""The judge's keys of `[reward]`, checked before anything heavy loads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from retrain.api import Config, ConfigError, Problem, install_line
from retrain_rewards.deadline import time_limit_of
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.judge.prompt import DEFAULT_RUBRIC, problem_with_rubric

OPENAI_URL = "https://api.openai.com/v1"
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
NO_KEY = "none-needed"  # sent to a server on this machine when there is no key


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSettings:
    """The judge's keys of `[reward]`; its API key is in the environment variable that they name and nowhere else."""

    table: RewardTable
    marker_key: int  # of the hash that marks where an answer begins and ends
    time_limit_s: float

    @property
    def base_url(self) -> str:
        return self.table.judge_base_url.rstrip("/") or OPENAI_URL

    @property
    def rubric(self) -> str:
        return self.table.judge_prompt or DEFAULT_RUBRIC

    @property
    def concurrency(self) -> int:
        """At most as many calls as the rate allows in half of the time limit, which includes the time they wait."""
        rate = self.table.judge_requests_per_minute * self.time_limit_s / 120.0
        return max(1, min(self.table.judge_concurrency, int(rate))) if rate else self.table.judge_concurrency

    @property
    def is_openai(self) -> bool:
        """True for OpenAI's own API, which has another name for the token limit."""
        return self.base_url == OPENAI_URL

    @property
    def is_local(self) -> bool:
        return (urlsplit(self.base_url).hostname or "") in LOOPBACK

    def key(self) -> str:
        return os.environ.get(self.table.judge_api_key_env, "").strip() or (NO_KEY if self.is_local else "")


def settings_from(config: Config, marker_key: int) -> JudgeSettings:
    """The settings; ConfigError lists every fault, a missing key or library included."""
    table, time_limit_s = config.table("reward", RewardTable), time_limit_of(config, "judge")
    own = {name: getattr(table, name) for name in RewardTable.model_fields if name.startswith("judge_")}
    plain = RewardTable(type="judge", **own)  # a model that can be pickled, whatever other plugins add to the table
    settings = JudgeSettings(table=plain, marker_key=marker_key, time_limit_s=time_limit_s)
    found = []

    def refuse(key: str, what: str, fix: str, why: str = "") -> None:
        found.append(Problem(where=config.place(f"reward.{key}"), what=what, why=why, fix=fix))

    if not table.judge_model.strip():
        refuse("judge_model", "reward 'judge' needs a model", 'set [reward] judge_model, for example "gpt-4o-mini"')
    if reason := problem_with_rubric(settings.rubric):
        why = "it is filled in for every completion"
        refuse("judge_prompt", reason, "write literal braces twice: {{ and }}", why)
    if reason := _problem_with_url(settings.base_url):
        refuse("judge_base_url", reason, "give something like http://localhost:8000/v1")
    elif not settings.key():
        name, host = table.judge_api_key_env, urlsplit(settings.base_url).hostname
        what = f"the environment variable {name} holds no key for the judge at {host}"
        fix = f"export {name}, put it into .env, or name another variable; a server on this machine needs none"
        refuse("judge_api_key_env", what, fix)
    try:
        import openai  # noqa: F401  (now, because importing it in the first call would block the event loop)
    except ImportError as error:
        what, fix = "reward 'judge' needs the library openai", install_line("retrain-rewards", "judge")
        refuse("judge_model", what, fix, str(error))
    if found:
        raise ConfigError(*found)
    return settings


def _problem_with_url(url: str) -> str:
    """What is wrong with the URL, without the URL itself, which may hold a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not a URL"
    if parts.scheme not in ("http", "https") or not host:
        return "is not the URL of an API: it begins with http:// or https:// and names a host"
    if parts.username or parts.password:
        return "holds a login: put the key into the environment variable that judge_api_key_env names"
    if parts.query or parts.fragment:
        return "must end with a path: a query or fragment cannot stand in the root of an API"
    return ""
