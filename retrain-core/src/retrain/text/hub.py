"""Probes the Hugging Face hub, so that a model that cannot be found is refused at once.

By itself, `transformers` tries an unreachable hub for half a minute, and again for each file.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem

LOG = logging.getLogger("retrain")
PROBE_TIMEOUT_S = 3.0
PAUSE_S = 0.3  # before the second try: a name server may fail once
# Faults of the route; a timeout or a reset connection may be a busy hub that `transformers` may well reach.
NO_ROUTE = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})
OTHER_CACHES = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE")  # of older versions


def hub_options(name: str, *, where: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a hub id: only the cache when the hub cannot be reached.

    ConfigError when the cache does not hold the model either. A hub that is slow to answer counts as reachable.
    """
    from huggingface_hub import constants

    fault = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if not fault:
        return {}
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots"
    # An older variable may name another cache that only `transformers` knows how to read.
    if not any(map(os.environ.get, OTHER_CACHES)) and not any(snapshots.glob("*/*")):
        what = f"{name!r} is neither a folder here nor in the cache, and the hub is out of reach: {fault}"
        way = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect once"
        fix = f"correct the name, give a local folder, or {way} so that it is downloaded"
        raise ConfigError(Problem(code="model.hub-unreachable", where=where, what=what, fix=fix))
    return {"local_files_only": True}


@lru_cache(maxsize=4)
def _unreachable(endpoint: str) -> str:
    """Return why the hub cannot be connected; empty when it can, or when it is only slow."""
    from huggingface_hub import get_session

    fault = ""
    for pause_s in (0.0, PAUSE_S):
        time.sleep(pause_s)
        try:
            get_session().head(endpoint, timeout=PROBE_TIMEOUT_S)
            return ""
        except Exception as error:  # the HTTP library's own class; it depends on the version of huggingface_hub
            fault = _no_connection(error)
            if not fault:
                LOG.info("%s did not answer within %g s; trying again", endpoint, PROBE_TIMEOUT_S)
                return ""
    return f"{endpoint} cannot be reached ({fault})"


def _no_connection(error: BaseException | None) -> str:
    """The error in the chain of causes that shows there is no route to the hub; empty for any other."""
    while error is not None:
        if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in NO_ROUTE):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""
