"""What `[inference]` says about servers, checked against the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.rooms.inference.table import InferenceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`[inference]` for an engine that is a server; `place` names `url` in messages.

    `urls` end without a slash and without `/v1`. `headers` carry the key, which stands nowhere else.
    """

    urls: tuple[str, ...]
    place: str
    headers: dict[str, str]
    logprobs: str = "engine"
    max_gap: float = 0.1
    keep_versions: int = 2
    adapter_dir: str = ""
    max_concurrent: int = 256
    timeout_s: float = 600.0
    retry_s: float = 300.0
    prefix_caching: bool = True


def settings_from(config: Config, default_url: str) -> Settings:
    """The settings; ConfigError when the key's environment variable is empty."""
    table = config.table("inference", InferenceTable)
    urls = [url.strip() for url in (table.url or default_url).split(",") if url.strip()]
    return Settings(
        urls=tuple(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in urls)),
        place=config.place("inference.url"),
        headers=_headers(table.api_key_env, config),
        logprobs=table.logprobs,
        max_gap=table.max_gap,
        keep_versions=table.keep_versions,
        adapter_dir=table.adapter_dir,
        max_concurrent=table.max_concurrent,
        timeout_s=table.timeout_s,
        retry_s=table.retry_s,
        prefix_caching=table.prefix_caching,
    )


def _headers(variable: str, config: Config) -> dict[str, str]:
    if not variable:
        return {}
    value = os.environ.get(variable, "").strip()
    if not value:
        what = f"the environment variable {variable} is empty"
        where = config.place("inference.api_key_env")
        raise ConfigError(Problem(where=where, what=what, fix=f"export {variable}=..., or leave the key out"))
    return {"Authorization": f"Bearer {value}"}
