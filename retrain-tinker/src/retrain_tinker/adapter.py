"""Downloads adapters of the service, and makes each a folder that PEFT, vLLM and `retrain squeeze` read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from retrain.api import BackendError, Config, Problem
from retrain_tinker.options import TinkerOptions, base_url_of
from retrain_tinker.service import Service

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
WANTED = (CONFIG_FILE, WEIGHTS_FILE)
ARCHIVE = "adapter.tar"
CHUNK = 2**20
REMOTE = "tinker://"
DOING = "downloading an adapter"
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?[AB](?:\.weight)?")


def download(urls: Mapping[str, str], folder: Path, timeout_s: float) -> None:
    """Fetch an adapter's two files into an existing folder, from single files or from one archive.

    Only regular files with these two names are extracted from an archive, at any depth: no links, no other paths.
    """
    archive = folder / ARCHIVE
    for name, url in urls.items():
        if not name:
            _fetch(url, archive, timeout_s)
            try:
                with tarfile.open(archive) as opened:
                    for member in opened:
                        kept = PurePosixPath(member.name).name
                        source = opened.extractfile(member) if member.isreg() and kept in WANTED else None
                        if source is not None:
                            with (folder / kept).open("wb") as stream:
                                shutil.copyfileobj(source, stream, CHUNK)
            except (tarfile.TarError, EOFError, OSError) as error:
                raise _unusable(DOING, f"its archive is broken: {error}") from error
            finally:
                archive.unlink(missing_ok=True)
        elif PurePosixPath(name).name in WANTED:
            _fetch(url, folder / PurePosixPath(name).name, timeout_s)
    missing = [name for name in WANTED if not (folder / name).is_file()]
    if missing:
        raise _unusable(DOING, f"it has no {missing[0]}")


def repair(folder: Path, base_model: str) -> None:
    """Make `adapter_config.json` match the weights.

    Without target modules PEFT would apply its defaults for the architecture and silently drop all other weights, so
    they are derived from the names of the weights; `base_model_name_or_path` becomes the model's path here.
    """
    from safetensors import safe_open

    path = folder / CONFIG_FILE
    try:
        document = dict(json.loads(path.read_text(encoding="utf-8")).items())
        with safe_open(str(folder / WEIGHTS_FILE), framework="numpy") as opened:
            names = list(opened.keys())
    except Exception as error:  # the JSON and safetensors readers raise various types
        raise _unusable(str(folder), f"it cannot be read: {type(error).__name__}: {error}") from error
    modules = sorted({match["module"].rpartition(".")[2] for name in names if (match := _FACTOR.fullmatch(name))})
    if not modules:
        raise _unusable(str(folder / WEIGHTS_FILE), "it holds no LoRA factors")
    # A pattern such as "all-linear" is taken to name every module.
    targets = document.get("target_modules")
    named = {str(target).rpartition(".")[2] for target in targets} if isinstance(targets, list) else set()
    if not isinstance(targets, str) and not named.issuperset(modules):
        document["target_modules"] = modules
    document |= {"base_model_name_or_path": base_model, "inference_mode": True, "task_type": "CAUSAL_LM"}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fetch(url: str, file: Path, timeout_s: float) -> None:
    import httpx

    try:
        with httpx.stream("GET", url, timeout=timeout_s, follow_redirects=True) as answer:
            answer.raise_for_status()
            with file.open("wb") as stream:
                stream.writelines(answer.iter_bytes(CHUNK))
    except httpx.HTTPError as error:
        reason = f"status {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        # without the address: a signed URL is a credential
        raise _unusable(DOING, f"it could not be downloaded: {reason}") from None


def _unusable(where: str, reason: str) -> BackendError:
    what = f"the service's adapter cannot be used: {reason}"
    fix = "resume the run, or do without the adapter: set [backend.options] download_adapter = false"
    return BackendError(Problem(code="tinker.unusable-adapter", where=where, what=what, fix=fix))


def fetch_adapter(path: str, config: Config) -> Path | None:
    """Return the adapter at a `tinker://` path, downloaded once and cached; None for any other path.

    Paths are immutable on the service. A training state (`.../weights/NAME`) is exported first; the export occupies an
    adapter slot on the service for a moment.
    """
    if not path.startswith(REMOTE):
        return None
    service = Service(base_url_of(config), TinkerOptions())
    key = hashlib.sha256(f"{service.base_url} {path}".encode()).hexdigest()[:32]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "retrain" / "tinker"
    kept = cache / key
    if all((kept / name).is_file() for name in WANTED):
        return kept
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            draft = Path(scratch, "adapter")
            draft.mkdir()
            service.connect()
            if "/weights/" in path:
                service.restore(path)
                path = service.export_adapter("fetched")
            download(service.download_urls(path), draft, service.options.timeout_s)
            repair(draft, config.model.model)
            shutil.rmtree(kept, ignore_errors=True)
            draft.rename(kept)
    except OSError as error:
        what = f"the adapter cannot be kept: {error.strerror or error}"
        fix = "make room there, or set XDG_CACHE_HOME to a folder that can be written"
        raise BackendError(Problem(code="tinker.cache-not-writable", where=str(cache), what=what, fix=fix)) from error
    finally:
        service.close()
    return kept
