"""Whether the model, the servers and the keys that a run needs are within reach."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.declared import Kind
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.run.check import registered_tables
from retrain.run.selected import selected_parts
from retrain.run.wandb_key import wandb_key
from retrain.tools.doctor.diagnosis import diagnose_server

HUB_TIMEOUT_S = 10.0
SERVERS = {"inference.url": "inference server", "model.base_url": "training service"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def diagnose_reach(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    """The model's files, every server with a URL in the configuration, and wandb's key; without one, the hub."""
    if config is None:
        return [_hub()]
    found = [_model(config, plugins)]
    for path, name in SERVERS.items():
        urls = [url.strip() for url in config.value(path, "").split(",") if url.strip()]
        found += _fleet([diagnose_server(name, url, needed=True) for url in urls])
    parts = {(part.kind, part.name) for part in selected_parts(config, plugins, registered_tables(plugins))}
    return [*found, *([_wandb_key()] if (Kind.RECORDER, "wandb") in parts else [])]


def _fleet(servers: list[Diagnosis]) -> list[Diagnosis]:
    """A run can begin when one of its servers answers; the others are used once they do."""
    if all(found.status != "ok" for found in servers):
        return servers
    return [found if found.status == "ok" else replace(found, status="warn") for found in servers]


def _hub() -> Diagnosis:
    found = diagnose_server("hub", os.environ.get("HF_ENDPOINT") or "https://huggingface.co", needed=False)
    if found.status == "ok":
        return found
    return replace(found, status="warn", fix="models and data sets must come from folders or from the cache")


def _model(config: Config, plugins: Plugins) -> Diagnosis:
    name, place = config.model.model, config.place("model.model")
    try:
        located = plugins.locate_model(name)
    except RetrainError as error:
        return _bad_model(error.problems[0].what, error.problems[0].fix)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        return _in_folder(folder, place)
    if name.startswith("builtin:"):
        return _bad_model(
            f"{place}: no plugin ships {name!r}", "retrain-local ships builtin:tiny: install it, or unblock it"
        )
    if name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        return _bad_model(f"{place}: there is no folder {name!r}", "give a model folder, a hub id, or builtin:tiny")
    return _on_the_hub(name, place)


def _in_folder(folder: Path, place: str) -> Diagnosis:
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = {entry.name for entry in folder.iterdir()}
    except (OSError, ValueError) as error:
        reason = f"{folder / 'config.json'} cannot be read: {getattr(error, 'strerror', None) or error}"
        return _bad_model(f"{place}: {reason}", "give a folder that save_pretrained() wrote and that you can read")
    if not names.intersection(TOKENIZER_FILES):
        return _bad_model(f"{place}: {folder} holds no tokenizer", "save the tokenizer there: save_pretrained()")
    return Diagnosis(name="model", status="ok", detail=str(folder), needed=True)


def _on_the_hub(name: str, place: str) -> Diagnosis:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return _bad_model(f"{place}: {name!r} is gated", "accept its terms on its page, then run `hf auth login`")
    except RepositoryNotFoundError:
        return _bad_model(f"{place}: no model {name!r} on the hub", "correct it; private models need `hf auth login`")
    except Exception as error:  # a network fault, whose type depends on the client library inside the hub package
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            detail = f"{name}: cached; the hub cannot be reached ({reason})"
            return Diagnosis(name="model", status="ok", detail=detail, needed=True)
        what = f"{place}: {name!r} is not in the cache, and the hub cannot be reached ({reason})"
        return _bad_model(what, "check the connection, or give a local folder")
    return Diagnosis(name="model", status="ok", detail=f"{name} on the hub", needed=True)


def _bad_model(detail: str, fix: str) -> Diagnosis:
    return Diagnosis(name="model", status="missing", detail=detail, fix=fix, needed=True)


def _wandb_key() -> Diagnosis:
    is_found, detail = wandb_key()
    fix = "" if is_found else "`wandb login`, or WANDB_MODE=offline"
    return Diagnosis(name="wandb key", status="ok" if is_found else "missing", detail=detail, fix=fix, needed=True)
