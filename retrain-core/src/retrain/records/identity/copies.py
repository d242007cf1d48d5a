"""Copies of a run's inputs in its folder: `<run>/inputs/files.json` lists every hashed file, next to the copies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from retrain.records.files import reported, write_text
from retrain.records.identity.hashing import Budget, hash_file
from retrain.records.reading import read_regular, table_of
from retrain.text.secrets import hide_text, redacted

if TYPE_CHECKING:
    from retrain.records.identity.collect import Identity

FOLDER, FILES = "inputs", "files.json"
SECRET_WORDS = (
    *("secret", "passw", "credential", "_token", "://", "?key=", "&key=", "?token=", "&token="),
    *(f"{name}key" for name in ("api", "api_", "access", "access_", "private", "private_", "signing", "signing_")),
    *(f"{name}token" for name in ("auth", "access", "bearer", "refresh")),
)
DETAILS = ("files", "root")  # what `run.json` leaves out


def write_inputs(run: Path, identity: Identity, *, kept_as: str = "") -> None:
    """Write `<run>/inputs`; with `kept_as` an earlier one stays there as `<run>/inputs/<kept_as>`."""
    folder, fresh = run / FOLDER, run / f".{FOLDER}.tmp"
    with reported(folder):
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        kept = [(kind, file) for kind, file in identity.files if file.content]
        texts = _public_texts(file.content for _, file in kept)
        for (kind, file), text in zip(kept, texts, strict=True):
            target = fresh / copy_name(kind, file.name)
            with suppress(OSError):  # a name that this folder cannot have; on a full disk the next write fails
                if text:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text.encode("utf-8", "surrogateescape"))
        write_text(fresh / FILES, json.dumps(identity.as_data(), separators=(",", ":"), allow_nan=False) + "\n")
        # Each step leaves a whole folder behind, under this name or a hidden one.
        if folder.exists() and kept_as:
            folder.rename(fresh / kept_as)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def stored_identity(run: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity in a run's manifest, with its files if `inputs/files.json` belongs to it; {} without one."""
    summary = manifest.get("identity")
    if not isinstance(summary, dict):
        return {}
    with suppress(OSError, ValueError, RecursionError):
        listed = json.loads(read_regular(run / FOLDER / FILES))
        # Any other list is of another start of the run, or was edited: then only the digests in run.json count.
        if without_files(listed) == summary:
            return {**listed, FOLDER: str(run / FOLDER)}
    return dict(summary)


def without_files(identity: Any) -> Any:
    """Return the form in `run.json` of the content of `inputs/files.json`."""
    if not isinstance(identity, dict):
        return None
    return {
        key: without_files(each) if isinstance(each, dict) else each
        for key, each in identity.items()
        if key not in DETAILS
    }


def copy_name(kind: str, name: str) -> PurePosixPath:
    """Return the path of a copy below `inputs`: never outside it, whatever the names."""
    path = f"{kind if kind in ('code', 'data') else f'plugins/{kind}'}/{name}"
    parts = PurePosixPath(path.replace("\0", "")).parts
    return PurePosixPath(*(part.replace("..", "up") for part in parts if part not in ("/", "~")))


def text_of(path: str | Path) -> str:
    """Return a text file as its copy would be; empty if it is binary, unreadable or too large."""
    return _public_texts([hash_file("", path, Budget()).content])[0]


def _public_texts(contents: Iterable[bytes]) -> list[str]:
    """Return the texts without their secrets; empty for a binary file."""
    texts = ["" if b"\0" in content else content.decode("utf-8", "surrogateescape") for content in contents]
    shown: list[str] = redacted(texts)  # all at once: secrets are looked up once
    # `hide_text` takes a hundred times as long as this look for its words.
    return [hide_text(text) if any(word in text.lower() for word in SECRET_WORDS) else text for text in shown]


def input_digests(identity: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return equal values for two identities without a change between them; no list of files is needed."""
    if not identity:
        return ()
    kinds = tuple(table_of(identity, kind).get("digest") for kind in ("code", "data", "model"))
    names = sorted(table_of(identity, "plugins"))
    plugins = tuple((name, *map(table_of(identity, "plugins", name).get, ("version", "digest"))) for name in names)
    versions, variables = (tuple(sorted(table_of(identity, each).items())) for each in ("packages", "variables"))
    return *kinds, plugins, versions, variables
