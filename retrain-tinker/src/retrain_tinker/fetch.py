"""Downloads `tinker://...` to a local folder, for `retrain squeeze` and every other reader of adapters."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from retrain.api import BackendError, Config, Problem
from retrain_tinker.adapter import WANTED, download, repair
from retrain_tinker.options import TinkerOptions, base_url_of
from retrain_tinker.service import Service

REMOTE = "tinker://"


def fetch_adapter(path: str, config: Config) -> Path | None:
    """The adapter at a `tinker://` path, downloaded once and cached; None for any other path.

    Paths are immutable on the service. A training state (`.../weights/NAME`) is exported first; the export occupies an
    adapter slot on the service for a moment.
    """
    if not path.startswith(REMOTE):
        return None
    options, base_url = TinkerOptions(), base_url_of(config)
    key = hashlib.sha256(f"{base_url} {path}".encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrain" / "tinker"
    kept = cache / key
    if all((kept / name).is_file() for name in WANTED):
        return kept
    service = Service(base_url, options)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache))
        try:
            service.connect()
            if "/weights/" in path:
                service.restore(path)
                path = service.export_adapter("fetched")
            download(service.download_urls(path), scratch, options.timeout_s)
            repair(scratch, config.model.model)
            shutil.rmtree(kept, ignore_errors=True)
            scratch.rename(kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        what = f"the adapter cannot be kept: {error.strerror or error}"
        fix = "make room there, or set XDG_CACHE_HOME to a folder that can be written"
        raise BackendError(Problem(where=str(cache), what=what, fix=fix)) from error
    finally:
        service.close()
    return kept
