"""Shows that a record written before the runs is still the one that was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "sha256"


def hash_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of plain data, independent of the order of its keys; what is not JSON counts as its text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def seal_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a record without its own `sha256`, as canonical JSON (sorted keys, no spaces, UTF-8)."""
    hashed = {name: value for name, value in content.items() if name != SEAL}
    text = json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
