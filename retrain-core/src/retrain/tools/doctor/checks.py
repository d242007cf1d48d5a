"""The findings of retrain-core: distributions, plugins, folders, model, servers, and the parts of a configuration."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from dataclasses import replace
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis, Status
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, RetrainError
from retrain.kernel.plugins.first_party import CORE, own_distributions, provider
from retrain.kernel.registry import Plugins
from retrain.kernel.version import __version__
from retrain.records.campaign_table import CampaignTable, is_campaign
from retrain.records.folder import check_run_folder
from retrain.run.check import selected_parts
from retrain.run.tables import registered_tables
from retrain.run.wandb_runs import wandb_key
from retrain.tools.doctor.diagnosis import diagnose_distribution, diagnose_extra, diagnose_server
from retrain.tools.installation import examine

# Roughly the checkpoints of a LoRA run on a 4B model.
LOW_DISK_BYTES = 5 * 10**9
HUB_TIMEOUT_S = 10.0
SERVERS = {"inference.url": "inference server", "model.base_url": "training service"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def diagnose_parts(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    selected = selected_parts(config, plugins, registered_tables(plugins)) if config else []
    needed = {part.distribution or provider(part.kind, part.name) for part in selected}
    found = []
    for name, purpose in own_distributions().items():
        each = diagnose_distribution(name, purpose=purpose, needed=name in needed)
        if name in plugins.left_out and each.status == "ok":
            detail = f"{each.detail}, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out"
            fix = f"take {name} out of RETRAIN_BLOCK, or add it to RETRAIN_PLUGINS"
            each = replace(each, status="failed" if name in needed else "warn", detail=detail, fix=fix)
        found.append(each)
    recorders = {part.name for part in selected if part.kind is Kind.RECORDER}
    launcher = config.table("campaign", CampaignTable).launcher if config and is_campaign(config) else ""
    wanted = {name: (f"recorder {name!r}", name in recorders) for name in ("wandb", "tensorboard", "trackio", "mlflow")}
    wanted["ray"] = "launcher 'ray'", launcher == "ray"
    found += [diagnose_extra(CORE, name, purpose=purpose, needed=needed) for name, (purpose, needed) in wanted.items()]
    for failure in plugins.failures:  # the only cause of exit code 1 without a configuration
        detail = f"{failure.owner.source}: {failure.error}"
        fix = f"repair, upgrade or uninstall {failure.owner.distribution}"
        name, is_needed = f"plugin {failure.owner}", config is None
        found.append(Diagnosis(name=name, status="failed", detail=detail, fix=fix, needed=is_needed))
    used = {(part.kind, part.name) for part in selected}
    for kind in Kind:
        for name in dict.fromkeys(entry.spec.name for entry in plugins.registered(kind)):
            owners = [entry.owner for entry in plugins.find(kind, name)]
            if len(owners) > 1 and (kind, name) not in used:
                detail = f"provided twice: by {' and by '.join(map(str, owners))}; this configuration does not use it"
                fix = f"leave one out with RETRAIN_BLOCK={owners[-1].distribution}"
                found.append(Diagnosis(name=f"{kind} {name}", status="warn", detail=detail, fix=fix))
    for part in selected:
        name = f"{part.kind} {part.name}"
        if part.problem is None:
            found.append(Diagnosis(name=name, status="ok", detail=part.source, needed=True))
        else:
            found.append(_missing(name, f"{part.problem.where}: {part.problem.what}", part.problem.fix))
    return found


def _missing(name: str, detail: str, fix: str) -> Diagnosis:
    return Diagnosis(name=name, status="missing", detail=detail, fix=fix, needed=True)


def diagnose_machine(config: Config | None) -> list[Diagnosis]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    python = Diagnosis(name="python", status="ok", detail=f"{detail}, retrain {__version__}", needed=config is not None)
    found = examine()
    status: Status = "ok" if found.is_whole else "failed" if found.public or found.missing else "warn"
    whole = Diagnosis(name="installation", status=status, detail=found.detail, fix=found.fix, needed=not found.is_whole)
    return [python, whole, _run_folder(config) if config else _disk(Path.cwd(), name="disk")]


def _run_folder(config: Config) -> Diagnosis:
    if resumed := config.resume.from_:
        return _disk(Path(resumed).expanduser(), name="run folder")
    place = config.place("logging.log_dir")
    try:
        check_run_folder(config.logging.log_dir, config.backend.adapter_path, place=place)
    except ConfigError as error:
        problem = error.problems[0]
        return replace(_missing("run folder", f"{place}: {problem.what}", problem.fix), status="failed")
    return _disk(Path(config.logging.log_dir).expanduser(), name="run folder", needed=True)


def _disk(folder: Path, *, name: str, needed: bool = False) -> Diagnosis:
    existing = next((each for each in (folder, *folder.absolute().parents) if each.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    is_low = free < LOW_DISK_BYTES
    return Diagnosis(
        name=name,
        status="warn" if is_low else "ok",
        detail=f"{folder}: {free / 1e9:.1f} GB free",
        fix="free some space: a full disk ends the run at a checkpoint" if is_low else "",
        needed=needed,
    )


def diagnose_reach(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    """Return findings on the model's files, every server with a URL in the configuration, and wandb's key.

    Without a configuration only the hub is checked.
    """
    if config is None:
        hub = diagnose_server("hub", os.environ.get("HF_ENDPOINT") or "https://huggingface.co", needed=False)
        offline = "models and data sets must come from folders or from the cache"
        return [hub if hub.status == "ok" else replace(hub, status="warn", fix=offline)]
    found = [_model(config, plugins)]
    for path, name in SERVERS.items():
        urls = [url.strip() for url in config.value(path, "").split(",") if url.strip()]
        servers = [diagnose_server(name, url, needed=True) for url in urls]
        # One server that answers is enough for a run to start.
        if any(each.status == "ok" for each in servers):
            servers = [each if each.status == "ok" else replace(each, status="warn") for each in servers]
        found += servers
    parts = {(part.kind, part.name) for part in selected_parts(config, plugins, registered_tables(plugins))}
    if (Kind.RECORDER, "wandb") in parts:
        has_key, detail = wandb_key()
        missing = _missing("wandb key", detail, "`wandb login`, or WANDB_MODE=offline")
        found.append(replace(missing, status="ok", fix="") if has_key else missing)
    return found


def _model(config: Config, plugins: Plugins) -> Diagnosis:
    name, place = config.model.model, config.place("model.model")
    try:
        located = plugins.locate_model(name)
    except RetrainError as error:
        return _missing("model", error.problems[0].what, error.problems[0].fix)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        try:
            json.loads((folder / "config.json").read_text(encoding="utf-8"))
            names = {entry.name for entry in folder.iterdir()}
        except (OSError, ValueError) as error:
            reason = f"{folder / 'config.json'} cannot be read: {getattr(error, 'strerror', None) or error}"
            fix = "give a folder that save_pretrained() wrote and that you can read"
            return _missing("model", f"{place}: {reason}", fix)
        if not names.intersection(TOKENIZER_FILES):
            fix = "save the tokenizer there: save_pretrained()"
            return _missing("model", f"{place}: {folder} holds no tokenizer", fix)
        return Diagnosis(name="model", status="ok", detail=str(folder), needed=True)
    if name.startswith("builtin:"):
        fix = "retrain-local ships builtin:tiny: install it, or unblock it"
        return _missing("model", f"{place}: no plugin ships {name!r}", fix)
    if name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        fix = "give a model folder, a hub id, or builtin:tiny"
        return _missing("model", f"{place}: there is no folder {name!r}", fix)
    return _on_the_hub(name, place)


def _on_the_hub(name: str, place: str) -> Diagnosis:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    detail = f"{name} on the hub"
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        fix = "accept its terms on its page, then run `hf auth login`"
        return _missing("model", f"{place}: {name!r} is gated", fix)
    except RepositoryNotFoundError:
        fix = "correct it; private models need `hf auth login`"
        return _missing("model", f"{place}: no model {name!r} on the hub", fix)
    # A network fault, whose type depends on the client library inside the hub package.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            what = f"{place}: {name!r} is not in the cache, and the hub cannot be reached ({reason})"
            return _missing("model", what, "check the connection, or give a local folder")
        detail = f"{name}: cached; the hub cannot be reached ({reason})"
    return Diagnosis(name="model", status="ok", detail=detail, needed=True)
