"""Checks, without importing wandb, that it has all it needs to send a run: for `doctor`, and for its recorder."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

MODES_WITHOUT_KEY = ("offline", "dryrun", "disabled")
VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SETTINGS = ("$WANDB_CONFIG_DIR/settings", "~/.config/wandb/settings", "$WANDB_DIR/wandb/settings", "wandb/settings")


def wandb_key() -> tuple[bool, str]:
    """True if there is a key, or none is needed, and its place; otherwise the host for which it is missing."""
    if (mode := os.environ.get("WANDB_MODE", "")) in MODES_WITHOUT_KEY:
        return True, f"none needed: WANDB_MODE={mode}"
    if given := next((name for name in VARIABLES if os.environ.get(name)), ""):
        return True, f"{given} is set"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    for file in _files(os.environ.get("NETRC", ""), "~/.netrc", "~/_netrc"):
        try:
            if netrc.netrc(file).authenticators(host):
                return True, f"for {host}, in {file}"
        except (OSError, netrc.NetrcParseError):
            continue
    # A settings file may name a key, another host or a mode, so wandb decides.
    for file in _files(*SETTINGS):
        if file.is_file():
            return True, f"left to {file}"
    return False, f"no key for {host}"


def _files(*paths: str) -> list[Path]:
    return [Path(os.path.expandvars(path)).expanduser() for path in paths if path]
