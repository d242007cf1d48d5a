"""`[inference]`: which engine samples completions, and how."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import field_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.text.secrets import server_urls

# Where a server listens unless [inference] url, or [teacher] url, says otherwise.
DEFAULT_URLS = {
    "vllm": "http://127.0.0.1:8000",
    "openai": "http://127.0.0.1:8000",
    "sglang": "http://127.0.0.1:30000",
    "mlx": "http://127.0.0.1:8080",
}


class InferenceTable(Table):
    """Which engine samples completions, and how. The keys from `url` to `api_key_env` apply to servers."""

    engine: str = key("pytorch", "pytorch, or a server: max, vllm, sglang, mlx, openai.", names=Kind.INFERENCE_ENGINE)
    options: dict[str, Any] = key({}, "Options of an engine plugin.")
    url: str = key(
        "",
        "URL of the server, or several with commas; empty = the engine's own on this machine.",
        free_on_resume=True,
        needs="inference.engine",
    )
    admin_url: str = key(
        "",
        "URLs of the servers behind a router at url, with commas: weights go to each.",
        free_on_resume=True,
        needs="inference.engine",
    )
    logprobs: Literal["engine", "trainer"] = key(
        "engine", "Behaviour log-probabilities: the engine's own, or recomputed with the training model."
    )
    max_gap: float = key(
        0.1,
        "Stop when engine and trainer differ by more on a probe; mean, in nats.",
        gt=0.0,
        free_on_resume=True,
        needs="inference.engine",
    )
    keep_versions: int = key(
        2, "Policy versions whose adapters a server keeps.", ge=1, free_on_resume=True, needs="inference.engine"
    )
    adapter_dir: str = key(
        "",
        "Folder for adapters that every server can read; empty = a temporary one.",
        free_on_resume=True,
        is_path=True,
        needs="inference.engine",
    )
    max_concurrent: int = key(
        256, "Requests in flight at a time, over all servers.", ge=1, free_on_resume=True, needs="inference.engine"
    )
    timeout_s: float = key(
        600.0, "Seconds that one request may take.", gt=0.0, free_on_resume=True, needs="inference.engine"
    )
    retry_s: float = key(
        300.0,
        "Seconds during which a failed request is retried; 0 = never.",
        ge=0.0,
        free_on_resume=True,
        needs="inference.engine",
    )
    api_key_env: str = key(
        "",
        "Environment variable that holds the server's key; empty = none.",
        free_on_resume=True,
        needs="inference.engine",
    )
    attention_kernel: Literal["default", "flash", "triton", "tk", "cutlass"] = key(
        "default", "Attention kernel of the pytorch engine; default = the best available.", flag="attention_kernel"
    )
    dtype: Literal["auto", "bf16", "fp8", "fp4"] = key(
        "auto", "Weights that the pytorch engine samples with; auto = those of training. The gap is logged."
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8", "int8"] = key(
        "auto", "Keys and values cached by the pytorch engine; auto = dtype.", flag="kv_cache_dtype"
    )
    prefix_caching: bool = key(True, "Compute a prompt's keys and values once for its group.", flag="prefix_caching")

    _urls = field_validator("url", "admin_url")(server_urls)


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
        table, headers = config.table("inference", InferenceTable), {}
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
