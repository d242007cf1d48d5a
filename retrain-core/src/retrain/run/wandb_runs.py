"""Opens wandb runs, and finds their key without importing wandb."""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from retrain.run.fault_guard import reason_of

LOG = logging.getLogger("retrain")
# An unreachable server must not keep a finished run waiting forever.
FINISH_TIMEOUT_S = 300.0
# By default wandb collects the command line, the git remote and the console, including any secrets in them.
PRIVATE = {"x_disable_meta": True, "disable_git": True, "disable_code": True, "console": "off", "silent": True}
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


def open_run(arguments: Mapping[str, Any]) -> Any:
    """Return `wandb.init` of the arguments, offline where nothing can be sent."""
    import wandb

    settings: dict[str, Any] = dict(PRIVATE)
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        settings |= {"finish_timeout": FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    run: Any
    mode = wandb.setup().settings.mode
    if mode not in ("online", "shared"):
        run = wandb.init(**arguments, settings=wandb.Settings(**settings))
        if mode != "disabled":
            LOG.info("wandb run %s is kept in %s", run.id, Path(run.dir).parent)
        return run
    try:
        # wandb's prompt for a key would be hidden by the live panel, and the run would wait for it.
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key; run `wandb login`, or set WANDB_API_KEY")
        run = wandb.init(**arguments, settings=wandb.Settings(**settings))
        LOG.info("wandb run %s: %s", run.id, run.url)
    # No key, no network, no such entity: the run can still be recorded locally.
    except Exception as error:
        run = wandb.init(**arguments, mode="offline", settings=wandb.Settings(**settings))
        place = Path(run.dir).parent
        LOG.warning("wandb works offline (%s). Upload the run later with: wandb sync %s", reason_of(error), place)
    return run
