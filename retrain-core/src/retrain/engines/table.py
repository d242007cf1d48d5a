"""`[inference]`: which engine samples completions, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem

# Where a server listens unless [inference] url, or [teacher] url, says otherwise.
DEFAULT_URLS = {
    "vllm": "http://127.0.0.1:8000",
    "openai": "http://127.0.0.1:8000",
    "sglang": "http://127.0.0.1:30000",
    "mlx": "http://127.0.0.1:8080",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`[inference]` for an engine that is a server.

    `urls` and `admin_urls` end without a slash and without `/v1`; weights go to the latter, or to `urls` if there are
    none. `headers` are the only place that holds the key.
    """

    urls: tuple[str, ...]
    admin_urls: tuple[str, ...] = ()
    headers: dict[str, str] = field(default_factory=dict)
    table: InferenceTable = field(default_factory=InferenceTable)

    @classmethod
    def of(cls, config: Config, default_url: str) -> Settings:
        """The settings; ConfigError when the environment variable that should hold the key is empty."""
        table, headers = config.inference, {}
        if table.api_key_env:
            value = os.environ.get(table.api_key_env, "").strip()
            if not value:
                what = f"the environment variable {table.api_key_env} is empty"
                fix = f"export {table.api_key_env}=..., or leave the key out"
                raise ConfigError(Problem(where=config.place("inference.api_key_env"), what=what, fix=fix))
            headers["Authorization"] = f"Bearer {value}"
        urls, admin_urls = listed(table.url or default_url), listed(table.admin_url)
        if admin_urls and len(urls) > 1:
            what = f"it names servers behind a router, and url names {len(urls)} servers"
            fix = "set url to the router's address, or leave admin_url out"
            raise ConfigError(Problem(where=config.place("inference.admin_url"), what=what, fix=fix))
        return cls(urls=urls, admin_urls=admin_urls, headers=headers, table=table)


def listed(urls: str) -> tuple[str, ...]:
    """Several URLs as the settings hold them, each once."""
    stripped = [url.strip() for url in urls.split(",") if url.strip()]
    return tuple(dict.fromkeys(url.rstrip("/").removesuffix("/v1") for url in stripped))
