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
    """Plain data, without the key, which is in the environment variable `key_variable` and nowhere else."""

    model: str
    base_url: str
    key_variable: str
    rubric: str
    marker_key: int  # of the hash that marks where an answer begins and ends
    time_limit_s: float
    max_tokens: int
    temperature: float
    concurrency: int
    requests_per_minute: int
    tokens_per_minute: int
    retries: int
    price_in: float
    price_out: float

    @property
    def is_openai(self) -> bool:
        """Whether this is OpenAI's own API, which has another name for the token limit."""
        return self.base_url == OPENAI_URL

    @property
    def is_local(self) -> bool:
        """Whether the judge runs on this machine."""
        return (urlsplit(self.base_url).hostname or "") in LOOPBACK

    def key(self) -> str:
        """The key, read now."""
        return os.environ.get(self.key_variable, "").strip() or (NO_KEY if self.is_local else "")


def settings_from(config: Config, marker_key: int) -> JudgeSettings:
    """The settings; ConfigError lists every fault, a missing key or library included."""
    table = config.table("reward", RewardTable)
    time_limit_s = time_limit_of(config, "judge")
    settings = JudgeSettings(
        model=table.judge_model,
        base_url=table.judge_base_url.rstrip("/") or OPENAI_URL,
        key_variable=table.judge_api_key_env,
        rubric=table.judge_prompt or DEFAULT_RUBRIC,
        marker_key=marker_key,
        time_limit_s=time_limit_s,
        max_tokens=table.judge_max_tokens,
        temperature=table.judge_temperature,
        concurrency=_useful_concurrency(table, time_limit_s),
        requests_per_minute=table.judge_requests_per_minute,
        tokens_per_minute=table.judge_tokens_per_minute,
        retries=table.judge_retries,
        price_in=table.judge_price_in,
        price_out=table.judge_price_out,
    )
    problems = _problems(settings, config)
    if problems:
        raise ConfigError(*problems)
    return settings


def _useful_concurrency(table: RewardTable, time_limit_s: float) -> int:
    """At most as many calls as the rate allows in half of the time limit, which includes the time they wait."""
    if not table.judge_requests_per_minute:
        return table.judge_concurrency
    return max(1, min(table.judge_concurrency, int(table.judge_requests_per_minute * time_limit_s / 120.0)))


def _problems(settings: JudgeSettings, config: Config) -> list[Problem]:
    found = []
    if not settings.model.strip():
        where, what = config.place("reward.judge_model"), "reward 'judge' needs a model"
        found.append(Problem(where=where, what=what, fix='set [reward] judge_model, for example "gpt-4o-mini"'))
    if reason := problem_with_rubric(settings.rubric):
        where, fix = config.place("reward.judge_prompt"), "write literal braces twice: {{ and }}"
        found.append(Problem(where=where, what=reason, why="it is filled in for every completion", fix=fix))
    url_problem = _problem_with_url(settings.base_url)
    if url_problem:
        where = config.place("reward.judge_base_url")
        found.append(Problem(where=where, what=url_problem, fix="give something like http://localhost:8000/v1"))
    elif not settings.key():
        where, name = config.place("reward.judge_api_key_env"), settings.key_variable
        what = f"the environment variable {name} holds no key for the judge at {urlsplit(settings.base_url).hostname}"
        fix = f"export {name}, put it into .env, or name another variable; a server on this machine needs none"
        found.append(Problem(where=where, what=what, fix=fix))
    try:
        import openai  # noqa: F401  (now, because importing it in the first call would block the event loop)
    except ImportError as error:
        where, what = config.place("reward.judge_model"), "reward 'judge' needs the library openai"
        found.append(Problem(where=where, what=what, why=str(error), fix=install_line("retrain-rewards", "judge")))
    return found


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
