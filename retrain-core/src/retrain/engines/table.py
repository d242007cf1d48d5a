"""`[inference]`: which engine samples completions, and how."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass, field

from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.secrets import hide_text

# A server listens there unless [inference] url, or [teacher] url, says otherwise.
DEFAULT_URLS = {
    "vllm": "http://127.0.0.1:8000",
    "openai": "http://127.0.0.1:8000",
    "sglang": "http://127.0.0.1:30000",
    "mlx": "http://127.0.0.1:8080",
}
KEYS = ("logprobs", "attention_kernel", "dtype", "kv_cache_dtype")
FLAGS = {
    "attention_kernel": "--attention-backend",
    "dtype": "--dtype or --quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
}
OWN_FLAGS = {"vllm": FLAGS, "sglang": FLAGS, "max": {"dtype": "--quantization-encoding"}}  # the known ones
THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1", "0.0.0.0", "::"})
PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`[inference]` for an engine that is a server.

    `urls` and `admin_urls` end without a slash and without `/v1`; weights go to the latter, or to `urls` if it is
    empty. Only `headers` hold the key.
    """

    urls: tuple[str, ...]
    admin_urls: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    table: InferenceTable = field(default_factory=InferenceTable)

    @classmethod
    def of(cls, config: Config, engine: str) -> Settings:
        """Read the settings; ConfigError when the environment variable of the key is empty."""
        table, headers = config.inference, {}
        if table.api_key_env:
            value = os.environ.get(table.api_key_env, "").strip()
            if not value:
                what = f"the environment variable {table.api_key_env} is empty"
                fix = f"export {table.api_key_env}=..., or leave the key out"
                where = config.place("inference.api_key_env")
                raise ConfigError(Problem(code="engine.empty-key", where=where, what=what, fix=fix))
            headers["Authorization"] = f"Bearer {value}"
        urls, admin_urls = listed(table.url or DEFAULT_URLS.get(engine, "")), listed(table.admin_url)
        if admin_urls and len(urls) > 1:
            what = f"it names servers behind a router, and url names {len(urls)} servers"
            fix = "set url to the router's address, or leave admin_url out"
            where = config.place("inference.admin_url")
            raise ConfigError(Problem(code="engine.router-urls", where=where, what=what, fix=fix))
        return cls(urls=urls, admin_urls=admin_urls, headers=headers, table=table)


def listed(urls: str) -> tuple[str, ...]:
    stripped = [url.strip() for url in urls.split(",") if url.strip()]
    return tuple(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in stripped))


def unsupported_keys(config: Config, plugins: Plugins, servers: Collection[str]) -> list[Problem]:
    """Report each key that is not at its default and not among the traits of the engine.

    `servers` are the engines with separate options for some keys. A backend without an engine checks its own.
    """
    table, default = config.inference, InferenceTable()
    traits = plugins.traits_of(Kind.INFERENCE_ENGINE, table.engine, EngineTraits)
    if traits is None:
        return []
    problems = []
    for name in KEYS:
        value = getattr(table, name)
        if value == getattr(default, name) or name in traits.honours:
            continue
        where, what = config.place(f"inference.{name}"), f"engine {table.engine!r} does not support {name} = {value!r}"
        if table.engine not in servers:
            problems.append(Problem(code="engine.unsupported-key", where=where, what=what, fix="remove it"))
            continue
        flag = OWN_FLAGS.get(table.engine, {}).get(name, "its own option for it")
        fix = f"remove it, and start the server with {flag}"
        problems.append(Problem(code="engine.option-of-server", where=where, what=what, fix=fix))
    return problems


def teacher_problems(config: Config) -> list[Problem]:
    """Report a server of `[teacher]` that is also one of `[inference]`, however its address is written."""
    sampling = config.inference
    engine, url = config.teacher.engine, config.teacher.url
    if engine not in DEFAULT_URLS or sampling.engine not in DEFAULT_URLS.keys() | {"max"}:
        return []
    sampled = _addresses(sampling.url or DEFAULT_URLS.get(sampling.engine, "")) | _addresses(sampling.admin_url)
    shared = [given for address, given in _addresses(url or DEFAULT_URLS[engine]).items() if address in sampled]
    if not shared:
        return []
    where = config.place("teacher.url" if url else "teacher.engine")
    what = f"the teacher's server {hide_text(shared[0])} is the one that samples"
    why = "the run changes its weights, and a vLLM that takes adapters cannot teach"
    fix = "start a second server for the teacher, and name it in [teacher] url"
    return [Problem(code="teacher.shares-server", where=where, what=what, why=why, fix=fix)]


def _addresses(urls: str) -> dict[tuple[str, int, str], str]:
    found: dict[tuple[str, int, str], str] = {}
    for url in listed(urls):
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname or ""
        found["localhost" if host in THIS_MACHINE else host, parts.port or PORTS[parts.scheme], parts.path] = url
    return found
