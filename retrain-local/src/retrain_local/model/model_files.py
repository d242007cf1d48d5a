"""Files of a base model, in a folder, at the hub or in its cache, and the model that a run of all weights writes."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from retrain.api import BackendError, Config, ConfigError, Plugins, Problem
from retrain_local.memory.limits import is_out_of_memory
from retrain_local.model.weights import INDEX, SINGLE, Reader, file_names

COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
CONFIG_FILE, MASTER_FILE = "config.json", "master_weights.safetensors"
KEY = "model.model"
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
log = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of weights: `path` is a folder or hub id; `offline`: do not contact the hub, use its cache."""

    path: str
    offline: bool


def find_source(name: str, where: str, plugins: Plugins) -> Source:
    """Find a local folder with safetensors, a model that a plugin ships, or a hub id; ConfigError otherwise."""
    located = plugins.locate_model(name)
    path = Path(located or name).expanduser()
    if located is not None or path.is_dir():
        check_folder(path, where)
        return Source(path=str(path.resolve()), offline=True)
    if path.exists():
        what, fix = f"{name!r} is a file", "give the folder that holds config.json"
        raise ConfigError(Problem(code="model.not-a-folder", where=where, what=what, fix=fix))
    if name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        what, fix = f"there is no folder {name!r}", "give an existing folder, a hub id, or builtin:tiny"
        raise ConfigError(Problem(code="model.no-such-folder", where=where, what=what, fix=fix))
    return _on_the_hub(name, where)


def check_folder(folder: Path, where: str) -> None:
    file, fix = folder / "config.json", "give the complete folder of a transformers model"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        document = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or "model_type" not in document:
            raise ValueError("it names no model_type")
    except FileNotFoundError as error:
        what = f"not a model folder, {error.filename} is missing"
        raise ConfigError(Problem(code="model.incomplete-folder", where=where, what=what, fix=fix)) from None
    except (OSError, ValueError, RecursionError) as error:
        what = f"{file} cannot be used: {error}"
        raise ConfigError(Problem(code="model.bad-config-json", where=where, what=what, fix=fix)) from None
    if {SINGLE, INDEX}.isdisjoint(names):
        pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        why = f"it holds {pickled[0]}, and pickled weights can run code" if pickled else ""
        what, fix = f"{folder} holds no {SINGLE}", "save the model with save_pretrained()"
        raise ConfigError(Problem(code="model.no-safetensors", where=where, what=what, why=why, fix=fix))


def _on_the_hub(name: str, where: str) -> Source:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # One quick request first: loading retries every file for half a minute.
    try:
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Source(path=name, offline=False)
    except GatedRepoError:
        what = f"the hub shows {name!r} only to users who accepted its terms"
        fix = "accept them on its page, then run `hf auth login`"
        raise ConfigError(Problem(code="model.gated", where=where, what=what, fix=fix)) from None
    except RepositoryNotFoundError:
        what = f"there is no folder {name!r} here and no such model on the hub"
        fix = "correct the name; private models need `hf auth login`"
        raise ConfigError(Problem(code="model.not-on-hub", where=where, what=what, fix=fix)) from None
    # Network errors of any class: they depend on the client library that the hub package uses.
    except Exception as error:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            log.info("The hub cannot be reached; using the cached copy of %s.", name)
            return Source(path=name, offline=True)
        what = f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached: {first_line(error)}"
        fix = "check the connection, or use builtin:tiny"
        raise ConfigError(Problem(code="model.hub-unreachable", where=where, what=what, fix=fix)) from None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A model's folder: `document` is config.json, `name` the user's text, `where` its place in the configuration."""

    source: Source
    document: dict[str, Any]
    name: str
    where: str
    trust_remote_code: bool

    def refused(self, *, code: str, what: str, fix: str, why: str = "") -> ConfigError:
        return ConfigError(Problem(code=code, where=self.where, what=what, why=why, fix=fix))

    def weights(self) -> Path:
        """Return the folder of the safetensors files, downloaded first if it comes from the hub."""
        first = Path(self.source.path)
        if first.is_dir():
            return first
        index = _optional(self.source, INDEX)
        if index is None:
            return _fetched(self.source, SINGLE).parent
        for name in file_names(index.parent):
            _fetched(self.source, name)
        return index.parent

    def eos_ids(self) -> frozenset[int]:
        """Return the end-of-sequence ids of generation_config.json, or of config.json if it does not exist."""
        path = _optional(self.source, "generation_config.json")
        document = self.document if path is None else json.loads(path.read_text(encoding="utf-8"))
        configured = document.get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(id_) for id_ in ids if id_ is not None)

    def companions(self) -> tuple[Path, ...]:
        return tuple(path for name in COMPANIONS if (path := _optional(self.source, name)) is not None)

    @contextmanager
    def refusals(self, device: torch.device) -> Iterator[None]:
        """Turn any error while reading the model into a ConfigError, or a BackendError if memory ran out."""
        try:
            yield
        except (ConfigError, BackendError):
            raise
        # Readers and architectures raise errors of any class, and the configured model is at fault in all of them.
        except Exception as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                what = f"the model does not fit on {device}: {first_line(error)}"
                fix = "use a smaller model or a larger GPU"
                raise BackendError(Problem(code="memory.model-too-large", what=what, fix=fix)) from error
            what = f"{self.name!r} cannot be loaded: {first_line(error)}"
            if "trust_remote_code" in str(error):
                fix = "set [model] trust_remote_code = true if you trust the code that comes with this model"
                raise self.refused(code="model.needs-its-code", what=what, fix=fix) from error
            fix = "check that its files are complete and that this version of transformers knows its architecture"
            raise self.refused(code="model.not-loadable", what=what, fix=fix) from error


def open_folder(config: Config, source: Source, name: str = "") -> Folder:
    """Read config.json of `[model] model`, or of `name`."""
    where, trust = config.place(KEY), config.model.trust_remote_code
    folder = Folder(source=source, document={}, name=name or config.model.model, where=where, trust_remote_code=trust)
    with folder.refusals(torch.device("cpu")):
        document = json.loads(_fetched(source, CONFIG_FILE).read_text(encoding="utf-8"))
    folder.document.update(document)
    return folder


def _fetched(source: Source, name: str) -> Path:
    """Return a file of the folder, or of the hub's repository, downloaded unless `source` is offline."""
    folder = Path(source.path)
    if folder.is_dir():
        return folder / name
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source.path, name, local_files_only=source.offline))


def _optional(source: Source, name: str) -> Path | None:
    file = Path(source.path) / name
    if file.parent.is_dir():
        return file if file.is_file() else None
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return _fetched(source, name)
    except LocalEntryNotFoundError:  # not in the cache, or the hub did not answer
        if not source.offline:
            raise
    except EntryNotFoundError:
        pass
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The rest of a model's folder: config.json, files to copy, the dtype of each tensor, and `fixed` (untrained) ones.

    `others` are tensors of the files in `source` that were not loaded, such as a vision tower's.
    """

    document: Mapping[str, Any]
    companions: tuple[Path, ...]
    dtypes: Mapping[str, torch.dtype]
    fixed: Mapping[str, Tensor] = field(default_factory=dict)
    source: Path = Path()
    others: Collection[str] = ()

    @property
    def is_exact(self) -> bool:
        """True if model.safetensors holds the trained fp32 numbers themselves."""
        return all(dtype == torch.float32 for dtype in self.dtypes.values())

    @property
    def weights_file(self) -> str:
        """The file of a checkpoint with the unrounded trained numbers."""
        return SINGLE if self.is_exact else MASTER_FILE


def save_model(files: ModelFiles, tensors: Mapping[str, Tensor], folder: Path) -> None:
    # on the host: a GPU that is full of weights and moments has no room for another copy
    rounded = {name: tensor.cpu().to(files.dtypes[name]) for name, tensor in tensors.items()}
    if files.others:
        with Reader(files.source, torch.device("cpu"), torch.float32) as reader:
            for name in files.others:
                rounded[name] = reader.read(name, torch.empty(reader.shape(name), dtype=reader.dtype(name)))
    save_tensors(rounded | dict(files.fixed), folder / SINGLE)
    write_json(folder / CONFIG_FILE, files.document)
    for file in files.companions:
        shutil.copyfile(file, folder / file.name)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(content), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    # without tensors safetensors 0.4 writes a header with metadata that it cannot read
    save_file(plain, file, metadata={"format": "pt"} if plain else None)
