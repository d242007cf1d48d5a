"""Where the service is."""

from __future__ import annotations

import os

from retrain.api import Config


def base_url_of(config: Config) -> str:
    """`[model] base_url`, else `TINKER_BASE_URL`, else empty: the hosted service."""
    return config.model.base_url or os.environ.get("TINKER_BASE_URL", "")
