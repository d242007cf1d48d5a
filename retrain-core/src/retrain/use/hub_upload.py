"""`retrain export SUBJECT --push REPO`: the folder that goes to the Hugging Face hub, and its upload."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.reading import read_object
from retrain.run.subject import HUB_ID
from retrain.text.secrets import hide_text
from retrain.use.model_card import RUN_FILE, make_card, public_name
from retrain.use.whole_model import WholeModel, fill_new

ADAPTER_FILE = "adapter_model.safetensors"


def push(
    whole: WholeModel, repo: str, *, merged: bool, private: bool, dry_run: bool, out: Path | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Write the folder and upload it, or write it only; returns the result as data and as lines."""
    if not HUB_ID.fullmatch(repo):
        raise _usage(f"{repo!r} is no name of a repository", "give NAME or OWNER/NAME")
    if out and not dry_run:
        raise _usage("--push with --out needs --dry-run", "add --dry-run, or leave --out away")
    found = whole.subject
    if dry_run:
        folder = out or Path(repo.rpartition("/")[2])
        notes, url = _write_hub_folder(whole, folder, repo, merged=merged), ""
        line = f"{found.label}: the folder for {repo} is {folder}; nothing was uploaded"
    else:
        with tempfile.TemporaryDirectory(prefix="retrain-push-") as scratch:
            folder = Path(scratch) / "folder"
            notes = _write_hub_folder(whole, folder, repo, merged=merged)
            url = upload(folder, repo, private=private)
        line = f"{found.label} is at {url}"
    data = {"subject": found.named, "repo": repo, "folder": str(folder) if dry_run else None, "url": url or None}
    return {**data, "notes": notes}, [line, *(f"  {note}" for note in notes)]


def _write_hub_folder(whole: WholeModel, out: Path, repo: str, *, merged: bool) -> list[str]:
    """Write all that belongs into the repository into the new folder `out`; returns remarks for the user."""
    found, adapter = whole.subject, None if merged else whole.adapter
    if found.folder is None and found.run is None:
        raise _usage(f"{found.named} is an untrained model: there is nothing to push", "name a run or an adapter")
    base, notes = public_name(found.model), list[str]()
    if adapter and "/" not in base:
        notes.append(f"The base, {base}, is no repository of the hub: --format transformers pushes whole weights.")

    def fill(folder: Path) -> None:
        if adapter:
            document = {**read_object(adapter / ADAPTER_CONFIG), "base_model_name_or_path": base}
            text = json.dumps(document, indent=2, sort_keys=True) + "\n"
            (folder / ADAPTER_CONFIG).write_text(text, encoding="utf-8")
            shutil.copyfile(adapter / ADAPTER_FILE, folder / ADAPTER_FILE)
        else:
            whole.write(folder, "folder")
        card = make_card(found, repo=repo, is_adapter=adapter is not None, notes=notes)
        (folder / "README.md").write_text(card.readme, encoding="utf-8")
        if card.config:
            (folder / RUN_FILE).write_text(card.config, encoding="utf-8")

    fill_new(out, fill)
    return notes


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Make the repository if there is none, and add the folder's files as one commit; returns its address.

    BackendError says why it failed.
    """
    from huggingface_hub import HfApi, get_token

    if not get_token():
        what, fix = "there is no token for the hub", "run `hf auth login`, or set HF_TOKEN; --dry-run needs none"
        raise ConfigError(Problem(where="retrain export --push", what=what, fix=fix))
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=made.repo_id, commit_message="Trained with retrain")
    except Exception as error:  # the HTTP library's own classes, which depend on the version of huggingface_hub
        why = hide_text(" ".join(str(error).split())[:300])
        fix = "check the name, the connection and the rights of the token; --dry-run writes the folder only"
        raise BackendError(Problem(where=repo, what="the upload failed", why=why, fix=fix)) from error
    return str(made)


def _usage(what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where="command line", what=what, fix=fix))
