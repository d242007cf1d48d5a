"""An adapter from the service as a folder that PEFT, vLLM and `retrain squeeze` read right."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from retrain.api import BackendError, Problem

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
WANTED = (CONFIG_FILE, WEIGHTS_FILE)
ARCHIVE = "adapter.tar"
CHUNK = 2**20
DOING = "downloading an adapter"
FIX = "export it again; a run goes on without it: set [backend.options] download_adapter = false"
_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:embedding_)?[AB](?:\.weight)?")


def download(urls: Mapping[str, str], folder: Path, timeout_s: float) -> None:
    """Fetch an adapter's two files into an existing folder, from single files or from one archive.

    Of an archive only regular files of these names are taken, wherever they stand in it: no link, no other path.
    """
    archive = folder / ARCHIVE
    for name, url in urls.items():
        if not name:
            _fetch(url, archive, timeout_s)
            try:
                _unpack(archive, folder)
            finally:
                archive.unlink(missing_ok=True)
        elif PurePosixPath(name).name in WANTED:
            _fetch(url, folder / PurePosixPath(name).name, timeout_s)
    missing = [name for name in WANTED if not (folder / name).is_file()]
    if missing:
        raise BackendError(Problem(where=DOING, what=f"the service's adapter has no {missing[0]}", fix=FIX))


def repair(folder: Path, base_model: str) -> None:
    """Make `adapter_config.json` say what the weights are.

    A config without target modules lets PEFT apply its defaults for the architecture and drop all other weights without
    an error, so they are taken from the weights' names; `base_model_name_or_path` becomes the model as known here.
    """
    path = folder / CONFIG_FILE
    try:
        document = dict(json.loads(path.read_text(encoding="utf-8")).items())
        names = _tensor_names(folder / WEIGHTS_FILE)
    except Exception as error:  # the readers of JSON and safetensors raise kinds of their own
        what = f"the service's adapter cannot be read: {type(error).__name__}: {error}"
        raise BackendError(Problem(where=str(folder), what=what, fix=FIX)) from error
    modules = sorted({match["module"].rpartition(".")[2] for name in names if (match := _FACTOR.fullmatch(name))})
    if not modules:
        raise BackendError(Problem(where=str(folder / WEIGHTS_FILE), what="holds no LoRA factors", fix=FIX))
    if not _covers(document.get("target_modules"), modules):
        document["target_modules"] = modules
    document |= {"base_model_name_or_path": base_model, "inference_mode": True, "task_type": "CAUSAL_LM"}
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _covers(targets: Any, modules: Iterable[str]) -> bool:
    """Whether every adapted module is named; a pattern such as "all-linear" is taken at its word."""
    if isinstance(targets, str):
        return True
    return isinstance(targets, list) and set(modules) <= {str(target).rpartition(".")[2] for target in targets}


def _tensor_names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="numpy") as opened:
        return list(opened.keys())


def _fetch(url: str, file: Path, timeout_s: float) -> None:
    import httpx

    try:
        with httpx.stream("GET", url, timeout=timeout_s, follow_redirects=True) as answer:
            answer.raise_for_status()
            with file.open("wb") as stream:
                for chunk in answer.iter_bytes(CHUNK):
                    stream.write(chunk)
    except httpx.HTTPError as error:
        reason = f"status {error.response.status_code}" if isinstance(error, httpx.HTTPStatusError) else str(error)
        what = f"the adapter could not be downloaded: {reason}"  # not the address: a signed one is a key
        raise BackendError(
            Problem(what=what, fix="resume the run, or set [backend.options] download_adapter = false")
        ) from None


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = PurePosixPath(member.name).name
                source = opened.extractfile(member) if member.isreg() and name in WANTED else None
                if source is None:
                    continue
                with (folder / name).open("wb") as stream:
                    while chunk := source.read(CHUNK):
                        stream.write(chunk)
    except (tarfile.TarError, EOFError, OSError) as error:
        what = f"the service's adapter archive is broken: {error}"
        raise BackendError(Problem(where=DOING, what=what, fix=FIX)) from error
